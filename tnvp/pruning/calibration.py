"""Calibration data: the batches a user hands in, and the network's outputs on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor, nn

from .attention import explicit_attention
from .channels import evaluating
from .errors import PruningError
from .layers import BATCH_NORMS


def calibration_batches(calibration: Iterable, what: str) -> list[tuple]:
    """The model's arguments in each batch of ``what``: a tensor, or the first of an (x, y) pair, itself perhaps a tuple."""
    if isinstance(calibration, str | dict) or not isinstance(calibration, Iterable):
        raise PruningError(f"{what} must be a loader or a list of batches, got {type(calibration).__name__}")
    batches = []
    for batch in [calibration] if isinstance(calibration, Tensor) else calibration:
        first = batch[0] if isinstance(batch, tuple | list) and batch else batch
        arguments = tuple(first) if isinstance(first, tuple | list) else (first,)
        if not any(isinstance(x, Tensor) for x in arguments):
            raise PruningError(
                f"{what} has a batch of type {type(batch).__name__}, which starts with no tensor: "
                "each must be a tensor x, a pair (x, y), or a pair of a tuple of arguments and y"
            )
        batches.append(arguments)
    if not batches:
        raise PruningError(f"{what} is empty: give at least one batch (a generator is used up after one pass)")
    return batches


def on_device_of(model: nn.Module, arguments: tuple) -> tuple:
    """The arguments with their tensors where the model's parameters are."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)


def outputs(model: nn.Module, batches: list[tuple]) -> list[list[Tensor]]:
    """The tensors that the network gives on each batch; attention is spelled out, since fused layers answer otherwise where
    tokens are padded.

    Raises:
        PruningError: the network fails on a batch.
    """
    found = []
    with evaluating(model), explicit_attention(model), torch.no_grad():
        for batch in batches:
            try:
                output = model(*on_device_of(model, batch))
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in batch if isinstance(x, Tensor))
                raise PruningError(f"the network fails on a calibration batch ({shapes}): {error}") from error
            found.append([leaf.double().cpu() for leaf in tensors_in(output) if leaf.is_floating_point()])
    return found


def running_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, BATCH_NORMS) and m.running_mean is not None]


def recalibrate(model: nn.Module, batches: list[tuple]) -> None:
    """Measure the batch norms' running statistics anew on ``batches`` (each a forward pass, all with the same weight).

    Everything but the batch norms runs in eval mode. On an error the old statistics are back.

    Raises:
        PruningError: no batch norm of the network keeps running statistics.
    """
    norms = running_norms(model)
    if not norms:
        raise PruningError("bn_recalibrate: the network has no batch norm with running statistics; leave it out")
    before = [(norm, norm.momentum, copy.deepcopy(norm._buffers)) for norm in norms]
    done = False
    try:
        with evaluating(model), torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over the batches
                norm.training = True
            for batch in batches:
                model(*on_device_of(model, batch))
        if not all(bool(norm.running_mean.isfinite().all() & norm.running_var.isfinite().all()) for norm in norms):
            raise ValueError("a batch norm's input has NaN or Inf")
        done = True
    except (RuntimeError, ValueError, TypeError) as error:
        raise PruningError(f"bn_recalibrate: the network fails on its batches: {error}") from error
    finally:
        for norm, momentum, buffers in before:
            norm.momentum = momentum
            if not done:
                norm._buffers.update(buffers)


def tensors_in(output) -> list[Tensor]:
    """Every tensor of an output: itself, or those in its tuples, lists, dictionaries and objects with fields."""
    found, seen, waiting = [], set(), [output]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += reversed(_parts(value))
    return found


def _parts(value) -> list:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    return [] if isinstance(value, Enum | type) or not hasattr(value, "__dict__") else list(vars(value).values())


def relative_error(before: list[list[Tensor]], after: list[list[Tensor]]) -> float | None:
    """‖after − before‖ / ‖before‖ over all outputs; None where the network gives no tensor."""
    pairs = [(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True)]
    if not pairs:
        return None
    change, size = (
        sum(float(x.square().sum()) for x in part) for part in ([b - a for a, b in pairs], [a for a, _ in pairs])
    )
    return math.sqrt(change / max(size, torch.finfo(torch.float64).tiny))
