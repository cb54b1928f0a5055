"""What goes wrong around a run (disk, memory, secrets) ends it with one message, and what was finished stays readable."""

import contextlib
import errno
import io
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import run
from tnvp import events, experiment, files, results, run_directory
from tnvp.results import RunDirectory
from tnvp.training import TrainingError

from .test_experiment import compose
from .test_resume import Killed, assert_same, dies_at, finished

ROOT = Path(run.__file__).parent
TINY = ["experiment=digits", "epochs=1", "pruning.finetune_epochs=1", "model.widths=[8]", "tracking=none", "progress=false", "trunks=null"]  # fmt: skip
SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "AWS_SECRET_ACCESS_KEY": "hidden-from-every-file"}


def start(*arguments: str, tiny: Sequence[str] = TINY) -> tuple[int, str]:
    """run.py in this process: its status and what it said on stderr."""
    err = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(err),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(sys, "argv", ["run.py", *tiny, *arguments])
        patch.setenv("HYDRA_FULL_ERROR", "1")
        status = run.main()
    return status, err.getvalue()


def assert_told(status: int, err: str, *words: str) -> None:
    assert status == 2 and "Traceback" not in err and len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err


# Disks.


@contextlib.contextmanager
def disk(path: Path, options: str):
    """A small file system of its own, where the system lets tests mount one."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems can be mounted by root only")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("size", ["4k", "16k", "28k"])
def test_a_full_disk_ends_the_run_with_one_message(size, tmp_path):
    with disk(tmp_path / "disk", f"size={size}") as place:
        assert_told(*start(f"runs={place}"), "No space left on device", str(place))
        assert not list(place.rglob("summary.json")) and not list(place.rglob(".*tmp"))
        for path in place.rglob("config.yaml"):
            found = RunDirectory.open(path.parent)
            assert found.config["batch_size"] == 128
            found.metrics(), found.events(), found.traces()


def test_a_full_disk_leaves_the_finished_runs(tmp_path):
    with disk(tmp_path / "disk", "size=200k") as place:
        assert start(f"runs={place}")[0] == 0
        with open(place / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        assert_told(*start(f"runs={place}", "seed=1"), "No space left on device")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the second run may be there, unfinished
            assert len(results.table(place)) == 1


def test_a_read_only_folder_is_told(tmp_path):
    with disk(tmp_path / "disk", "size=200k") as place:
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert_told(*start(f"runs={place}"), "Read-only file system", str(place))


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "events.jsonl", "part-000001.parquet", "summary.json"]
)
def test_any_file_that_can_not_be_written_is_told(name, tmp_path, monkeypatch):
    """As on a full disk, where none can be mounted: the file's writes fail."""
    real = open

    class Full(io.RawIOBase):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def read(self, *_):
            return b""

        seekable = readable = writable = lambda self: True
        seek = tell = lambda self, *_: 0

    for module in (files, run_directory):
        monkeypatch.setattr(
            module,
            "open",
            lambda path, *a, **k: Full() if name in Path(path).name else real(path, *a, **k),
            raising=False,
        )
    assert_told(*start(f"runs={tmp_path}"), "No space left on device", name)
    monkeypatch.undo()
    (path,) = tmp_path.rglob("environment.json") if name != "config.yaml" else [tmp_path]
    assert not list(tmp_path.rglob("summary.json"))
    if path != tmp_path:
        assert RunDirectory.open(path.parent).config["seed"] == 0


def fills_up(patch, name: str, calls: range) -> None:
    """These writes of files whose names match, counted from 1, fail as on a full disk; the others don't."""
    real, count = os.fsync, iter(range(1, 1000))

    def fsync(descriptor):
        if re.search(name, os.readlink(f"/proc/self/fd/{descriptor}")) and next(count) in calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    patch.setattr(os, "fsync", fsync)


GRADUAL = ["pruning=gradual", "pruning.start_step=2", "pruning.end_step=16", "pruning.every=4", "pruning.trace_every=3"]
SEVERAL = [*(argument for argument in TINY if "finetune" not in argument), *GRADUAL, "epochs=2", "checkpoint_steps=4"]


def test_a_full_disk_at_a_checkpoint_costs_the_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    undisturbed = finished(compose(*SEVERAL, f"runs={tmp_path}/a"))
    config = compose(*SEVERAL, f"runs={tmp_path}/b")
    fills_up(monkeypatch, r"\d{9}\.pt", range(3, 1000))
    dies_at(monkeypatch, [18])
    with (
        pytest.warns(UserWarning, match="No space left on device.*the one before stays the last"),
        pytest.raises(Killed),
    ):
        experiment.run(config)
    checkpoints = RunDirectory(experiment.run_path(config)).checkpoint_path
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000000004.pt", "000000008.pt"], "nothing half"
    with pytest.warns(UserWarning, match="No space left on device"):
        assert_same(finished(config), undisturbed)  # from step 8, and no later checkpoint finds space


def test_a_full_disk_at_a_part_of_the_trace_ends_the_run_and_with_space_it_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiment, "PART_ROWS", 1)
    undisturbed = finished(compose(*SEVERAL, f"runs={tmp_path}/a"))
    arguments = [*SEVERAL, f"runs={tmp_path}/b"]
    with monkeypatch.context() as patch:
        fills_up(patch, r"part-\d+", range(3, 1000))
        assert_told(*start(*arguments, tiny=[]), "No space left on device", "part-000003.parquet")
    again = finished(compose(*arguments))
    assert "goes on from step 8" in capsys.readouterr().out
    assert_same(again, undisturbed)


def test_half_a_line_written_is_an_error_not_a_lost_record(tmp_path, monkeypatch):
    """A full disk takes what fits, and the system calls that success."""
    directory, real = RunDirectory.create(tmp_path), open

    class Short(io.FileIO):
        def write(self, data):
            return super().write(data[:5])

    monkeypatch.setattr(
        run_directory,
        "open",
        lambda path, mode, **_: Short(path, "a+") if "metrics" in str(path) else real(path, mode),
        raising=False,
    )
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        directory.log({"step": 1, "train/loss": 0.5})


# Memory.


def out_of_memory(kind: str):
    if kind == "device":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    if kind == "cpu":
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    raise MemoryError("Unable to allocate 9 GiB")


@pytest.mark.parametrize("kind", ["device", "cpu", "numpy"])
@pytest.mark.parametrize("place", ["loading", "training", "evaluation", "event", "saving"])
def test_memory_that_runs_out_is_told_with_the_batch_size(kind, place, tmp_path, monkeypatch):
    owner, name = {
        "loading": (experiment.data, "load"),
        "training": (torch.optim.SGD, "step"),
        "evaluation": (experiment, "evaluate"),
        "event": (events, "plan"),
        "saving": (experiment.checkpoint, "save"),
    }[place]
    monkeypatch.setattr(owner, name, lambda *_, **__: out_of_memory(kind))
    with pytest.raises(TrainingError, match=r"out of memory with batch_size=64: lower it") as caught:
        experiment.run(compose(*TINY, f"runs={tmp_path}", "batch_size=64"))
    assert "\n" not in str(caught.value)


def test_another_error_of_torch_stays_a_bug(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "evaluate", lambda *_: (_ for _ in ()).throw(RuntimeError("shapes don't match")))
    with pytest.raises(RuntimeError, match="shapes"):
        experiment.run(compose(*TINY, f"runs={tmp_path}"))


# Losses around events.


def test_a_loss_that_pruning_raises_is_logged_not_hidden(tmp_path):
    tiny = [argument for argument in TINY if "finetune" not in argument]
    made = compose(*tiny, f"runs={tmp_path}", "epochs=2", "model.widths=[32]", "pruning=gradual", "pruning.sparsity=0.9", "pruning.start_step=0",
                   "pruning.end_step=15", "pruning.every=15", "pruning.trace_every=1", "pruning.compensation=none", "optimizer.lr=0.2")  # fmt: skip
    experiment.run(made)
    found = RunDirectory.open(experiment.run_path(made))
    (event,), metrics = found.events(), found.metrics()
    before, bare, after = (event[f"loss_{when}"] for when in ("before", "uncompensated", "after"))
    assert math.isfinite(before) and after == pytest.approx(bare) and after > before
    train = metrics[metrics["step"].isin([15, 16])].groupby("step")["train/loss"].first()
    assert train[16] > train[15], "the first step after the event"


# Secrets.


def test_no_key_of_the_environment_gets_into_a_file_or_on_the_terminal(tmp_path):
    arguments = [
        *TINY[:4],
        "progress=false",
        f"runs={tmp_path}",
        "tracking=wandb",
        "tracking.mode=offline",
        "name=secretive",
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        env=clean | SECRETS | {"WANDB_CONFIG_DIR": str(tmp_path)},
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) and len(files) > 8
    for secret in SECRETS.values():
        assert secret.encode() not in done.stdout + done.stderr
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_every_dependency_has_a_lower_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert all(">=" in line or "==" in line for line in [*project["dependencies"], *extras])


AUDITS = {  # pip's exit status and words, pip-audit's
    "no network for pip": (1, "NewConnectionError('Failed to establish a new connection: no name resolution')", 0, ""),
    "no network for pip-audit": (0, "", 1, "Traceback …\nrequests.exceptions.ConnectionError: Max retries exceeded"),
    "another fault": (0, "", 1, "Traceback …\nKeyError: 'a bug of its own'"),
    "no such package": (1, "ERROR: Could not find a version of pip-audit for this Python", 0, ""),
    "found": (0, "", 1, "Found 2 known vulnerabilities in 1 package"),
    "clean": (0, "a note", 0, "No known vulnerabilities found"),
}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("kind", AUDITS)
def test_make_audit_blames_the_network_for_its_own_failures_only(kind, tmp_path):
    pip, said_by_pip, audit, said = AUDITS[kind]
    python = tmp_path / "python"
    lines = ["#!/bin/sh", "mkdir -p $3/bin"]
    for name, status, words in (("pip", pip, said_by_pip), ("pip-audit", audit, said)):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}\nEND\nexit {status}\n")
        lines.append(f"cp {tmp_path / name} $3/bin/; chmod +x $3/bin/{name}")
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    command = ["make", "-s", "-o", "install", "audit", f"PYTHON={python}", f"PY={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode != 0) == bool(pip or audit)
    blamed = "make audit needs the network" in done.stderr
    assert blamed == kind.startswith("no network") and (blamed or (said in done.stderr and said_by_pip in done.stderr))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_audit_makes_the_environment_first(tmp_path):
    command = ["make", "-n", "audit", f"VENV={tmp_path}/none"]
    assert f"-m venv {tmp_path}/none" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_nothing_is_unpickled_or_read_as_yaml_with_code():
    for path in [ROOT / "run.py", *(ROOT / "tnvp").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        code = path.read_text()
        assert len(re.findall(r"torch\.load\([^)]*weights_only=True", code)) == code.count("torch.load("), path
        for unsafe in (
            "pickle.load",
            "weights_only=False",
            "allow_pickle",
            "yaml.unsafe",
            "yaml.FullLoader",
            "yaml.Loader",
            'eval("',
            "exec(",
        ):
            assert unsafe not in code, (path, unsafe)
