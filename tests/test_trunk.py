"""A trunk is trained once for all runs that share it, and makes no difference to their results."""

import multiprocessing
import pickle
import time

import pandas as pd
import pytest
import torch

from tests.test_experiment import compose
from tnvp import events, experiment, trunk
from tnvp.config import Config
from tnvp.results import RunDirectory

SMALL = [
    "pruning.dense_epochs=2", "pruning.finetune_epochs=1", "model.widths=[32,16]", "model.dropout=0.2",
    "dataset.crop_padding=1", "optimizer.lr=0.1", "tracking=none", "progress=false",
]  # fmt: skip


def small(tmp_path, *overrides: str) -> Config:
    return compose(*SMALL, f"runs={tmp_path}", *overrides)


def branch(tmp_path, *overrides: str) -> tuple[dict, RunDirectory]:
    config = small(tmp_path, *overrides)
    return experiment.run(config), RunDirectory.open(experiment.run_path(config))


def trunks(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / ".trunks").glob("*.pt*"))


@pytest.fixture
def trainings(monkeypatch):
    """The phases that were trained, in order."""
    phases, real = [], experiment.train
    monkeypatch.setattr(experiment, "train", lambda *a, **k: phases.append(k["phase"]) or real(*a, **k))
    return phases


def without_times(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "seconds"}


def test_a_run_is_the_same_bit_for_bit_with_a_trunk_and_without(tmp_path, trainings):
    for overrides in (
        ["pruning.criterion=variance"],
        ["pruning.criterion=variance", "pruning.window=ema"],
        ["pruning.criterion=variance", "pruning.window=since_prune", "pruning.scope=global"],
        ["pruning.criterion=variance", "pruning.window=calibration"],
        ["pruning.criterion=variance_preactivation", "pruning.compensation=act_of_mean"],
        ["pruning.criterion=taylor", "pruning.compensation=none"],
        ["pruning.criterion=apoz"],
        ["pruning.criterion=obs", "pruning.compensation=affine"],
        ["pruning.criterion=random", "pruning.mode=mask"],
    ):
        (shared, one), (alone, other) = (
            branch(tmp_path / name, *overrides, *more) for name, more in {"a": [], "b": ["trunks=null"]}.items()
        )
        assert without_times(shared) == without_times(alone)
        assert one.model_path.read_bytes() == other.model_path.read_bytes()
        assert one.metrics_path.read_bytes() == other.metrics_path.read_bytes()
        assert list(map(without_times, one.events())) == list(map(without_times, other.events()))
        pd.testing.assert_frame_equal(one.traces(), other.traces())
    assert trainings.count("dense") == 1 + 9 and trainings.count("finetune") == 18
    assert len(trunks(tmp_path / "a")) == 1 and not (tmp_path / "b" / ".trunks").exists()


def test_a_run_from_a_trunk_counts_the_seconds_that_it_took(tmp_path):
    first, _ = branch(tmp_path)
    second, _ = branch(tmp_path, "pruning.sparsity=0.25")
    ((path,),) = [list((tmp_path / ".trunks").glob("*.pt"))]
    assert min(first["seconds"], second["seconds"]) > trunk.read(path)["seconds"] > 0


@pytest.mark.parametrize(
    "other", ["seed=1", "optimizer.lr=0.05", "pruning.dense_epochs=1", "pruning.ignore=[fc1]", "dataset.split_seed=1"]
)
def test_another_trunk_is_trained_where_it_differs(other, tmp_path, trainings):
    branch(tmp_path)
    branch(tmp_path, other)
    assert trainings.count("dense") == 2 and len(trunks(tmp_path)) == 2


def test_other_code_or_data_of_the_same_name_make_another_trunk(tmp_path, monkeypatch):
    weights = [torch.ones(3)]
    path = trunk.trunk_path(tmp_path, "abc", ["cpu"], weights)
    assert path == trunk.trunk_path(tmp_path, "abc", ["cpu"], [torch.ones(3)])
    assert path != trunk.trunk_path(tmp_path, "abc", ["cuda"], weights)
    assert path != trunk.trunk_path(tmp_path, "abc", ["cpu"], [torch.tensor([1.0, 1, 2])])
    monkeypatch.setattr(trunk, "CODE", ("training.py",))
    assert path != trunk.trunk_path(tmp_path, "abc", ["cpu"], weights)


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: b"torn"])
def test_a_damaged_trunk_is_set_aside_and_trained_anew(damage, tmp_path, trainings):
    expected, _ = branch(tmp_path)
    (path,) = (tmp_path / ".trunks").glob("*.pt")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=r"damaged .* trained anew"):
        again, _ = branch(tmp_path, "force=true")
    assert without_times(again) == without_times(expected)
    assert trainings.count("dense") == 2 and trunks(tmp_path) == [path.name, f"{path.name}.old-1"]


def test_a_trunk_that_can_not_be_kept_costs_no_run(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.warns(UserWarning, match="can't be kept"):
        trunk.write(tmp_path / "x", {})


def test_a_broken_off_training_leaves_no_trunk_and_no_lock(tmp_path, monkeypatch, trainings):
    with monkeypatch.context() as broken:
        broken.setattr(events.Recording, "on_epoch", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            branch(tmp_path)
    assert trunks(tmp_path) == []
    branch(tmp_path)
    assert len(trunks(tmp_path)) == 1


def _branch_slowly(tmp_path, criterion: str, trained) -> None:
    real = experiment.train

    def train(*args, **keywords):
        trained.put(keywords["phase"])
        if keywords["phase"] == "dense":
            time.sleep(0.5)  # the other process arrives meanwhile
        return real(*args, **keywords)

    experiment.train = train
    branch(tmp_path, f"pruning.criterion={criterion}")


def test_two_processes_at_once_train_one_trunk(tmp_path):
    context = multiprocessing.get_context("spawn")
    trained = context.Queue()
    workers = [context.Process(target=_branch_slowly, args=(tmp_path, name, trained)) for name in ("variance", "l2")]
    for worker in workers:
        worker.start()
    phases = sorted(trained.get(timeout=120) for _ in range(3))
    for worker in workers:
        worker.join(timeout=120)
        assert worker.exitcode == 0
    assert phases == ["dense", "finetune", "finetune"] and trained.empty()
    assert len(list(tmp_path.glob("digits/*/summary.json"))) == 2


def test_pruning_while_training_keeps_no_trunk(tmp_path):
    more = ["tracking=none", "progress=false", "epochs=1", f"runs={tmp_path}"]
    experiment.run(compose("pruning=threshold", "pruning.every=10", *more))
    assert not (tmp_path / ".trunks").exists()


class Malicious:
    def __reduce__(self):
        return print, ("code ran",)


def test_a_malicious_trunk_runs_nothing(tmp_path, capsys):
    path = tmp_path / "trunk.pt"
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        write({"format": trunk.FORMAT, "model": Malicious()}, path)
        with pytest.warns(UserWarning, match="is damaged"):
            assert trunk.read(path) is None
    assert "code ran" not in capsys.readouterr().out
