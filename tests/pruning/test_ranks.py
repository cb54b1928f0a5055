"""Two processes that share every batch record, score and prune as one process does that sees all of it.

One pair of gloo processes does everything below and leaves what it found in a file; the tests compare with this process.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tnvp
from tests.pruning.networks import mlp
from tnvp.pruning.criteria import CRITERIA
from tnvp.pruning.recorder import EVERYTHING, WINDOWS, Recorder

RANKS = 2
KINDS = (*EVERYTHING, "covariance")
SIZES = [8, 7, 1, 6]  # of global batches: the third leaves rank 1 an empty part
SCORES = [name for name in CRITERIA if name != "bn_scale"]  # these networks have no batch norm


def batches(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(size, 7, generator=generator, dtype=torch.float64) for size in SIZES]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(widths=(7, 12, 9, 4)).double()


def part_of(x: Tensor, rank: int | None) -> Tensor:
    """The rank's part; None is one process that takes all."""
    return x if rank is None else x.tensor_split(RANKS)[rank]


def loss_of(output: Tensor, whole: Tensor, rank: int | None) -> Tensor:
    """Whose mean over the ranks is the mean over the whole batch."""
    return output.square().sum() / len(whole) * (1 if rank is None else RANKS)


def recorded(window: str, rank: int | None) -> tuple[dict, dict]:
    """Everything a recorder knows after a closed window and within an open one; apart from it what is counted in float32."""
    model = network()
    groups = tnvp.explain(model, batches(0)[0])
    recorder = Recorder(model, groups, KINDS, window)
    for n in range(3):
        with recorder.record():
            for x in batches(n):
                loss_of(model(part_of(x, rank)), x, rank).backward()
        if n == 0:
            recorder.close_window(4)
    state = recorder.state()
    tables = {"current": state["current"], "covariances": state["covariances"], **state["totals"]}
    moments = {(name, *key): values for name, table in tables.items() for key, values in table.items()}
    zeros = {key: moments.pop(key) for key in list(moments) if key[-1] == "nonzero"}
    rows = [row[3:] for row in state["traces"]["activation"]]
    return {"moments": moments, "rows": rows, "batches": state["batches"]}, zeros


class Run:
    """Some steps, an event, and some more steps. Under `DistributedDataParallel` where there is a rank."""

    def __init__(self, rank: int | None, **options):
        self.rank, self.model = rank, network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.pruner = tnvp.Pruner(self.model, optimizer=self.optimizer, example_inputs=batches(0)[0], **options)

    def train(self, n: int) -> None:
        forward = self.model if self.rank is None else DistributedDataParallel(self.model)
        with self.pruner.record():
            for x in batches(n):
                self.optimizer.zero_grad()
                loss_of(forward(part_of(x, self.rank)), x, self.rank).backward()
                self.optimizer.step()

    def prune(self, **options) -> dict:
        report = self.pruner.prune(**{"sparsity": 0.5} | options)
        return {group.name: (group.kept, group.scores) for group in report.groups}

    def calibration(self) -> list[Tensor]:
        return [part_of(x, self.rank) for n in (5, 6) for x in batches(n) if len(x) > 1]

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def an_event(rank: int | None, criterion: str) -> dict:
    run = Run(rank, criterion=criterion, window="ema", compensation="affine")
    run.train(0)
    kept = run.prune(calibration=run.calibration())
    after = run.parameters()
    run.train(1)
    return {"kept": kept, "after": after, "trained": run.parameters()}


def masked(rank: int | None) -> dict:
    run = Run(rank, mode="mask", window="since_prune")
    run.train(0)
    kept = run.prune()
    run.train(1)
    run.pruner.rebuild()
    run.train(2)
    kept |= run.prune(sparsity=0.7)
    return {"kept": kept, "after": [], "trained": run.parameters()}


def refused(rank: int, event) -> tuple[str, bool]:
    """What ``event(run)`` says, and whether the network is as before."""
    run = Run(rank)
    run.train(0)
    before = copy.deepcopy(run.model.state_dict())
    try:
        event(run)
    except tnvp.PruningError as error:
        same = run.model.state_dict()
        return str(error), all(torch.equal(same[k], v) for k, v in before.items() if k != "0.weight")
    return "", False


def differ_in_weights(run: Run) -> None:
    with torch.no_grad():
        run.model[0].weight[0, 0] += run.rank
    run.prune()


def differ_in_arguments(run: Run) -> None:
    run.prune(sparsity=0.5 - 0.25 * run.rank)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    found = {f"window {window}": recorded(window, rank) for window in WINDOWS}
    found |= {f"event {criterion}": an_event(rank, criterion) for criterion in SCORES}
    found["masked"] = masked(rank)
    found["weights"] = refused(rank, differ_in_weights)
    found["arguments"] = refused(rank, differ_in_arguments)
    found["wrapped"] = refused(rank, lambda run: tnvp.Pruner(DistributedDataParallel(run.model), groups=[]))
    found["alone"] = Run(None, process_group=alone).prune(calibration=batches(rank))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(work, (str(folder),), nprocs=RANKS, start_method="forkserver")
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def close(found, expected, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", WINDOWS)
def test_merged_moments_are_those_of_whole_batches(ranks, window):
    expected, zeros = recorded(window, None)
    assert len(expected["rows"]) == 2 and expected["batches"] == 12
    for rank in ranks:
        close(rank[f"window {window}"][0], expected, 1e-10)
        close(rank[f"window {window}"][1], zeros, 1e-6)


@pytest.mark.parametrize("criterion", SCORES)
def test_ranks_prune_and_train_on_as_one_process(ranks, criterion):
    expected = an_event(None, criterion)
    for rank in ranks:
        found = rank[f"event {criterion}"]
        assert {name: kept for name, (kept, _) in found["kept"].items()} == {
            name: kept for name, (kept, _) in expected["kept"].items()
        }
        close(found, expected, 1e-7 if criterion == "apoz" else 1e-9)  # zeros are counted in float32


def test_masks_hold_on_all_ranks_and_are_rebuilt(ranks):
    for rank in ranks:
        close(rank["masked"], masked(None), 1e-9)


@pytest.mark.parametrize("case", ["weights", "arguments"])
def test_ranks_that_would_prune_differently_are_all_refused(ranks, case):
    for message, unchanged in (rank[case] for rank in ranks):
        assert message.startswith("rank 1 and rank 0 differ") and unchanged


def test_a_wrapped_model_is_refused_with_the_way_out(ranks):
    assert all("model.module" in rank["wrapped"][0] for rank in ranks)


def test_a_group_of_one_rank_is_one_process(ranks):
    for number, rank in enumerate(ranks):
        close(rank["alone"], Run(None).prune(calibration=batches(number)), 1e-12)
