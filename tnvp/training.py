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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

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
def memory_told(batch_size: int, network: str = "") -> Iterator[None]:
    """What torch and Python raise where memory runs out, on whatever device, becomes a TrainingError, which says what ``network`` it was."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        line = str(error).partition("\n")[0]
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or MEMORY.search(line)):
            raise
        raise TrainingError(
            f"out of memory with batch_size={batch_size}: lower it, or choose a smaller network or data set ({line}{network and '; ' + network})"
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

    def state_dict(self) -> dict:
        return {"schedule": self.schedule.state_dict(), "step_number": self.step_number, "unscaled": self._unscaled}

    def load_state_dict(self, state: dict) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.step_number, self._unscaled = state["step_number"], list(state["unscaled"])

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
    """One call of `train`, as callbacks see it. ``step`` counts from the run's start, ``epoch`` within the phase.

    ``epochs_done`` and ``batches_done``, those of the epoch at work, say where in the phase it is.
    """

    model: nn.Module
    optimizer: Optimizer
    phase: str
    epochs: int
    steps_per_epoch: int
    step: int = 0
    epoch: float = 0.0
    epochs_done: int = 0
    batches_done: int = 0
    schedule: LRScheduler | WarmUp | None = field(default=None, repr=False)
    scaler: torch.amp.GradScaler | None = field(default=None, repr=False)
    _loss: Tensor | float = field(default=0.0, repr=False)
    _correct: Tensor | int = field(default=0, repr=False)
    _seen: int = field(default=0, repr=False)

    @property
    def begins(self) -> bool:
        """Whether nothing was trained in this phase yet."""
        return self.epochs_done == self.batches_done == 0

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of an epoch, whose `Callback.on_epoch` is still to come."""
        return self.batches_done == self.steps_per_epoch

    def state(self) -> dict:
        """What `train` needs to go on after this step or epoch, as tensors and plain data; random states are the caller's."""
        return {
            **{name: getattr(self, name) for name in ("phase", "step", "epoch", "epochs_done", "batches_done")},
            "sums": (self._loss, self._correct, self._seen),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict) -> None:
        """Be where another of the same phase was when it gave `state`; the model has the shapes that it had."""
        for name in ("step", "epoch", "epochs_done", "batches_done"):
            setattr(self, name, state[name])
        self._loss, self._correct, self._seen = state["sums"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Count one batch towards the epoch's sums, without synchronising the device."""
        self.add_sums(loss.detach() * len(labels), (scores.detach().argmax(1) == labels).sum(), len(labels))

    def add_sums(self, loss: Tensor, correct: Tensor, seen: int) -> None:
        """The same, from the batch's sums."""
        self._loss, self._correct, self._seen = self._loss + loss, self._correct + correct, self._seen + seen

    def totals(self) -> Totals:
        """Sums since the epoch's start; synchronises. Raises TrainingError where the loss is NaN or Inf."""
        totals = Totals(float(self._loss), int(self._correct), self._seen)
        if not math.isfinite(totals.loss):
            raise self._diverged(f"the loss became {totals.loss} before step {self.step}")
        return totals

    def require_finite(self) -> None:
        """Raises TrainingError where the loss, a parameter, a buffer or the optimizer's state has NaN or Inf; synchronises."""
        self.totals()
        for name, value in self._values():
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise self._diverged(f"{name} has NaN or Inf at step {self.step}")

    def _values(self) -> Iterator[tuple[str, Any]]:
        """What a checkpoint keeps of model and optimizer, by names for people."""
        yield from self.model.state_dict().items()
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"the optimizer's {key} of {name}", value

    def _diverged(self, what: str) -> TrainingError:
        return TrainingError(
            f"{what} ({self.phase}, epoch {self.epoch:.2f}): lower optimizer.lr, or use precision=float32"
        )

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


class Alone:
    """How this process takes part in a run: here as the only one, with whole batches. `distributed.Rank` is one of several."""

    number, count = 0, 1
    wrappers: Sequence[
        Callable
    ] = ()  # what the network is called through, made anew when its parameters are other objects

    @property
    def leads(self) -> bool:
        """Whether it is the one that tells and writes."""
        return self.number == 0

    def leave(self) -> None:
        """At the end of the run."""

    def device(self, name: str) -> torch.device:
        return device_of(name)

    def first_alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def folder(self, path: Path) -> AbstractContextManager[Path]:
        return nullcontext(path)

    def adapt(self, model: nn.Module) -> nn.Module:
        return model

    def seed(self, seed: int) -> None:
        """Once the network is made."""

    def of_first(self, value: Any) -> Any:
        return value

    def of_each(self, value: Any) -> Any:
        return value

    def own(self, values: Any) -> Any:
        """This process's share of what `of_each` gave."""
        return values

    def greatest(self, *values: int) -> Sequence[int]:
        return values

    def part(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y)

    def add(self, fit: Fit, loss: Tensor, scores: Tensor, y: Tensor) -> None:
        fit.add(loss, scores, y)

    def settle(self) -> None:
        """After each step."""


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
    resumed: dict | None = None,
    place: Alone | None = None,
) -> int:
    """Train ``model`` in place and return the step reached.

    ``epoch_batches()`` gives one epoch of (inputs, labels [B]) on the model's device. ``precision`` is autocast's; float16
    scales the loss. ``compiled`` runs the forward through torch.compile, anew whenever a callback changed the parameters.
    ``resumed``: the `Fit.state` of a call like this one, to go on from; its epoch's batches are asked for again, and those that it
    had are skipped. ``place``: this process's among several that train ``model`` together, each with the same batches.
    """
    place = place or Alone()
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
    fit = Fit(model, optimizer, phase, epochs, steps_per_epoch, step=first_step, schedule=schedule, scaler=scaler)
    if resumed is not None:
        fit.restore(resumed)
    forward = _Forward(model, [*place.wrappers, *[torch.compile] * compiled])
    y = ()
    try:
        for callback in callbacks:
            callback.on_start(fit)
        for epoch in range(fit.epochs_done, epochs):
            if fit.batches_done == 0:
                fit.restart()
            model.train()
            for x, y in islice(epoch_batches(), fit.batches_done, None):
                x, y = place.part(x, y)
                with autocast(device, precision):
                    scores = forward(x)
                    loss = place.loss(scores, y)
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                fit.step += 1
                fit.batches_done += 1
                fit.epoch = epoch + fit.batches_done / steps_per_epoch
                place.add(fit, loss, scores, y)
                place.settle()
                for callback in callbacks:
                    callback.on_step(fit)
            fit.epochs_done, fit.batches_done = epoch + 1, 0
            for callback in callbacks:
                callback.on_epoch(fit)
    finally:
        for callback in reversed(callbacks):
            callback.on_end(fit)
    return fit.step


class _Forward:
    """The model in its wrappers (compiled, or shared with other processes), made anew when its parameters are other objects."""

    def __init__(self, model: nn.Module, wrappers: Sequence[Callable]):
        self.model, self.wrappers = model, wrappers
        self.call: Callable = model
        self.parameters: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.wrappers and self.parameters != (now := [id(p) for p in self.model.parameters()]):
            self.call, self.parameters = self.model, now
            for wrap in self.wrappers:
                self.call = wrap(self.call)
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

    def state(self) -> dict:
        return {"latest": self.latest, "best": self._best, "held": self._held}

    def go_on_from(self, state: dict) -> None:
        """Hold what another held when it gave `state`."""
        self.latest, self._best, self._held = state["latest"], state["best"], state["held"]

    def on_start(self, fit: Fit) -> None:
        if fit.begins:
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
