"""One run on several devices: `torchrun --standalone --nproc-per-node=K run.py …` starts a process, a rank, for each.

Every rank makes the same network and the same batches, and trains on its part of each; gradients, moments and counts are merged,
so that after every step all ranks hold the same network and records. Rank 0 alone tells and writes. Shapes: B batch, C classes.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tnvp.pruning.layers import BATCH_NORMS
from tnvp.pruning.ranks import gathered
from tnvp.training import Alone, Fit, TrainingError, device_of

WAYS = {"cpu": "gloo", "cuda": "nccl"}  # device → how its tensors travel


def processes() -> int:
    """How many processes torchrun started for this run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def number() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", 0)) if processes() > 1 else 0


def ended_elsewhere(error: Exception) -> bool:
    """Whether ``error`` only says that another process of the run is gone, which has told its own reason."""
    return processes() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error).lower())


def join() -> Alone:
    """This process's place in the run: met with the others, if there are any."""
    if processes() == 1:
        return Alone()
    ways = WAYS if torch.cuda.is_available() else {"cpu": "gloo"}
    dist.init_process_group(",".join(f"{device}:{way}" for device, way in ways.items()))
    return Rank(dist.get_rank(), dist.get_world_size())


class Rank(Alone):
    """One of ``count`` processes that train one network."""

    def __init__(self, number: int, count: int):
        self.number, self.count = number, count
        self.wrappers = (self._wrap,)
        self._statistics: list[Tensor] = []  # of batch norms that saw this rank's part only
        self._whole = 0  # examples in the batch at work

    def leave(self) -> None:
        """Wait until all are done, and part."""
        dist.barrier()
        dist.destroy_process_group()

    # Before training.

    def device(self, name: str) -> torch.device:
        """The rank's own GPU, or the CPU for all."""
        device = device_of(name)
        if device.type not in WAYS or device.index is not None:
            raise TrainingError(
                f"device={name} with {self.count} processes: use device=cuda, one GPU each, or device=cpu"
            )
        if device.type == "cpu":
            return device
        number = int(os.environ.get("LOCAL_RANK", self.number))
        if number >= torch.cuda.device_count():
            raise TrainingError(
                f"process {number} of this machine has no GPU, there are {torch.cuda.device_count()}: lower --nproc-per-node"
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        return device

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Rank 0 goes through the block before the others: what it downloads is there for them."""
        if not self.leads:
            dist.barrier()
        yield
        if self.leads:
            dist.barrier()

    @contextmanager
    def folder(self, path: Path) -> Iterator[Path]:
        """Where the rank writes its run: all but rank 0 where it is thrown away."""
        if self.leads:
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="tnvp-") as aside:
            yield Path(aside) / path.name

    def adapt(self, model: nn.Module) -> nn.Module:
        """Batch norms that see the whole batch: on GPUs. On the CPU there are none, and rank 0's statistics are all ranks'."""
        if next(model.parameters()).device.type == "cuda":
            return nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.leads and any(isinstance(module, BATCH_NORMS) for module in model.modules()):
            warnings.warn(
                f"on the CPU, batch norms see the part of the batch that their process has (1/{self.count}), and the running "
                "statistics are of the first process's: this run differs from that of one process",
                stacklevel=2,
            )
        return model

    def seed(self, seed: int) -> None:
        """Every rank draws dropout for itself: rank r from the seed plus r. Rank 0 goes on as one process would."""
        if not self.leads:
            torch.manual_seed(seed + self.number)

    def of_first(self, value: Any) -> Any:
        """Rank 0's ``value``, for decisions that all must take alike."""
        values = [value if self.leads else None]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def of_each(self, value: Any) -> list:
        """The ranks' values, in order."""
        return gathered(value)

    def own(self, values: list) -> Any:
        return values[self.number]

    def greatest(self, *values: int) -> list[int]:
        """Of each value the greatest that a rank has: a signal or a clock need not tell all at the same step."""
        found = torch.tensor(values)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    # In a training step.

    def part(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The rank's part [B/K, …] of a batch: never one example, which no batch norm trains on, so perhaps none."""
        self._whole = len(y)
        parts = max(1, min(self.count, len(y) // 2))
        if self.number >= parts:
            return x[:0], y[:0]
        return x.tensor_split(parts)[self.number], y.tensor_split(parts)[self.number]

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """A loss whose mean over the ranks is that of the batch: gradients are averaged over ranks, whatever their parts' sizes."""
        return F.cross_entropy(scores, y, reduction="sum") * (self.count / self._whole)

    def add(self, fit: Fit, loss: Tensor, scores: Tensor, y: Tensor) -> None:
        correct = (scores.detach().argmax(1) == y).sum()
        sums = torch.stack([loss.detach().double() * (self._whole / self.count), correct.double()])
        dist.all_reduce(sums)
        fit.add_sums(sums[0], sums[1], self._whole)

    def settle(self) -> None:
        """After a step: rank 0's batch-norm statistics for all, where they differ."""
        for buffer in self._statistics:
            dist.broadcast(buffer, 0)

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Anew whenever parameters are other objects: the wrapper averages the gradients of those it was made with."""
        norms = [m for m in model.modules() if isinstance(m, BATCH_NORMS) and not isinstance(m, nn.SyncBatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]
        return DistributedDataParallel(model)
