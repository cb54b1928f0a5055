"""A run that is killed at any moment is continued by the same command, and ends with the very same result."""

import pandas as pd
import pytest
import torch

from tests.test_experiment import compose
from tnvp import experiment, tracking
from tnvp.config import Config
from tnvp.results import RunDirectory
from tnvp.resume import Checkpointing

SMALL = [
    "epochs=2", "model.widths=[16,8]", "optimizer.lr=0.1", "pruning.trace_every=3",
    "tracking=none", "progress=false",
]  # fmt: skip
ONE_SHOT = ["pruning=one_shot", "pruning.finetune_epochs=1"]
GRADUAL = ["pruning=gradual", "pruning.start_step=2", "pruning.end_step=16", "pruning.every=4"]
THRESHOLD = ["pruning=threshold", "pruning.every=6", "pruning.threshold=0.8"]
RUNS = {
    "none": ["pruning=none", "model.dropout=0.2", "dataset.crop_padding=1", "dataset.flip=true"],
    "one_shot": [*ONE_SHOT, "trunks=null", "model.batch_norm=true"],
    "one_shot, trunk": [*ONE_SHOT, "pruning.window=ema", "pruning.criterion=taylor", "model.dropout=0.2"],
    "one_shot, adamw, fresh": [*ONE_SHOT, "optimizer=adamw", "optimizer.schedule=cosine", "pruning.optimizer_state=fresh"],
    "one_shot, adam, reset": [*ONE_SHOT, "optimizer=adam", "pruning.optimizer_state=reset", "pruning.mode=mask", "trunks=null"],
    "gradual": [*GRADUAL, "model.dropout=0.2", "pruning.window=since_prune"],
    "gradual, mask": [*GRADUAL, "pruning.mode=mask", "optimizer=adam", "optimizer.schedule=constant"],
    "gradual, random": [*GRADUAL, "pruning.criterion=random", "pruning.window=ema", "precision=float16"],
    "gradual, obs": [*GRADUAL, "pruning.criterion=obs", "pruning.compensation=affine", "precision=bfloat16"],
    "threshold": [*THRESHOLD, "optimizer=adamw", "model.batch_norm=true", "dataset.crop_padding=1"],
    "threshold, mask": [*THRESHOLD, "pruning.mode=mask", "pruning.criterion=variance_preactivation"],
    "scratch": ["pruning=scratch", "pruning.finetune_epochs=0"],
}  # fmt: skip


class Killed(BaseException):
    """The process is gone."""


def small(folder, *overrides: str) -> Config:
    return compose(*SMALL, f"runs={folder}", *overrides)


def finished(config: Config) -> RunDirectory:
    experiment.run(config)
    return RunDirectory.open(experiment.run_path(config))


def without_times(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "seconds"}


def assert_same(one: RunDirectory, other: RunDirectory) -> None:
    """All that both left behind agrees, bit for bit."""
    assert one.metrics_path.read_bytes() == other.metrics_path.read_bytes()
    assert list(map(without_times, one.events())) == list(map(without_times, other.events()))
    assert without_times(one.summary) == without_times(other.summary)
    pd.testing.assert_frame_equal(one.traces(), other.traces())
    ours, theirs = (torch.load(run.model_path, weights_only=True)["state"] for run in (one, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one.is_complete and not one.checkpoint_path.exists()


def dies_at(monkeypatch, steps: list[int]) -> None:
    """Each of the next runs ends after one of these steps, before a checkpoint of it."""
    left, real = list(steps), Checkpointing.on_step

    def on_step(self, fit):
        if left and fit.step == left[0]:
            left.pop(0)
            raise Killed
        real(self, fit)

    monkeypatch.setattr(Checkpointing, "on_step", on_step)


@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_run_goes_on_bit_for_bit(kind, tmp_path, monkeypatch):
    """Killed with no checkpoint, within epochs, at their ends, after events; some checkpoints are some steps older."""
    undisturbed = finished(small(tmp_path / "a", *RUNS[kind]))
    steps = [1, 5, 11, 13, 17, 22] + [26] * bool(undisturbed.metrics()["step"].max() > 22)
    dies_at(monkeypatch, steps)
    config = small(tmp_path / "b", *RUNS[kind], "checkpoint_steps=4")
    for _ in steps:
        with pytest.raises(Killed):
            experiment.run(config)
    assert_same(finished(config), undisturbed)


class Recorded(tracking.Tracker):
    """Remembers the rows of all calls. A server that has some of a run's rows already is told them again."""

    where = "somewhere"

    def __init__(self):
        self.rows = []

    def log(self, record):
        self.rows.append({key: value for key, value in record.items() if value is not None})

    def event(self, record):
        self.rows.append(without_times(record))

    def histogram(self, name, values, step):
        self.rows.append((name, list(values), step))


@pytest.mark.parametrize("kind", ["one_shot, trunk", "gradual"])
def test_a_run_that_goes_on_tells_the_tracker_the_same_rows_in_the_same_order(kind, tmp_path, monkeypatch):
    trackers = []
    monkeypatch.setattr(experiment, "start_tracking", lambda *a: trackers.append(Recorded()) or trackers[-1])
    monkeypatch.setattr(experiment, "PART_ROWS", 50)
    config = small(tmp_path / "a", *RUNS[kind])
    finished(config)
    (whole,) = [tracker.rows for tracker in trackers]
    dies_at(monkeypatch, {"gradual": [9, 17]}.get(kind, [13, 27]))
    config = small(tmp_path / "b", *RUNS[kind], "checkpoint_steps=4")
    for _ in range(2):
        with pytest.raises(Killed):
            experiment.run(config)
    finished(config)
    assert trackers[-1].rows == whole
    assert {type(row) for row in whole} == {dict, tuple} and any("groups" in row for row in whole)
    for part in trackers[1:-1]:
        assert part.rows == whole[: len(part.rows)]
