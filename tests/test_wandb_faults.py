"""A W&B server that refuses, hangs, dies or comes back: the run ends as without it, says so once, and its rows get there later.

`kill -STOP` makes a server hang: its port goes on to accept, and nothing answers.
"""

import json
import logging
import re
import signal
import socket
import sys
from pathlib import Path

import pandas as pd
import pytest

import run
from tests.test_tracking import history, read_records
from tests.wandb_server import free_port, isolate, listing
from tnvp import results, tracking
from tnvp.results import RunDirectory
from tnvp.resume import Checkpointing

pytestmark = pytest.mark.slow
TINY = [
    "experiment=digits", "epochs=2", "pruning.finetune_epochs=1", "model.widths=[8]", "pruning.trace_every=2",
    "trunks=null", "progress=false", "tracking=wandb", "tracking.mode=online",
]  # fmt: skip


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """No W&B of an earlier test, and short waits."""
    import wandb

    wandb.teardown()
    isolate(tmp_path, monkeypatch)
    monkeypatch.setattr(tracking, "INIT_SECONDS", 20.0)
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 3.0)
    yield
    wandb.teardown()


@pytest.fixture
def online(server, monkeypatch):
    """A server that this process's runs go to."""
    for name, value in server.access.items():
        monkeypatch.setenv(name, value)
    return server


def start(monkeypatch, *words: str) -> int:
    """run.py in this process; its status."""
    monkeypatch.setattr(sys, "argv", ["run.py", *TINY, *words])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return run.main()


def at_step(monkeypatch, actions: dict) -> None:
    """Call an action after its step."""
    left, real = dict(actions), Checkpointing.on_step

    def on_step(self, fit):
        left.pop(fit.step, lambda: None)()
        real(self, fit)

    monkeypatch.setattr(Checkpointing, "on_step", on_step)


def warnings_of(caplog) -> list[str]:
    """What a person is told; W&B's own logger reaches no terminal."""
    ours = (record for record in caplog.records if record.name == "tnvp.tracking")
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def only_run(folder: Path) -> RunDirectory:
    (summary,) = folder.glob("*/*/summary.json")
    return RunDirectory.open(summary.parent)


def rows(directory: RunDirectory) -> list[dict]:
    """The lines of metrics.jsonl, without what they leave empty."""
    lines = map(json.loads, directory.metrics_path.read_text().splitlines())
    return [{key: value for key, value in line.items() if value is not None} for line in lines]


def assert_has_all(server, identity: str, directory: RunDirectory) -> None:
    """The server has each value of each line at one place, in order, and no other.

    Uploading again, W&B names the place of each row, and the new one takes it; this server keeps both, at the same place.
    """
    points = {key: dict(values) for key, values in server.points(identity).items()}
    assert all(len(set(values)) == len(points[key]) for key, values in server.points(identity).items())
    for key in {key for row in rows(directory) for key in row} - {"step", "epoch", "phase"}:
        expected = [row[key] for row in rows(directory) if key in row]
        assert [value for _, value in sorted(points[key].items())] == pytest.approx(expected), key


@pytest.mark.parametrize("fault", ["refuses", "hangs"])
def test_a_server_that_does_not_answer_costs_one_line_and_no_run(fault, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setattr(tracking, "INIT_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if fault == "hangs" else free_port()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        assert start(monkeypatch, f"runs={tmp_path}") == 0
    (warning,) = warnings_of(caplog)
    (where,) = re.findall(r"`wandb sync (\S+)` uploads it; tracking.mode=offline skips the attempt", warning)
    assert capfd.readouterr().err == ""
    assert [row for row in history(read_records(where)) if "train/loss" in row] == rows(only_run(tmp_path))


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_server_lost_during_a_run_gets_all_of_it_by_sync(fault, online, tmp_path, monkeypatch, caplog, capfd):
    lose = online.stop if fault == "dies" else lambda: online.process.send_signal(signal.SIGSTOP)
    at_step(monkeypatch, {9: lose})
    try:
        assert start(monkeypatch, f"runs={tmp_path}") == 0
    finally:
        online.process.send_signal(signal.SIGCONT)
    (warning,) = warnings_of(caplog)
    command = re.search(r"uploaded by `wandb sync (--include-online \S+)`; tracking.mode=offline needs no", warning)[1]
    assert "Traceback" not in capfd.readouterr().err
    if fault == "dies":
        online.start()
    online.sync(*command.split())
    assert_has_all(online, command.rpartition("-")[2], only_run(tmp_path))


def test_a_server_that_comes_back_during_a_run_misses_nothing(online, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 60.0)
    at_step(monkeypatch, {9: online.stop, 20: online.start})
    assert start(monkeypatch, f"runs={tmp_path}") == 0
    assert warnings_of(caplog) == []
    (where,) = tmp_path.glob("*/*/wandb/run-*")
    assert_has_all(online, where.name.rpartition("-")[2], only_run(tmp_path))
    assert online.knows(where.name.rpartition("-")[2])[0]["state"] == "finished"


def test_a_sweep_is_the_same_table_from_the_server_as_from_its_folders(online, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 60.0)
    assert start(monkeypatch, "-m", "seed=0,1", "tracking.tags=[a]", f"runs={tmp_path}/runs") == 0
    out = tmp_path / "server.csv"
    with listing(online) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        assert results.main(["export", "--from", "wandb", "default/tnvp", "--csv", str(out)]) == 0
    results.publish(results.table(tmp_path / "runs"), tmp_path / "folders.csv")
    fetched, kept = results.published(out), results.published(tmp_path / "folders.csv")
    pd.testing.assert_frame_equal(fetched, kept, check_dtype=False)  # a server tells 10.0 as 10
    assert len(fetched) == 2
