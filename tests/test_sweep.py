"""Sweeps: every point is told at the end, whichever process ran it and however that ended; two sweeps share their runs."""

import errno
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

import run
from tests.processes import heeding_signals, resident_mebibytes
from tests.test_experiment import compose
from tests.wandb_server import free_port
from tnvp import command_line, experiment, sweep
from tnvp.locks import locked
from tnvp.resume import Stopped
from tnvp.run_directory import RunDirectory
from tnvp.run_state import Checkpoints

REPOSITORY = Path(run.__file__).parent
TINY = ["experiment=digits", "epochs=1", "pruning.finetune_epochs=0", "model.widths=[8]", "pruning.criterion=random"]
QUIET = ["tracking=none", "progress=false"]


def made(path: Path) -> Path:
    RunDirectory.create(path).write_summary({})
    return path


def facts(number: int, path: Path, state: str, why: str = "", status: int = 0) -> dict:
    return {"number": number, "overrides": [f"seed={number}"], "path": str(path), "state": state, "why": why} | (
        {} if state == "begun" else {"status": status}
    )


def test_every_point_is_told_once_with_what_became_of_it(tmp_path):
    names = ("done", "before", "other", "failed", "killed", "held", "never")
    paths = {name: tmp_path / name for name in names}
    points = [sweep.Point([f"seed={n}", "epochs=1"], path) for n, path in enumerate(paths.values())]
    for name in ("done", "before", "other"):
        made(paths[name])
    notes = [
        facts(0, paths["done"], "done"),
        facts(1, paths["before"], "was done"),
        facts(2, paths["other"], "elsewhere", "is being run", 2),
        facts(3, paths["failed"], "failed", "no\nreason", 2),
        facts(4, paths["killed"], "begun"),
        facts(5, paths["held"], "elsewhere", "is being run", 2),
    ]
    with locked(RunDirectory(paths["held"]).lock_path):
        rows = sweep.rows(points, notes, before={paths["before"]})
    assert [row.state for row in rows] == [
        "done", "done before", "done by another process", "failed", "not finished", "running elsewhere", "not finished",
    ]  # fmt: skip
    assert [row.why for row in rows[3:5]] == ["no\nreason", "broken off: its process ended"]
    assert sweep.status(rows) == 1 and sweep.status(rows[:4]) == 2 and sweep.status(rows[:3]) == 0
    told = sweep.describe(rows).splitlines()
    assert len(told) == 8 and told[4].split() == ["failed", "seed=3", "(no)"], "only what varies, one line a point"


def test_a_search_tells_what_it_drew_and_what_was_refused(tmp_path):
    notes = [
        facts(0, made(tmp_path / "a"), "done"),
        facts(1, tmp_path / "b", "failed", "a bug", 1),
        facts(2, Path(""), "failed", "lr=-1 must be a number in (0, inf)", 2) | {"path": ""},
    ]
    rows = sweep.rows([], notes, set())
    assert [(row.state, row.overrides) for row in rows] == [
        (s, [f"seed={i}"]) for i, s in enumerate(["done", "failed", "failed"])
    ]


def test_sweeps_of_one_moment_have_folders_of_their_own(tmp_path):
    folders, start = [], threading.Barrier(8)

    def make():
        start.wait()
        folders.append(sweep.own_folder(tmp_path / "now"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 8 and all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize("parent", ["a link that leads nowhere", "a file"])
def test_a_folder_that_can_not_be_made_is_an_error(parent, tmp_path):
    runs = tmp_path / "runs"
    runs.write_text("") if parent == "a file" else runs.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match=str(runs)):
        sweep.own_folder(runs / ".sweeps" / "now")


def test_a_run_is_elsewhere_while_its_process_lives(tmp_path):
    path = tmp_path / "run"
    ready, process = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=hold, args=(path, process))
    assert not sweep.running_elsewhere(path)
    child.start()
    ready.recv()
    assert sweep.running_elsewhere(path)
    child.kill()
    child.join()
    assert not sweep.running_elsewhere(path), "a dead process holds nothing"


def hold(path: Path, ready) -> None:
    with locked(RunDirectory(path).lock_path):
        ready.send(True)
        time.sleep(60)


def sweep_here(words: list[str], start=None) -> None:
    """A process's body: run.py with these words."""
    sys.argv = ["run.py", "-m", *words]
    if start:
        start.wait()
    os._exit(run.main())


def test_two_sweeps_into_one_folder_make_every_run_once(tmp_path, capfd):
    """Both end well and know all runs; the runs' own records say that each was made once."""
    context = multiprocessing.get_context("fork")
    words, start = [*TINY, *QUIET, f"runs={tmp_path}", "trunks=null", "seed=0,1,2,3"], context.Barrier(2)
    both = [context.Process(target=sweep_here, args=(words, start)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    runs = [path for path in (tmp_path / "digits").iterdir() if not path.name.startswith(".")]
    assert len(runs) == 4 and all(RunDirectory(path).is_complete for path in runs), "none was set aside or made twice"
    folders = list((tmp_path / ".sweeps").iterdir())
    made = [{f["path"] for f in sweep.notes(folder) if f["state"] == "done"} for folder in folders]
    assert len(folders) == 2 and not made[0] & made[1] and made[0] | made[1] == set(map(str, runs))
    told = capfd.readouterr().err
    assert told.count("4 runs: ") == 2 and told.count("done by another process") >= 4


def test_a_point_that_another_process_has_is_waited_for_at_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)
    words = [*TINY, *QUIET, f"runs={tmp_path}", "trunks=null"]
    other, path = tmp_path / "other", experiment.run_path(compose(*words, "seed=0"))
    experiment.run(
        compose(*words[:-2], f"runs={other}", "trunks=null", "seed=0")
    )  # what the other process will have made
    waiting = sweep.wait

    def wait(points):
        assert len(list((tmp_path / "digits").glob("*/summary.json"))) == 1, "the other point was not kept waiting"
        (other / path.relative_to(tmp_path)).rename(path)
        lock.__exit__(None, None, None)
        waiting(points)

    monkeypatch.setattr(sweep, "wait", wait)
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *words, "seed=0,1"])
    lock = locked(RunDirectory(path).lock_path)
    lock.__enter__()
    assert run.main() == 0
    said = capsys.readouterr().err.splitlines()[-3:]
    assert [line.split("  ")[1] for line in said[1:]] == ["done by another process", "done"]


def test_a_signal_before_training_ends_a_sweep_with_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiment, "run", lambda config: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *TINY, *QUIET, f"runs={tmp_path}", "seed=0,1"])
    assert run.main() == 143
    said = capsys.readouterr().err.splitlines()
    assert said[-3:] == [
        "2 runs: 2 not finished", "  not finished  seed=0  (stopped by SIGTERM)", "  not finished  seed=1  (not started)",
    ]  # fmt: skip


# What a signal to the sweep's process does to its jobs in others.


def be_a_job(folder: Path, ready, seconds: float, has_it_at_work: bool = True) -> None:
    """A process's body: a job that takes so long to finish its step once a signal came."""
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda *a: came.set())
    with sweep.at_work(folder) if has_it_at_work else nullcontext():
        sweep.note(folder, number=0, host=socket.gethostname(), pid=os.getpid(), path="", state="begun")
        ready.send(True)
        came.wait(20)
        time.sleep(seconds)
        sweep.note(folder, number=0, path="", state="interrupted", told=came.is_set())


@pytest.fixture
def job_elsewhere(tmp_path):
    """Starts `be_a_job` in a process of its own; gives that and the job's folder."""
    context, started = multiprocessing.get_context("fork"), []

    def start(*how):
        ready, its_end = context.Pipe()
        started.append(context.Process(target=be_a_job, args=(tmp_path / "0", its_end, *how)))
        started[-1].start()
        ready.recv()
        return started[-1], tmp_path / "0"

    yield start
    for process in started:
        process.kill()
        process.join()


def test_jobs_at_work_are_told_and_waited_for_and_none_begins_after(job_elsewhere, tmp_path):
    job_elsewhere(0.5)
    sweep.require_going_on(tmp_path)
    sweep.stop(tmp_path)
    (noted,) = sweep.notes(tmp_path)
    assert noted["state"] == "interrupted" and noted["told"]
    with pytest.raises(Stopped):
        sweep.require_going_on(tmp_path)


def test_a_job_that_does_not_end_is_waited_for_no_longer_than_that(job_elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "PATIENCE", 0.3)
    process, _ = job_elsewhere(20)
    began = time.monotonic()
    sweep.stop(tmp_path)
    assert process.is_alive() and 0.3 <= time.monotonic() - began < 10


@pytest.mark.parametrize("change", [{}, {"host": "another"}])
def test_no_signal_goes_to_a_process_that_only_has_the_number_of_one_or_is_elsewhere(change, job_elsewhere, tmp_path):
    """A job whose process was killed leaves its note; the system gives its number to others."""
    process, folder = job_elsewhere(0, bool(change))
    sweep.note(folder, **json.loads((folder / sweep.NOTE).read_text()) | change)
    began = time.monotonic()
    sweep.stop(tmp_path)
    assert time.monotonic() - began < 10
    time.sleep(0.2)
    assert json.loads((folder / sweep.NOTE).read_text())["state"] == "begun" and process.is_alive()


def test_a_job_that_begins_in_a_sweep_that_was_stopped_does_nothing(tmp_path, monkeypatch, capsys):
    real = sweep.own_folder
    monkeypatch.setattr(sweep, "own_folder", lambda wanted: sweep.stop(path := real(wanted)) or path)
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *TINY, *QUIET, f"runs={tmp_path}", "seed=0,1"])
    assert run.main() == 143 and not (tmp_path / "digits").exists()
    assert "2 runs: 2 not finished" in capsys.readouterr().err


def refuse_notes(monkeypatch) -> None:
    real = sweep.write_atomically

    def write(path, fill):
        if path.name == sweep.NOTE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, fill)

    monkeypatch.setattr(sweep, "write_atomically", write)


def test_a_note_that_can_not_be_written_ends_no_run(tmp_path, monkeypatch, capsys):
    refuse_notes(monkeypatch)
    words = ["run.py", "-m", *TINY, *QUIET, f"runs={tmp_path}", "seed=0,1"]
    monkeypatch.setattr(sys, "argv", words)
    assert run.main() == 0
    said = capsys.readouterr().err
    assert said.count('note "done" of a run can\'t be written: ') == 2 and "2 runs: 2 done" in said


def test_a_result_that_can_not_be_read_fails_its_run_alone(tmp_path, monkeypatch, capsys):
    """Of a search, which looks at what each run left."""
    monkeypatch.setattr(run, "does_search", lambda config: True)
    monkeypatch.setattr(sweep, "objectives", lambda path, count: RunDirectory(path / "gone").summary)
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *TINY, *QUIET, f"runs={tmp_path}", "seed=0,1"])
    assert run.main() == 2
    assert "2 runs: 2 failed" in capsys.readouterr().err


def test_a_search_looks_at_validation_and_flops(tmp_path):
    made = compose(
        "experiment=digits", "epochs=2", "pruning.finetune_epochs=2", "optimizer.lr=0.1", *QUIET, f"runs={tmp_path}"
    )
    summary, path = experiment.run(made), experiment.run_path(made)
    (event,) = RunDirectory(path).events()
    metrics = RunDirectory(path).metrics()
    best = metrics[metrics["step"] > event["step"]]["validation/accuracy"].max()
    assert sweep.objectives(path, 1) == best and sweep.objectives(path, 2) == (best, summary["flops"])
    bare = compose("experiment=digits", "epochs=2", "pruning.finetune_epochs=0", *QUIET, f"runs={tmp_path}")
    experiment.run(bare)
    (event,) = RunDirectory(experiment.run_path(bare)).events()
    assert sweep.objectives(experiment.run_path(bare), 1) == event["accuracy_after"]


def test_of_a_search_every_value_and_end_is_checked_alone():
    def flags(*overrides):
        return type("Flags", (), {"overrides": overrides, "multirun": True, "experimental_rerun": None})

    with run.hydra.initialize_config_dir(str(run.CONF), version_base=run.VERSION):
        drawn = command_line.points(
            flags("seed=1,2,3", "optimizer.lr=interval(0.1,0.5)", "epochs=1"), (), searches=True
        )
        assert drawn[0] == ["seed=1", "optimizer.lr=0.1", "epochs=1"] and len(drawn) == 4
        assert {word for point in drawn for word in point} == {
            "seed=1", "seed=2", "seed=3", "optimizer.lr=0.1", "optimizer.lr=0.5", "epochs=1",
        }  # fmt: skip
        with pytest.raises(run.ConfigError, match="an interval needs a sweeper that searches"):
            command_line.points(flags("optimizer.lr=interval(0.1,0.5)"))


@pytest.mark.slow
@pytest.mark.parametrize("tracking", ["none", "wandb"])
def test_memory_stays_as_runs_follow_each_other(tracking, tmp_path, monkeypatch):
    """Of a run there may stay what Hydra keeps of its configuration and W&B of its names: measured, 0.2 and 0.4 MB."""
    sizes, real = [], experiment.run

    def spy(config):
        summary = real(config)
        sizes.append(resident_mebibytes())
        return summary

    monkeypatch.setattr(experiment, "run", spy)
    words = [*TINY, f"tracking={tracking}", "progress=false", f"runs={tmp_path}", "seed=range(0,30)"]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *words])
    assert run.main() == 0 and len(sizes) == 30
    assert sizes[-1] - sizes[9] < 20 * 2, "2 MiB a run"


# Launchers, each with a point that fails.

LAUNCHERS = {  # what the command line says → the package it needs
    "basic": ([], "hydra"),
    "joblib": (["hydra.launcher.n_jobs=2"], "hydra_plugins.hydra_joblib_launcher"),
    "submitit_local": (["hydra.launcher.cpus_per_task=1"], "hydra_plugins.hydra_submitit_launcher"),
    "ray": (
        ["+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.include_dashboard=false"],
        "hydra_plugins.hydra_ray_launcher",
    ),
}


def found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def skip_without(launcher: str) -> None:
    package = LAUNCHERS[launcher][1]
    if not found(package):
        pytest.skip(f"{package} is not installed: pip install -e '.[{launcher.partition('_')[0]}]'")


def launched(tmp_path: Path, launcher: str, *words: str, options: list[str] | None = None) -> subprocess.Popen:
    """run.py in a process group of its own, as a terminal would start it."""
    skip_without(launcher)
    options = LAUNCHERS[launcher][0] if options is None else options
    command = [
        sys.executable,
        REPOSITORY / "run.py",
        "-m",
        *TINY,
        *QUIET,
        f"runs={tmp_path}",
        f"hydra/launcher={launcher}",
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    more = {"cwd": tmp_path, "env": environment, "text": True, "stderr": subprocess.PIPE}
    return heeding_signals([*command, *options, *words], **more)


def begun(tmp_path: Path, process: subprocess.Popen, number: int = 1) -> list[dict]:
    """The notes of the first jobs that began and have not ended, once there are that many at a time."""
    while process.poll() is None:
        notes = [json.loads(path.read_text()) for path in tmp_path.rglob(sweep.NOTE)]
        if len(at_work := [note for note in notes if note["state"] == "begun"]) >= number:
            return at_work
        time.sleep(0.05)
    raise AssertionError(process.stderr.read())


@pytest.fixture
def two_nodes():
    """The address of a Ray cluster of two nodes, both on this host, a CPU each."""
    skip_without("ray")
    ray, address = str(Path(sys.executable).with_name("ray")), f"127.0.0.1:{free_port()}"
    folder = tempfile.mkdtemp(prefix="ray")  # a short path: sockets lie in it
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}"]
    environment = os.environ | {"RAY_worker_niceness": "0"}
    nodes = []
    try:
        for role in (head, [f"--address={address}"]):
            command = [ray, "start", *role, "--num-cpus=1", "--disable-usage-stats", "--block"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            nodes.append(subprocess.Popen(command, env=environment, start_new_session=True, **quiet))
            while active_nodes(ray, address) < len(nodes):
                assert nodes[-1].poll() is None, "a node ended"
                time.sleep(1)
        yield address
    finally:
        for node in nodes:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)


def active_nodes(ray: str, address: str) -> int:
    """How many nodes a Ray cluster has at work."""
    said = subprocess.run([ray, "status", f"--address={address}"], capture_output=True, text=True).stdout
    return len(re.findall(r"^ 1 node_", said, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failed_point_leaves_the_others_running_on_any_launcher(launcher, tmp_path):
    process = launched(tmp_path, launcher, "seed=0,1", "optimizer.lr=0.1,1e12")
    _, said = process.communicate()
    table = said[said.index("4 runs: 2 done, 2 failed") :].splitlines()
    assert process.returncode == 2
    assert [line.split()[0] for line in table[1:5]] == ["done", "failed"] * 2
    assert "NaN or Inf" in table[2]
    again = launched(tmp_path, launcher, "seed=0,1", "optimizer.lr=0.1")
    _, said = again.communicate()
    assert again.returncode == 0 and "2 runs: 2 done before" in said


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_a_killed_worker_is_told_and_the_same_command_goes_on(launcher, tmp_path):
    words = ["seed=0,1", "epochs=60", "+hydra.launcher.ray.remote.max_retries=0"][: 3 if launcher == "ray" else 2]
    process = launched(tmp_path, launcher, *words)
    os.kill(begun(tmp_path, process)[0]["pid"], signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 1 and "not finished" in said and "Traceback" not in said
    again = launched(tmp_path, launcher, *words)
    again.communicate()
    assert again.returncode == 0


def training(notes: list[dict]) -> bool:
    """Whether the runs of these notes have records."""
    return all(RunDirectory(note["path"]).metrics_path.exists() for note in notes)


INTERRUPTED = [  # launcher, signal, whether all processes get it, as from a terminal or a scheduler; for how many runs at work it waits
    ("basic", signal.SIGINT, "all", 1),
    ("basic", signal.SIGTERM, "parent", 1),
    ("joblib", signal.SIGINT, "all", 2),
    ("joblib", signal.SIGTERM, "all", 2),
    ("joblib", signal.SIGINT, "parent", 2),
    ("joblib", signal.SIGTERM, "parent", 2),
    ("submitit_local", signal.SIGINT, "all", 2),
    ("submitit_local", signal.SIGTERM, "parent", 2),
    ("ray", signal.SIGINT, "parent", 2),  # at SIGTERM, Ray itself ends the process that started it, before Python knows
]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number", "who", "at_a_time"), INTERRUPTED)
def test_an_interrupted_sweep_keeps_its_runs_and_the_same_command_goes_on(launcher, number, who, at_a_time, tmp_path):
    words = ["seed=0,1,2", "epochs=30", "batch_size=4", "trunks=null"]
    process = launched(tmp_path, launcher, *words)
    while not training(at_work := begun(tmp_path, process, at_a_time)):
        time.sleep(0.05)
    (os.killpg if who == "all" else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number and "3 runs: 3 not finished" in said
    if (launcher, who) != ("submitit_local", "all"):  # where the processes that submitit has watch jobs get Ctrl-C too
        assert "Traceback" not in said
    (folder,) = (tmp_path / ".sweeps").iterdir()
    noted = {note["path"]: note for note in sweep.notes(folder)}
    for path in (note["path"] for note in at_work):
        last = Checkpoints(RunDirectory(path).checkpoint_path).last_step
        assert noted[path]["state"] == "interrupted" and noted[path]["why"].endswith(f"goes on from step {last}")
        assert last >= RunDirectory(path).metrics()["step"].max() > 0
    assert {note["state"] for note in noted.values()} == {"interrupted"}, "none was left alone or killed"
    if launcher != "submitit_local":  # which starts all at once
        assert len(list((tmp_path / "digits").glob("*/checkpoint"))) == at_a_time, "no other began meanwhile"
    again = launched(tmp_path, launcher, *words)
    again.communicate(timeout=300)
    assert again.returncode == 0


@pytest.mark.slow
def test_a_search_by_optuna_draws_runs_and_writes_the_front(tmp_path):
    if not found("hydra_plugins.hydra_optuna_sweeper"):
        pytest.skip("hydra_plugins.hydra_optuna_sweeper is not installed: pip install -e '.[optuna]'")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.direction=[maximize,minimize]", "hydra.sweeper.n_trials=4"]
    drawn = ["hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0", "pruning.sparsity=interval(0.1,0.9)"]
    process = launched(tmp_path, "basic", *search, *drawn)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and "4 runs: 4 done" in said
    (folder,) = (tmp_path / ".sweeps").iterdir()
    results = [(note["overrides"], note["result"]) for note in sweep.notes(folder)]
    assert len({tuple(result) for _, result in results}) > 1, "all trials alike say nothing"
    front = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    best = [result for _, result in results if not any(dominates(other, result) for _, other in results)]
    assert front["name"] == "optuna" and sorted(s["values"] for s in front["solutions"]) == sorted(best)
    for note in sweep.notes(folder):
        assert note["result"] == list(sweep.objectives(Path(note["path"]), 2))


def dominates(one: list[float], other: list[float]) -> bool:
    """More accurate and cheaper, or as good in one of them."""
    return one != other and one[0] >= other[0] and one[1] <= other[1]


@pytest.mark.slow
def test_a_sweep_runs_on_two_nodes_of_a_ray_cluster(two_nodes, tmp_path):
    """A node has one CPU and a job takes one, so that two jobs at a time are on two nodes."""
    where = [f"hydra.launcher.ray.init.address={two_nodes}", "+hydra.launcher.ray.init.object_store_memory=null"]
    process = launched(tmp_path, "ray", "seed=0,1", "optimizer.lr=0.1,1e12", "epochs=60", options=where)
    begun(tmp_path, process, number=2)
    _, said = process.communicate()
    assert process.returncode == 2 and "4 runs: 2 done, 2 failed" in said and said.count("NaN or Inf") >= 2
