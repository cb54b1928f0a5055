"""A run that is killed at any moment is continued by the same command, and ends with the very same result."""

import fcntl
import gc
import io
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import run
from tests.processes import resident_mebibytes
from tests.test_experiment import compose
from tnvp import experiment, resume, tracking
from tnvp.config import Config
from tnvp.continuation import understood
from tnvp.events import PruneEvent
from tnvp.journal import Journal
from tnvp.locks import is_held, locked
from tnvp.results import ResultsError, RunDirectory
from tnvp.resume import Checkpointing, Interrupts, Stopped
from tnvp.run_state import Checkpoints
from tnvp.training import Fit, TrainingError, Validation

SMALL = [
    "epochs=2", "model.widths=[16,8]", "optimizer.lr=0.1", "pruning.trace_every=3",
    "tracking=none", "progress=false",
]  # fmt: skip
ONE_SHOT = ["pruning=one_shot", "pruning.finetune_epochs=1"]
GRADUAL = ["pruning=gradual", "pruning.start_step=2", "pruning.end_step=16", "pruning.every=4"]
ITERATIVE = ["pruning=iterative", "pruning.start_step=4", "pruning.events=3", "pruning.every=6"]
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
    "iterative": [*ITERATIVE, "pruning.window=since_prune", "optimizer=adam", "model.dropout=0.2"],
    "threshold": [*THRESHOLD, "optimizer=adamw", "model.batch_norm=true", "dataset.crop_padding=1"],
    "threshold, mask": [*THRESHOLD, "pruning.mode=mask", "pruning.criterion=variance_preactivation"],
    "scratch": ["pruning=scratch", "pruning.finetune_epochs=0"],
    "gradual, cnn": [*GRADUAL, "model=vgg11_bn", "model.width=0.0625"],
    "gradual, parts": [*GRADUAL, "optimizer=adam"],  # of the trace, as long runs have them
}  # fmt: skip


QUICK = [
    "none",
    "one_shot, trunk",
    "one_shot, adamw, fresh",
    "gradual, random",
    "iterative",
    "threshold",
    "scratch",
    "gradual, parts",
]


class Killed(BaseException):
    """The process is gone."""


def small(folder, *overrides: str) -> Config:
    others = any(override.startswith("model=") for override in overrides)  # than MLPs, which have no widths
    return compose(*(o for o in SMALL if not (others and "widths" in o)), f"runs={folder}", *overrides)


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


def parts_are_written(kind: str, monkeypatch) -> None:
    """Several of the trace, if the kind is one for that."""
    if kind.endswith("parts"):
        monkeypatch.setattr(experiment, "PART_ROWS", 50)


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in RUNS])
def test_a_killed_run_goes_on_bit_for_bit(kind, tmp_path, monkeypatch):
    """Killed with no checkpoint, within epochs, at their ends, after events; some checkpoints are some steps older."""
    parts_are_written(kind, monkeypatch)
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


def forked(config: Config, kill_after: float | None = None, at_step: int | None = None) -> int:
    """Does the run in a process of its own, which is killed after some seconds or at a step; returns how it ended."""
    child = os.fork()
    if child == 0:
        try:
            sys.stdout = sys.stderr = io.StringIO()
            if at_step is not None:
                real = Checkpointing.on_step
                Checkpointing.on_step = lambda self, fit: (
                    os.kill(os.getpid(), signal.SIGKILL) if fit.step == at_step else real(self, fit)
                )
            experiment.run(config)
            os._exit(0)
        finally:
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kind", ["one_shot", "gradual", "iterative", "threshold", "gradual, mask"])
def test_a_process_that_is_killed_goes_on_too(kind, tmp_path):
    config = small(tmp_path / "b", *RUNS[kind], "checkpoint_steps=4")
    assert forked(config, at_step=14) == -signal.SIGKILL
    assert list(config_folder(config).glob(".*.lock")), "whose lock is nobody's now"
    assert_same(finished(config), finished(small(tmp_path / "a", *RUNS[kind])))


def test_a_part_of_the_trace_that_no_checkpoint_knows_is_cut_back(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "PART_ROWS", 1)  # at each checkpoint
    undisturbed = finished(small(tmp_path / "a", *GRADUAL))
    config = small(tmp_path / "b", *GRADUAL, "checkpoint_steps=4")
    directory, write = RunDirectory(experiment.run_path(config)), Checkpoints.write
    with monkeypatch.context() as patch:
        patch.setattr(
            Checkpoints, "write", lambda *a: os.kill(os.getpid(), signal.SIGKILL) if a[1] == 16 else write(*a)
        )
        assert forked(config) == -signal.SIGKILL
    position = Checkpoints(directory.checkpoint_path).newest(lambda state: "")["position"]
    parts = len(list(directory.traces_path.iterdir()))
    assert parts > position[directory.traces_path.name][0] > 0
    assert_same(finished(config), undisturbed)


def config_folder(config: Config):
    return experiment.run_path(config).parent


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_whatever_the_moments_of_many_kills_the_run_is_the_same(kind, tmp_path, monkeypatch):
    """At least 5 kills a kind: while data are loaded, steps are done, files are written, and at the run's end."""
    parts_are_written(kind, monkeypatch)
    moments = random.Random(kind)
    more = ["epochs=4", "checkpoint_steps=3", *RUNS[kind]]
    began = time.monotonic()
    undisturbed = finished(small(tmp_path / "a", *more))
    seconds = time.monotonic() - began
    config, kills = small(tmp_path / "b", *more), 0
    for attempt in range(100):
        if kills < 5 and RunDirectory(experiment.run_path(config)).is_complete:
            shutil.move(experiment.run_path(config), tmp_path / f"complete-{attempt}")
        began = time.monotonic()
        ended = forked(config, kill_after=moments.uniform(0.1, 1) * seconds if kills < 5 else None)
        seconds = time.monotonic() - began if ended == 0 else seconds  # a machine may have become faster
        kills += ended == -signal.SIGKILL
        if kills >= 5 and ended == 0:
            break
        assert ended in (0, -signal.SIGKILL)
    assert kills >= 5
    assert_same(RunDirectory.open(experiment.run_path(config)), undisturbed)
    for complete in tmp_path.glob("complete-*"):
        assert_same(RunDirectory.open(complete), undisturbed)


# Signals, locks, damage.


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_keeps_it_and_stops_the_sweep(number, status, tmp_path, monkeypatch, capsys):
    arguments = [*SMALL, *GRADUAL, f"runs={tmp_path}"]
    with monkeypatch.context() as patch:
        real = Journal.on_step
        patch.setattr(Journal, "on_step", lambda *a: real(*a) or (a[1].step == 9 and signal.raise_signal(number)))
        patch.setattr(sys, "argv", ["run.py", "-m", "seed=0,1", *arguments])
        handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
        assert run.main() == status
        assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    name = signal.Signals(number).name
    assert re.search(rf"stopped by {name}; the same command goes on from step 9\n", capsys.readouterr().err)
    assert len(list(tmp_path.glob("digits/*/"))) == 1, "the second point did not start"
    config = compose(*arguments)
    again = finished(config)
    assert "goes on from step 9 (train, epoch 0.82)" in capsys.readouterr().out
    assert_same(again, finished(compose(*arguments, f"runs={tmp_path}/undisturbed")))


def test_a_second_signal_and_one_outside_of_training_stop_at_once(tmp_path, monkeypatch):
    def interrupt(times, after=lambda *a: None):
        return lambda *a: [signal.raise_signal(signal.SIGINT) for _ in range(times)] or after(*a)

    monkeypatch.setattr(resume, "TOGETHER", 0)
    config = small(tmp_path, *ONE_SHOT, "trunks=null")
    for owner, name, times, last in ((Journal, "on_step", 2, None), (PruneEvent, "__call__", 1, 22)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt(times))
            with pytest.raises(Stopped, match="SIGINT"):
                experiment.run(config)
        assert Checkpoints(RunDirectory(experiment.run_path(config)).checkpoint_path).last_step == last


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_comes_twice_is_one(late, tmp_path, monkeypatch):
    """To all processes, and passed on by the one that started this one; the second may come when the step is done."""
    config, step = small(tmp_path, *ONE_SHOT, "trunks=null"), Journal.on_step

    def on_step(self, fit):
        step(self, fit)
        if fit.step == 9:
            signal.raise_signal(signal.SIGINT)
            if not late:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Journal, "on_step", on_step)
    with pytest.raises(Stopped, match=r"SIGINT.*from step 9$"), Interrupts().handled():
        try:
            experiment.run(config)
        finally:
            if late:
                signal.raise_signal(signal.SIGTERM)
    assert Checkpoints(RunDirectory(experiment.run_path(config)).checkpoint_path).last_step == 9


def test_a_second_process_is_kept_out_and_touches_nothing(tmp_path, capsys):
    config = small(tmp_path, *GRADUAL)
    path = experiment.run_path(config)
    for more in ([], ["force=true"]):
        with experiment.held(path):
            with pytest.raises(ResultsError, match="being run by another process"):
                experiment.run(small(tmp_path, *GRADUAL, *more))
            assert not path.exists()
    finished(config)
    with experiment.held(path):
        experiment.run(config)
    assert "complete already" in capsys.readouterr().out
    assert not list(path.parent.glob(".*")), "no lock stays"


def test_who_waits_for_a_lock_gets_it_and_not_a_file_that_is_gone(tmp_path):
    path, order = tmp_path / "lock", []

    def enter(name):
        with locked(path, waiting=f"{name} waits"):
            order.append(name)
            assert path.exists()

    with locked(path):
        threads = [threading.Thread(target=enter, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        order.append("first")
    for thread in threads:
        thread.join(30)
    assert order[0] == "first" and set(order) == {"first", "a", "b"} and not path.exists()


def stopped_at(step: int, config: Config, monkeypatch) -> Checkpoints:
    with monkeypatch.context() as patch:
        dies_at(patch, [step])
        with pytest.raises(Killed):
            experiment.run(config)
    return Checkpoints(RunDirectory(experiment.run_path(config)).checkpoint_path)


DAMAGES = {
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "one bit": lambda data: data[:999] + bytes([data[999] ^ 1]) + data[1000:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_two_checkpoints_the_whole_one_is_used(damage, tmp_path, monkeypatch, capsys):
    config = small(tmp_path / "a", *GRADUAL, "checkpoint_steps=4")
    kept = stopped_at(14, config, monkeypatch)
    newest, before = kept.paths()
    assert [path.name[:9] for path in (newest, before)] == ["000000012", "000000011"], "two are kept"
    newest.write_bytes(DAMAGES[damage](newest.read_bytes()))
    with pytest.warns(UserWarning, match="can't be used .* set aside"):
        again = finished(config)
    assert "goes on from step 11" in capsys.readouterr().out
    assert_same(again, finished(small(tmp_path / "b", *GRADUAL)))


def test_a_run_of_which_no_checkpoint_is_whole_starts_over_and_loses_nothing(tmp_path, monkeypatch):
    config = small(tmp_path / "a", *GRADUAL, "checkpoint_steps=4")
    for path in stopped_at(14, config, monkeypatch).paths():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="no whole checkpoint"):
        again = finished(config)
    aside = again.path.with_name(f"{again.path.name}.old-1")
    assert len(list((aside / "checkpoint").iterdir())) == 2 and (aside / "metrics.jsonl").exists()
    assert_same(again, finished(small(tmp_path / "b", *GRADUAL)))


def test_a_checkpoint_whose_records_are_lost_is_not_used(tmp_path, monkeypatch, capsys):
    config = small(tmp_path / "a", *GRADUAL, "checkpoint_steps=4")
    stopped_at(14, config, monkeypatch)
    directory = RunDirectory(experiment.run_path(config))
    lines = directory.metrics_path.read_bytes().splitlines(keepends=True)
    directory.metrics_path.write_bytes(b"".join(lines[:-1]))  # those of the step 12 are gone
    with pytest.warns(UserWarning, match="records from before it are missing"):
        again = finished(config)
    assert "goes on from step 11" in capsys.readouterr().out
    assert_same(again, finished(small(tmp_path / "b", *GRADUAL)))


def changed_byte(path, place: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "traces.parquet"])
def test_records_damaged_before_a_checkpoint_are_noticed_as_a_damaged_checkpoint_is(
    name, tracked, tmp_path, monkeypatch, capsys
):
    """What the checkpoint before does not reach is made anew; what both have means that the run starts over."""
    monkeypatch.setattr(experiment, "start_tracking", lambda *_: Recorded() if tracked else tracking.Tracker())
    monkeypatch.setattr(experiment, "PART_ROWS", 1)
    config = small(tmp_path / "a", *GRADUAL, "trunks=null", "checkpoint_steps=4")
    undisturbed = finished(small(tmp_path / "b", *GRADUAL, "trunks=null"))
    kept = stopped_at(14, config, monkeypatch)  # there are those of the steps 11 and 12
    run = RunDirectory(kept.folder.parent)
    earlier = kept.newest(lambda state: "" if state["fit"]["step"] == 11 else "later")["position"]
    for path in kept.folder.glob("*.old-1"):
        path.rename(path.with_name(path.name.removesuffix(".old-1")))
    if name == "traces.parquet":
        late, early = (sorted(run.traces_path.iterdir())[i] for i in (earlier[name][0], 0))
        changed_byte(late, 50)
    else:
        changed_byte(early := run.path / name, earlier[name][0] + 3 if name == "metrics.jsonl" else 50)
    if name == "events.jsonl":
        with pytest.warns(UserWarning, match="no whole checkpoint"):
            assert_same(finished(config), undisturbed)
        return
    with pytest.warns(UserWarning, match=rf"records from before it are damaged, in {name}\): set aside"):
        assert_same(finished(config), undisturbed)
    assert "goes on from step 11" in capsys.readouterr().out
    shutil.rmtree(run.path)
    stopped_at(14, config, monkeypatch)
    changed_byte(early, 50)
    with pytest.warns(UserWarning, match="no whole checkpoint: it is set aside, and the run starts over"):
        assert_same(finished(config), undisturbed)


def test_a_record_that_can_not_be_read_is_no_fault_of_other_code(tmp_path):
    with pytest.raises(ResultsError, match=r"^line 3 is torn$"), understood(RunDirectory(tmp_path)):
        raise ResultsError("line 3 is torn")


def test_what_killed_writes_left_is_gone_when_the_run_goes_on(tmp_path, monkeypatch):
    config = small(tmp_path, *GRADUAL, "checkpoint_steps=4")
    kept = stopped_at(14, config, monkeypatch)
    run = RunDirectory(kept.folder.parent)
    run.traces_path.mkdir(exist_ok=True)
    left = [
        run.path / ".summary.json.99999.tmp", run.path / ".model.pt.1.tmp", kept.folder / ".000000013.pt.7.tmp",
        run.traces_path / ".part-000001.parquet.7.tmp", *(path.with_name(f".{path.name}.7.tmp") for path in [tmp_path / ".trunks" / "x.pt"]),
    ]  # fmt: skip
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    (mine := run.path / ".mine.tmp").write_text("a person's")
    finished(config)
    assert [path for path in left if path.exists()] == [left[-1]], "another trunk may be at work"
    assert mine.exists()


def test_a_run_stopped_before_its_first_checkpoint_says_so_and_leaves_nothing_that_has_no_records(
    tmp_path, monkeypatch, capsys
):
    config = small(tmp_path, *GRADUAL, "trunks=null")
    path = experiment.run_path(config)
    for step, said in ((1, False), (5, False), (5, True)):  # the windows are of 3 steps
        stopped_at(step, config, monkeypatch)
        assert ("was stopped before its first checkpoint: it is set aside" in capsys.readouterr().out) == said
    assert [p.name for p in path.parent.iterdir() if ".old-" in p.name] == [f"{path.name}.old-1"]
    assert RunDirectory(path.with_name(f"{path.name}.old-1")).metrics()["step"].tolist() == [3]


def test_who_looks_at_a_lock_keeps_nobody_out(tmp_path):
    """One process looks all the time while another takes the lock and leaves it again."""
    path, done = tmp_path / "lock", threading.Event()

    def look():
        while not done.is_set():
            is_held(path)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            with locked(path):  # LockedError if it isn't to be had
                assert is_held(path) and is_held(path)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not is_held(path)
    path.write_bytes(b"")  # of a process that was killed
    with open(path) as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.02, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        with locked(path):
            pass


def test_force_starts_over_and_sets_the_unfinished_run_aside(tmp_path, monkeypatch, capsys):
    config = small(tmp_path, *GRADUAL)
    stopped_at(14, config, monkeypatch)
    again = finished(small(tmp_path, *GRADUAL, "force=true"))
    assert "goes on" not in capsys.readouterr().out
    assert (again.path.with_name(f"{again.path.name}.old-1") / "checkpoint").is_dir()


def test_a_checkpoint_of_another_run_or_of_other_data_is_not_used(tmp_path, monkeypatch):
    config, other = (small(tmp_path, *GRADUAL, f"seed={seed}") for seed in (0, 1))
    mine, theirs = (stopped_at(14, c, monkeypatch) for c in (config, other))
    before = mine.paths()
    shutil.copy(theirs.paths()[0], mine.folder / "000000999.pt")
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "data_digest", lambda images: "others")
        with pytest.warns(UserWarning, match="of another run"), pytest.raises(ResultsError, match=r"data=.*force=true"):
            experiment.run(config)
    assert mine.paths() == before
    config_path = RunDirectory(experiment.run_path(config)).config_path
    config_path.write_text(config_path.read_text().replace("batch_size: 128", "batch_size: 999"))
    assert finished(config).config["batch_size"] == 128, "what is run is what is told"


def test_a_checkpoint_that_other_code_wrote_is_told(tmp_path, monkeypatch):
    config = small(tmp_path, *GRADUAL)
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "state", lambda _: {"the best": 1.0})
        kept = stopped_at(14, config, monkeypatch)
    with pytest.raises(ResultsError, match=r"other code wrote .*force=true"):
        experiment.run(config)
    assert len(kept.paths()) == 1, "nothing is lost"


# What must not be kept, and what must not grow.


def poisoned(monkeypatch, step: int, what) -> None:
    """Calls ``what(fit)`` when the step's loss is counted, in every run."""
    real = Fit.add
    monkeypatch.setattr(Fit, "add", lambda fit, *a: real(fit, *a) or (what(fit) if fit.step == step else None))


def lose(fit: Fit) -> None:
    fit._loss = fit._loss * math.nan


def blow_up(fit: Fit) -> None:
    fit.model.fc1.bias.detach()[0] = math.inf


@pytest.mark.parametrize(
    ("step", "what", "more", "message"),
    [
        (15, lose, [], r"the loss became nan .*optimizer\.lr"),
        (16, blow_up, ["checkpoint_steps=8", "pruning.trace_every=50"], r"fc1\.bias has NaN or Inf at step 16"),
        (17, blow_up, ["pruning.trace_every=50"], "NaN or Inf in the output recorded"),
    ],
)
def test_what_is_not_finite_ends_the_run_and_the_last_good_state_stays(
    step, what, more, message, tmp_path, monkeypatch
):
    overrides = [*GRADUAL, "pruning.end_step=20", *more]
    config = small(tmp_path, *overrides)
    poisoned(monkeypatch, step, what)
    for _ in range(2):  # the same command comes to the same end
        with pytest.raises(experiment.USER_ERRORS, match=message) as told:
            experiment.run(config)
        directory = RunDirectory(experiment.run_path(config))
        assert f"of step 11, is in {directory.checkpoint_path}" in str(told.value)
        assert "A changed configuration is another run" in str(told.value)
    assert not directory.is_complete


def overflow(fit: Fit) -> None:
    """Of the second moments: the updates become 0, and all parameters stay finite."""
    fit.optimizer.state[fit.model.fc1.weight]["exp_avg_sq"][0, 0] = math.inf


def blow_up_a_statistic(fit: Fit) -> None:
    next(value for name, value in fit.model.named_buffers() if name.endswith("running_var"))[0] = math.inf


@pytest.mark.parametrize(
    ("what", "more", "message"),
    [
        (overflow, ["optimizer=adam"], r"the optimizer's exp_avg_sq of fc1\.weight has NaN or Inf at step 16"),
        (blow_up_a_statistic, ["model.batch_norm=true"], r"running_var has NaN or Inf at step 16"),
    ],
)
def test_no_state_is_kept_whose_buffers_or_optimizer_are_not_finite(what, more, message, tmp_path, monkeypatch):
    config = small(tmp_path, "pruning=none", "checkpoint_steps=8", *more)
    poisoned(monkeypatch, 16, what)
    with pytest.raises(TrainingError, match=message):
        experiment.run(config)
    assert Checkpoints(RunDirectory(experiment.run_path(config)).checkpoint_path).last_step == 11


# Clocks.


def kept_at(monkeypatch) -> list[int]:
    """The steps of the checkpoints that are written from here on."""
    steps, real = [], Checkpoints.write
    monkeypatch.setattr(
        Checkpoints, "write", lambda self, step, content: steps.append(step) or real(self, step, content)
    )
    return steps


def test_checkpoints_come_every_so_many_minutes(tmp_path, monkeypatch):
    """A step takes 20 seconds here, and a checkpoint is due after 60; each, also that of an epoch's end, begins a new minute."""
    clock, real = [0.0], Fit.add
    monkeypatch.setattr(Fit, "add", lambda *a: clock.__setitem__(0, clock[0] + 20) or real(*a))
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    steps = kept_at(monkeypatch)
    finished(small(tmp_path / "a", "pruning=none", "checkpoint_minutes=1"))
    assert steps == [3, 6, 9, 11, 14, 17, 20, 22]
    del steps[:]
    finished(small(tmp_path / "b", "pruning=none", "checkpoint_minutes=null"))
    assert steps == [11, 22]


def test_a_clock_that_jumps_during_a_run_changes_nothing(tmp_path, monkeypatch):
    """Forward by a day, and then back by two."""
    steps, more = kept_at(monkeypatch), [*GRADUAL, "trunks=null", "checkpoint_steps=4", "checkpoint_minutes=600"]
    undisturbed, without = finished(small(tmp_path / "a", *more)), list(steps)
    del steps[:]
    ahead, real, add = [0], time.time, Fit.add
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])

    def jump(fit, *a):
        ahead[0] = {5: 86_400, 13: -86_400}.get(fit.step, ahead[0])
        add(fit, *a)

    monkeypatch.setattr(Fit, "add", jump)
    began = time.monotonic()
    again = finished(small(tmp_path / "b", *more))
    assert 0 < again.summary["seconds"] < time.monotonic() - began < 3600
    assert all(event["seconds"] < 3600 for event in again.events())
    assert steps == without and ahead == [-86_400]
    assert_same(again, undisturbed)


def test_seconds_add_up_though_the_clock_is_set_back(tmp_path, monkeypatch):
    config = small(tmp_path, *GRADUAL, "checkpoint_steps=4", "checkpoint_minutes=0.01")
    kept = stopped_at(14, config, monkeypatch)
    before = kept.newest(lambda state: "")["seconds"]
    monkeypatch.setattr(time, "time", lambda: -1e9)
    assert finished(config).summary["seconds"] > before > 0


def growth(tmp_path, monkeypatch, steps: tuple[int, int], *more: str) -> int:
    """Bytes that Python holds more at the second step than at the first."""
    held, real = [], Checkpointing.on_step

    def on_step(self, fit):
        real(self, fit)
        if fit.step in steps:
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])

    monkeypatch.setattr(Checkpointing, "on_step", on_step)
    tracemalloc.start()
    try:
        finished(small(tmp_path, "pruning=none", "pruning.trace_every=1", "batch_size=4", "epochs=1", *more))
    finally:
        tracemalloc.stop()
    first, last = held
    return last - first


def test_memory_does_not_grow_with_the_steps(tmp_path, monkeypatch):
    """A window of the trace takes 2 kB and a record 1 kB; without parts these 200 steps would hold 0.6 MB more."""
    monkeypatch.setattr(experiment, "PART_ROWS", 500)
    assert growth(tmp_path, monkeypatch, (101, 301), "checkpoint_steps=50") < 50_000


@pytest.mark.slow
def test_memory_does_not_grow_over_a_hundred_thousand_steps(tmp_path, monkeypatch):
    """Of the whole process, torch's memory too. What is held in 10^5 windows would be 300 MB."""
    sizes, real = {}, Checkpointing.on_step

    def on_step(self, fit):
        real(self, fit)
        if fit.step % 500 == 0:  # the trace is written every 12,500 steps
            sizes[fit.step] = resident_mebibytes()

    monkeypatch.setattr(Checkpointing, "on_step", on_step)
    tiny = ["model.widths=[4,4]", "pruning.trace_every=1", "batch_size=4", "epochs=312", "checkpoint_steps=1000"]
    finished(small(tmp_path, "pruning=none", *tiny))
    early, late = (max(sizes[step] for step in range(end - 12_500, end, 500)) for end in (27_500, 100_000))
    print(f"at most {early:.0f} MiB at steps 15,000 to 27,500, {late:.0f} at 87,500 to 100,000")
    assert late - early < 30
