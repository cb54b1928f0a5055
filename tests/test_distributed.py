"""Two processes make the run that one process makes. One pair of them does everything below, one run after the other."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import run
import tnvp
from tnvp import experiment, models
from tnvp.distributed import Rank
from tnvp.events import Recording
from tnvp.run_directory import RunDirectory
from tnvp.training import Alone, Fit, TrainingError

SMALL = ["epochs=1", "model.widths=[16,8]", "optimizer.lr=0.1", "tracking=none", "progress=false", "device=cpu"]
KINDS = {  # of 1,294 images: batches of 97 leave an odd number for the last of an epoch, of 76 leave two, for one process
    "one_shot": ["pruning.finetune_epochs=1", "batch_size=97", "trunks=null"],
    "gradual": [
        "pruning=gradual", "pruning.start_step=4", "pruning.end_step=16", "pruning.every=6", "pruning.criterion=taylor",
        "batch_size=76", "optimizer=adam", "optimizer.lr=0.01",
    ],
    "iterative": ["pruning=iterative", "pruning.start_step=3", "pruning.events=3", "pruning.every=4"],
}  # fmt: skip


def start(folder: Path, *overrides: str) -> int:
    sys.argv = ["run.py", *SMALL, f"runs={folder}", *overrides]
    return run.main()


class StoppedAtTen(Recording):
    """A signal comes to this process at step 10."""

    def on_step(self, fit: Fit) -> None:
        super().on_step(fit)
        if fit.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)


def work(rank: int, folder: str, ports: list[int]) -> None:
    """One process of two: what torchrun would set, then run after run; the last one fails in the second process."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    statuses = []

    def next_run(*overrides: str) -> int:
        os.environ["MASTER_PORT"] = str(ports.pop())
        statuses.append(start(Path(folder), *overrides))
        if dist.is_initialized():
            dist.destroy_process_group()
        return statuses[-1]

    next_run(*KINDS["one_shot"], "study=one_shot")
    if rank == 1:
        experiment.Recording = StoppedAtTen
    next_run(*KINDS["gradual"], "study=gradual")
    experiment.Recording = Recording
    next_run(*KINDS["gradual"], "study=gradual")
    next_run(*KINDS["iterative"], "study=iterative")
    Path(folder, f"statuses.{rank}").write_text(json.dumps(statuses))
    if rank == 1:  # after the first epoch, while the other one waits for what this one measures
        experiment.evaluate = None
    with open(Path(folder, f"stderr.{rank}"), "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w")
    sys.exit(next_run("seed=7", "study=failed"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, list[int | None]]:
    """The folder of two processes' runs, and how each process ended."""
    folder = tmp_path_factory.mktemp("pair")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["run", "tnvp.experiment"])  # imported once for both
    ports = free_ports(5)
    processes = [context.Process(target=work, args=(rank, str(folder), ports)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return folder, codes


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
    assert [json.loads((folder / f"statuses.{rank}").read_text()) for rank in range(2)] == [[0, 143, 0, 0]] * 2


def close(found: object, expected: object) -> None:
    if isinstance(expected, float):
        assert math.isnan(found) == math.isnan(expected)
        assert math.isnan(expected) or found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    else:
        assert found == expected


def test_an_error_in_one_process_ends_both(pair):
    folder, codes = pair
    assert codes == [1, 1]
    survivor, failing = ((folder / f"stderr.{rank}").read_text() for rank in range(2))
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
    subprocess.run([*command, *SMALL, f"runs={tmp_path}"], check=True, cwd=run.CONF.parent, env=os.environ)
    assert only_run(tmp_path, "digits").is_complete
