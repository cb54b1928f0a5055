"""The training loop, evaluation, and the callback protocol.

The loop knows neither pruning nor W&B nor the disk: those are callbacks. Shapes: B batch, C classes.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, OneCycleLR

Batches = Iterable[tuple[Tensor, Tensor]]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
SCHEDULES: dict[str, Callable[[Optimizer, float, int], LRScheduler]] = {
    "one_cycle": lambda optimizer, lr, steps: OneCycleLR(optimizer, max_lr=lr, total_steps=steps, cycle_momentum=False),
    "cosine": lambda optimizer, lr, steps: CosineAnnealingLR(optimizer, T_max=steps),
    "constant": lambda optimizer, lr, steps: ConstantLR(optimizer, factor=1.0),
}
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TrainingError(ValueError):
    """Training can't go on: the loss is no number, or the device is out of memory."""


MEMORY = re.compile(r"out of memory|allocate memory|size calculation overflowed|ALLOC_FAILED", re.IGNORECASE)


@contextmanager
def memory_told(batch_size: int) -> Iterator[None]:
    """What torch and Python raise where memory runs out, on whatever device, becomes a TrainingError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        line = str(error).partition("\n")[0]
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or MEMORY.search(line)):
            raise
        raise TrainingError(
            f"out of memory with batch_size={batch_size}: lower it, or choose a smaller network or data set ({line})"
        ) from error


class WarmUp:
    """A schedule whose step k, counted from 1, has the learning rate times k/steps, until k = steps."""

    def __init__(self, schedule: LRScheduler, steps: int):
        self.schedule, self.steps, self.step_number = schedule, steps, 1
        self._scale()

    def step(self) -> None:
        for group, lr in zip(self.schedule.optimizer.param_groups, self._unscaled, strict=True):
            group["lr"] = lr  # some schedules compute a rate from the one before
        self.schedule.step()
        self.step_number += 1
        self._scale()

    def _scale(self) -> None:
        groups = self.schedule.optimizer.param_groups
        self._unscaled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * min(1.0, self.step_number / self.steps)


def make_schedule(
    name: str, optimizer: Optimizer, lr: float, steps: int, warmup_steps: int = 0
) -> LRScheduler | WarmUp:
    """A learning-rate schedule over ``steps`` steps from or around the peak ``lr``, whatever the optimizer held before.

    Its first ``warmup_steps`` steps are scaled, linearly from 0 to 1.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group.pop("initial_lr", None)
    schedule = SCHEDULES[name](optimizer, lr, steps)
    return WarmUp(schedule, warmup_steps) if warmup_steps else schedule


class Totals(NamedTuple):
    """Sums over the examples of some steps."""

    loss: float
    correct: int
    seen: int

    def since(self, earlier: Totals) -> Totals:
        return Totals(*(now - then for now, then in zip(self, earlier, strict=True)))

    def averages(self) -> dict[str, float]:
        """Mean "train/loss", and "train/accuracy" in percent; nothing where no example was seen."""
        if not self.seen:
            return {}
        return {"train/loss": self.loss / self.seen, "train/accuracy": 100.0 * self.correct / self.seen}


@dataclass
class Fit:
    """One call of `train`, as callbacks see it. ``step`` counts from the run's start, ``epoch`` within the phase."""

    model: nn.Module
    optimizer: Optimizer
    phase: str
    epochs: int
    steps_per_epoch: int
    step: int = 0
    epoch: float = 0.0
    _loss: Tensor | float = field(default=0.0, repr=False)
    _correct: Tensor | int = field(default=0, repr=False)
    _seen: int = field(default=0, repr=False)

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Count one batch towards the epoch's sums, without synchronising the device."""
        self._loss = self._loss + loss.detach() * len(labels)
        self._correct = self._correct + (scores.detach().argmax(1) == labels).sum()
        self._seen += len(labels)

    def totals(self) -> Totals:
        """Sums since the epoch's start; synchronises. Raises TrainingError where the loss is NaN or Inf."""
        totals = Totals(float(self._loss), int(self._correct), self._seen)
        if not math.isfinite(totals.loss):
            raise TrainingError(
                f"the loss became {totals.loss} before step {self.step} ({self.phase}, epoch {self.epoch:.2f}): "
                "lower optimizer.lr, or use precision=float32"
            )
        return totals

    def restart(self) -> None:
        """Begin new sums."""
        self._loss, self._correct, self._seen = 0.0, 0, 0


class Callback:
    """What can be hung into `train`; every method may do nothing."""

    def on_start(self, fit: Fit) -> None:
        """Before the first step."""

    def on_step(self, fit: Fit) -> None:
        """After each optimizer step; the model may be changed here."""

    def on_epoch(self, fit: Fit) -> None:
        """After each epoch's last step."""

    def on_end(self, fit: Fit) -> None:
        """After the last epoch, or on the way out of an error."""


def train(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler | WarmUp,
    epoch_batches: Callable[[], Batches],
    *,
    epochs: int,
    steps_per_epoch: int,
    phase: str = "train",
    first_step: int = 0,
    callbacks: Sequence[Callback] = (),
    precision: str = "float32",
    compiled: bool = False,
) -> int:
    """Train ``model`` in place and return the step reached.

    ``epoch_batches()`` gives one epoch of (inputs, labels [B]) on the model's device. ``precision`` is autocast's; float16
    scales the loss. ``compiled`` runs the forward through torch.compile, anew whenever a callback changed the parameters.
    """
    fit = Fit(model, optimizer, phase, epochs, steps_per_epoch, step=first_step)
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
    forward = _Forward(model, compiled)
    try:
        for callback in callbacks:
            callback.on_start(fit)
        for epoch in range(epochs):
            fit.restart()
            model.train()
            for number, (x, y) in enumerate(epoch_batches(), start=1):
                with autocast(device, precision):
                    scores = forward(x)
                    loss = F.cross_entropy(scores, y)
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                fit.step += 1
                fit.epoch = epoch + number / steps_per_epoch
                fit.add(loss, scores, y)
                for callback in callbacks:
                    callback.on_step(fit)
            for callback in callbacks:
                callback.on_epoch(fit)
    finally:
        for callback in reversed(callbacks):
            callback.on_end(fit)
    return fit.step


class _Forward:
    """The model, or its compiled form, compiled anew when its parameters are other objects than before."""

    def __init__(self, model: nn.Module, compiled: bool):
        self.model, self.compiled = model, compiled
        self.call: Callable = model
        self.parameters: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.compiled and self.parameters != (now := [id(p) for p in self.model.parameters()]):
            self.call, self.parameters = torch.compile(self.model), now
        return self.call(x)


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Autocast to ``precision``, or nothing for float32."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def evaluate(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Mean cross-entropy "loss" and "accuracy" in percent in eval mode; the model's mode is restored."""
    training = model.training
    model.eval()
    loss, correct, seen = 0.0, 0.0, 0
    with torch.no_grad():
        for x, y in batches:
            scores = model(x)
            loss = loss + F.cross_entropy(scores, y, reduction="sum")
            correct = correct + (scores.argmax(1) == y).sum()
            seen += len(y)
    model.train(training)
    return {"loss": float(loss) / seen, "accuracy": 100.0 * float(correct) / seen}


class Validation(Callback):
    """Evaluates after each epoch, and holds the best epoch's weights and optimizer state until `restore`.

    ``latest`` is the last evaluation. The best is by accuracy since the last `forget`; of equals, the later.
    """

    def __init__(self, evaluate: Callable[[], dict[str, float]]):
        self._evaluate = evaluate
        self.latest: dict[str, float] = {}
        self.forget()

    def forget(self) -> None:
        """The network's shapes changed: what was held no longer fits."""
        self._best, self._held = float("-inf"), None

    def on_start(self, fit: Fit) -> None:
        self.forget()

    def on_epoch(self, fit: Fit) -> None:
        self.latest = self._evaluate()
        if self.latest["accuracy"] >= self._best:
            self._best = self.latest["accuracy"]
            self._held = copy.deepcopy((fit.model.state_dict(), fit.optimizer.state_dict()))

    def restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put the best epoch's weights and optimizer state back, if one was held."""
        if self._held is not None:
            model.load_state_dict(self._held[0])
            optimizer.load_state_dict(self._held[1])


def device_of(name: str) -> torch.device:
    """ "auto" is the accelerator if there is one, else the CPU; any other name is taken as it is."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"device={name}, but this torch sees no CUDA device: use device=auto or device=cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise TrainingError(f"device={name}, but this machine has no MPS device: use device=auto or device=cpu")
    return device
