"""Calibration data: the batches a user hands in, and the network's outputs on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .attention import explicit_attention
from .channels import evaluating
from .errors import PruningError
from .layers import BATCH_NORMS


def calibration_batches(calibration: Iterable) -> list[tuple]:
    """The model's arguments in each calibration batch: a tensor, or the first of an (x, y) pair, itself perhaps a tuple."""
    batches = []
    for batch in [calibration] if isinstance(calibration, Tensor) else calibration:
        first = batch[0] if isinstance(batch, tuple | list) else batch
        batches.append(tuple(first) if isinstance(first, tuple | list) else (first,))
    if not batches:
        raise PruningError("calibration is empty: give at least one batch")
    return batches


def on_device_of(model: nn.Module, arguments: tuple) -> tuple:
    """The arguments with their tensors where the model's parameters are."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)


def outputs(model: nn.Module, batches: list[tuple]) -> list[Tensor]:
    """Every tensor that the network gives on each batch; attention is spelled out, since fused layers answer otherwise where
    tokens are padded."""
    found: list[Tensor] = []
    with evaluating(model), explicit_attention(model), torch.no_grad():
        for batch in batches:
            output = model(*on_device_of(model, batch))
            found += [leaf.double().cpu() for leaf in tensors_in(output) if leaf.is_floating_point()]
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
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        values = output.values()
    elif isinstance(output, list | tuple):
        values = output
    else:
        values = vars(output).values() if hasattr(output, "__dict__") else ()
    return [leaf for value in values for leaf in tensors_in(value)]


def relative_error(before: list[Tensor], after: list[Tensor]) -> float | None:
    """‖after − before‖ / ‖before‖ over all outputs; None where the network gives no tensor."""
    if not before:
        return None
    change = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    return math.sqrt(change / max(sum(float(b.square().sum()) for b in before), torch.finfo(torch.float64).tiny))
