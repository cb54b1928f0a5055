"""What the processes of one training run tell each other, so that all of them prune alike.

The ranks of a `torch.distributed` group each see their part of every batch (DistributedDataParallel). Where nothing is
initialised, or a group has one rank, every function here gives back what it was given.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import PruningError

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def several(group: dist.ProcessGroup | None = None) -> bool:
    """Whether there are other ranks. None is the default group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's ``value`` in rank order, the same list on all ranks. Tensors in it must be on the CPU."""
    if not several(group):
        return [value]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def require_alike(value: Any, trouble: str, group: dist.ProcessGroup | None = None) -> None:
    """Raises PruningError, on all ranks, where they hold different values."""
    values = gathered(value, group)
    strangers = [rank for rank, other in enumerate(values) if other != values[0]]
    if strangers:
        raise PruningError(f"rank {', '.join(map(str, strangers))} and rank 0 differ: {trouble}; nothing was pruned")


def fingerprint(model: nn.Module) -> str:
    """A digest of the parameters' bytes."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def require_bare(model: nn.Module) -> None:
    """Raises PruningError where ``model`` is a wrapper, which holds on to the parameters that an event replaces."""
    if isinstance(model, WRAPPERS):
        kind = type(model).__name__
        raise PruningError(
            f"the model is wrapped in {kind}: give the Pruner model.module, the network inside, train with the wrapper, and "
            f"after every event wrap the network in a new {kind}, as the old one holds the parameters of before"
        )
