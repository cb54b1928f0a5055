"""Two processes make the run that one process makes. One pair of them makes the runs below, after another of which one was killed."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import run
import tnvp
from tests.processes import heeding_signals
from tnvp import checkpoint, experiment, models
from tnvp.distributed import Rank
from tnvp.events import Recording
from tnvp.pruning.ranks import fingerprint
from tnvp.run_directory import RunDirectory
from tnvp.run_state import Checkpoints
from tnvp.training import Alone, Fit, TrainingError

SMALL = ["epochs=1", "optimizer.lr=0.1", "tracking=none", "progress=false", "device=cpu"]
MLP = "model.widths=[16,8]"
KINDS = {  # of 1,294 images: batches of 97 leave an odd number for the last of an epoch, of 76 leave two, for one process
    "none": ["pruning=none", MLP, "batch_size=97", "checkpoint_steps=4"],
    "one_shot": [MLP, "pruning.finetune_epochs=1", "batch_size=97", "trunks=null"],
    "gradual": [
        MLP, "pruning=gradual", "pruning.start_step=4", "pruning.end_step=16", "pruning.every=6", "pruning.criterion=taylor",
        "batch_size=76", "optimizer=adam", "optimizer.lr=0.01",
    ],
    "iterative": [MLP, "pruning=iterative", "pruning.start_step=3", "pruning.events=3", "pruning.every=4"],
    "threshold": [MLP, "pruning=threshold", "pruning.every=6", "pruning.threshold=0.8", "batch_size=97"],
    "mask": [
        MLP, "pruning=gradual", "pruning.start_step=4", "pruning.end_step=16", "pruning.every=6", "pruning.mode=mask", "batch_size=76",
    ],
    "scratch": [MLP, "pruning=scratch", "pruning.finetune_epochs=0", "batch_size=97"],
}  # fmt: skip
CNN = [
    "model=vgg11_bn",
    "model.width=0.0625",
    "pruning.finetune_epochs=1",
    "batch_size=97",
]  # no run of one process is like it
# gradual is stopped, and goes on
ORDER = ["none", "one_shot", "iterative", "threshold", "mask", "scratch", "cnn", "gradual", "gradual"]
KILLED_AT = 10


def start(folder: Path, *overrides: str) -> int:
    sys.argv = ["run.py", *SMALL, f"runs={folder}", *overrides]
    return run.main()


def hit_at(step: int, number: int) -> type[Recording]:
    """A signal comes to this process at the step."""

    class Hit(Recording):
        def on_step(self, fit: Fit) -> None:
            super().on_step(fit)
            if fit.step == step:
                os.kill(os.getpid(), number)

    return Hit


def join_in(rank: int, folder: Path, name: str, port: int) -> None:
    """Be one process of two: what torchrun would set. What it says goes into files, what it throws away into a folder."""
    torch.set_num_threads(1)
    environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()})
    tempfile.tempdir = str(folder / f"aside.{name}.{rank}")  # a killed one leaves its own
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        with open(folder / f"{name}.{stream}.{rank}", "w") as file:
            os.dup2(file.fileno(), descriptor)
        setattr(sys, stream, os.fdopen(descriptor, "w"))


def be_killed(rank: int, folder: Path, ports: list[int]) -> None:
    """The second process is killed while both train."""
    join_in(rank, folder, "killed", ports.pop())
    if rank == 1:
        experiment.Recording = hit_at(KILLED_AT, signal.SIGKILL)
    sys.exit(start(folder, *KINDS["none"], "study=none"))


def work(rank: int, folder: Path, ports: list[int]) -> None:
    """Run after run; the last one fails in the second process."""
    join_in(rank, folder, "work", 0)
    statuses, networks, save = [], [], checkpoint.save
    checkpoint.save = lambda model, path: networks.append(fingerprint(model)) or save(model, path)

    def next_run(*overrides: str) -> int:
        os.environ["MASTER_PORT"] = str(ports.pop())
        statuses.append(start(folder, *overrides))
        if dist.is_initialized():
            dist.destroy_process_group()
        return statuses[-1]

    for kind in ORDER:
        stopped = kind == "gradual" and not any(statuses) and rank == 1
        experiment.Recording = hit_at(10, signal.SIGTERM) if stopped else Recording
        next_run(*KINDS.get(kind, CNN), f"study={kind}")
    experiment.Recording = Recording
    (folder / f"work.{rank}").write_text(json.dumps([statuses, networks]))
    if rank == 1:  # after the first epoch, while the other one waits for what this one measures
        experiment.evaluate = None
    sys.exit(next_run("seed=7", "study=failed"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def two(body: Callable, folder: Path, seconds: float) -> list[int | None]:
    """How two processes end that do ``body``; None: not within that time."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["run", "tnvp.experiment"])  # imported once for all
    ports = free_ports(len(ORDER) + 1)
    processes = [context.Process(target=body, args=(rank, folder, ports)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, list[int | None]]:
    """A folder with a run of which a process was killed, and how both ended."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, two(be_killed, folder, 300)


@pytest.fixture(scope="module")
def pair(killed) -> tuple[Path, list[int | None]]:
    """The folder of two processes' runs, and how each process ended."""
    folder, _ = killed
    return folder, two(work, folder, 300)


def said(folder: Path, name: str, rank: int, stream: str = "stderr") -> str:
    return (folder / f"{name}.{stream}.{rank}").read_text()


def test_a_killed_process_ends_the_other_and_the_same_command_goes_on(killed, pair):
    """That it comes to the run that one process makes is what `none` below says."""
    folder, codes = killed
    assert codes == [1, -signal.SIGKILL]
    lines = [line for line in said(folder, "killed", 0).splitlines() if line.startswith("process 0:")]
    assert lines == ["process 0: another process of this run ended; what it said tells why"]
    assert "Traceback" not in said(folder, "killed", 0)
    assert "goes on from step 8 " in said(folder, "work", 0, "stdout")


def test_the_first_process_alone_writes_and_both_end_with_the_same_network(pair):
    folder, _ = pair
    (_, networks), (_, others) = (json.loads((folder / f"work.{rank}").read_text()) for rank in range(2))
    assert networks == others and len(networks) == len(set(ORDER))
    assert [list((folder / f"aside.work.{rank}").glob("tnvp-*")) for rank in range(2)] == [[], []]
    assert only_run(folder, "cnn").is_complete and tnvp.load(only_run(folder, "cnn").model_path)
    assert not said(folder, "work", 1, "stdout"), "the second one told something"


def only_run(folder: Path, study: str) -> RunDirectory:
    (path,) = (path for path in (folder / study).iterdir() if not path.name.startswith("."))
    return RunDirectory.open(path)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_make_the_run_of_one(kind, pair, tmp_path):
    folder, _ = pair
    assert start(tmp_path, *KINDS[kind], f"study={kind}") == 0
    both, one = only_run(folder, kind), only_run(tmp_path, kind)
    assert both.environment["processes"] == 2 and one.environment["processes"] == 1
    for name, value in one.summary.items():
        if name != "seconds":
            close(both.summary[name], value)
    for found, expected in zip(both.events(), one.events(), strict=True):
        for group, its in zip(found["groups"], expected["groups"], strict=True):
            assert group["removed"] == its["removed"]
        for name in ("step", "output_error", "accuracy_before", "accuracy_after"):
            close(found[name], expected[name])
    metrics, expected = both.metrics(), one.metrics()
    assert metrics["step"].tolist() == expected["step"].tolist()
    for name in ("train/loss", "train/accuracy", "validation/loss"):
        for a, b in zip(metrics[name], expected[name], strict=True):
            close(a, b)
    assert both.traces()["count"].tolist() == one.traces()["count"].tolist()
    assert tnvp.load(both.model_path)


def test_a_signal_to_one_process_stops_both_at_the_same_step_and_the_same_command_goes_on(pair):
    """That the run which went on is that of one process, never stopped, is what `gradual` above says."""
    folder, _ = pair
    assert "goes on from step 10\n" in said(folder, "work", 0) and "goes on from step 10\n" in said(folder, "work", 1)
    statuses = [json.loads((folder / f"work.{rank}").read_text())[0] for rank in range(2)]
    assert statuses == [[0] * (len(ORDER) - 2) + [143, 0]] * 2


def close(found: object, expected: object) -> None:
    if isinstance(expected, float):
        assert math.isnan(found) == math.isnan(expected)
        assert math.isnan(expected) or found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    else:
        assert found == expected


def test_an_error_in_one_process_ends_both(pair):
    folder, codes = pair
    assert codes == [1, 1]
    survivor, failing = (said(folder, "work", rank) for rank in range(2))
    assert "process 1: Traceback" in failing
    assert "process 0: another process of this run ended" in survivor and "Traceback" not in survivor
    failed = only_run(folder, "failed")
    assert failed.config_path.exists() and not failed.is_complete


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 9, 16, 17])
def test_parts_make_up_the_batch_and_none_is_a_single_example(count, size):
    x, y = torch.randn(size, 2), torch.arange(size)
    parts = [Rank(number, count).part(x, y) for number in range(count)]
    assert torch.equal(torch.cat([labels for _, labels in parts]), y)
    assert torch.equal(torch.cat([images for images, _ in parts]), x)
    assert size == 1 or all(len(labels) != 1 for _, labels in parts)


def test_the_mean_of_the_ranks_losses_is_the_loss_of_the_batch():
    scores, y = torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 4
    ranks = [Rank(number, 3) for number in range(3)]
    losses = [rank.loss(*rank.part(scores, y)) for rank in ranks]
    torch.testing.assert_close(torch.stack(losses).mean(), Alone().loss(scores, y))


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_trains_on_an_empty_part(name):
    model = models.build(name, shape=(3, 32, 32), classes=4, **({"widths": [5]} if name == "mlp" else {}))
    model.train()(torch.zeros(0, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_a_device_of_its_own_cannot_be_named_for_all():
    with pytest.raises(TrainingError, match="device=cuda:0"):
        Rank(0, 2).device("cuda:0")


def test_batch_norms_on_the_cpu_are_warned_of():
    with pytest.warns(UserWarning, match=r"1/2"):
        assert Rank(0, 2).adapt(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_sweep_is_refused_before_anything_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert start(tmp_path, "-m", "seed=0,1") == 2
    assert "one run at a time under torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run.py"]
    subprocess.run([*command, *SMALL, MLP, f"runs={tmp_path}"], check=True, cwd=run.CONF.parent, env=os.environ)
    assert only_run(tmp_path, "digits").is_complete


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_passes_a_signal_on_and_the_same_command_goes_on(number, tmp_path):
    """Its agent ends with a stack trace of its own and status 1, whatever the processes of the run do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run.py"]
    command += [*SMALL, MLP, "epochs=3", "batch_size=8", f"runs={tmp_path}"]
    told = {"cwd": run.CONF.parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = heeding_signals(command, **told)
    while not list(tmp_path.glob("digits/*/metrics.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=90)
    stopped = only_run(tmp_path, "digits")
    last = Checkpoints(stopped.checkpoint_path).last_step
    assert process.returncode == 1 and not stopped.is_complete
    assert errors.count(f"stopped by {number.name}; the same command goes on from step {last}\n") == 2
    assert last >= stopped.metrics()["step"].max() > 0
    again = subprocess.run(command, check=True, **told)
    assert f"goes on from step {last} " in again.stdout and only_run(tmp_path, "digits").is_complete
