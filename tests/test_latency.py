"""Latency: networks are timed in turns, every pass counts once, and the table says what it is of. No times are asserted."""

import pandas as pd
import pytest
import torch
from torch import nn

import tnvp
from tnvp import latency, models


class Counted(nn.Module):
    """Writes its name down at each pass."""

    def __init__(self, name: str, calls: list):
        super().__init__()
        self.name, self.calls = name, calls

    def forward(self, inputs):
        self.calls.append((self.name, torch.is_inference_mode_enabled()))
        return inputs


def test_networks_take_turns():
    calls = []
    times = latency.measure([Counted("dense", calls), Counted("pruned", calls)], torch.zeros(1), n=4, warmup=2)
    assert calls == [("dense", True), ("pruned", True)] * 6
    assert [len(mine) for mine in times] == [4, 4]


@pytest.fixture
def model(tmp_path):
    network = models.build("mlp", shape=(1, 4, 4), classes=3, widths=[8])
    tnvp.Pruner(network, example_inputs=torch.zeros(2, 1, 4, 4), criterion="l2", compensation="none").prune(
        sparsity=0.5
    )
    path = tmp_path / "some-run" / "model.pt"
    path.parent.mkdir()
    tnvp.save(network, path)
    return path


def test_a_row_a_model_device_and_batch(model, tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        assert latency.main([str(model), "-n", "3", "--csv", str(tmp_path / "latency.csv")]) == 0
    finally:
        torch.set_num_threads(threads)
    table = pd.read_csv(tmp_path / "latency.csv")
    cpu = table[table["device"] == "cpu"]
    assert cpu["batch"].tolist() == [1, 256] and (table["run"] == "some-run").all() and (table["n"] == 3).all()
    assert (table[["dense_ms", "pruned_ms"]] > 0).all(axis=None)
    pd.testing.assert_series_equal(table["ratio"], table["dense_ms"] / table["pruned_ms"], check_names=False)
    assert "some-run" in capsys.readouterr().out


def test_the_original_has_its_own_widths(model, monkeypatch):
    seen = []
    monkeypatch.setattr(latency, "measure", lambda networks, inputs, n: seen.extend(networks) or [[1.0], [1.0]])
    latency.compare(model, "cpu", 2, 1)
    dense, pruned = ([parameter.shape for parameter in network.parameters()] for network in seen)
    assert dense[0][0] == 8 and pruned[0][0] == 4


def test_what_is_no_model_is_named(tmp_path, capsys):
    assert latency.main([str(tmp_path / "none.pt")]) == 2
    assert "none.pt" in capsys.readouterr().err
