"""Step → the neuron sparsity that should hold from that step on, or None where no prune event is due."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PruningError


@dataclass(frozen=True)
class Cubic:
    """Gradual pruning (Zhu and Gupta 2017): from 0 at ``start`` to ``sparsity`` at ``end``, fast at first.

    s(t) = s_f·(1 − (1 − (t − start)/(end − start))³), every ``every`` steps after ``start``, and at ``end``.
    """

    sparsity: float
    start: int
    end: int
    every: int

    def __post_init__(self):
        _check(self.sparsity, self.start, self.every)
        if self.end <= self.start:
            raise PruningError(f"a gradual schedule needs start < end, got start={self.start}, end={self.end}")

    def target(self, step: int) -> float | None:
        due = step == self.end or (self.start < step < self.end and (step - self.start) % self.every == 0)
        if not due:
            return None
        return self.sparsity * (1 - (1 - (step - self.start) / (self.end - self.start)) ** 3)


@dataclass(frozen=True)
class Iterative:
    """``events`` equal steps of sparsity, the last reaching ``sparsity``, every ``every`` steps from ``start`` on.

    With one event this is one-shot pruning at ``start``.
    """

    sparsity: float
    start: int
    every: int = 1
    events: int = 1

    def __post_init__(self):
        _check(self.sparsity, self.start, self.every)
        if self.events < 1:
            raise PruningError(f"an iterative schedule needs at least 1 event, got {self.events}")

    def target(self, step: int) -> float | None:
        number, rest = divmod(step - self.start, self.every)
        return self.sparsity * ((number + 1) / self.events) if rest == 0 and 0 <= number < self.events else None


def _check(sparsity: float, start: int, every: int) -> None:
    if not 0 <= sparsity < 1:
        raise PruningError(f"a schedule's sparsity is a fraction in [0, 1), got {sparsity}")
    if start < 0:
        raise PruningError(f"a schedule starts at step 0 or later, got {start}")
    if every < 1:
        raise PruningError(f"a schedule needs every >= 1 step, got {every}")
