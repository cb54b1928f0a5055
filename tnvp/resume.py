"""When the state of a run is kept, and how a signal stops it: at the end of a step, after that is kept.

SIGTERM and SIGINT (Ctrl-C) end a run while it trains after the step at work; elsewhere, or at the second of them, at once. One
request often comes twice: from the terminal or the scheduler, which tell every process, and from torchrun or the sweep's own process,
which pass on what they were told. So what comes within TOGETHER seconds of the first is no second one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tnvp.training import Callback, Fit

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOGETHER = 2.0  # seconds


class Stopped(KeyboardInterrupt):
    """A signal ended the run; ``status`` is the process's exit status then. No Exception: nothing goes on after it."""

    def __init__(self, number: int):
        self.number, self.status = number, 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")

    def __reduce__(self):  # a launcher's worker hands it back to the process that started it
        return Stopped, (self.number,)


@contextmanager
def signals_to(handler: Callable) -> Iterator[dict]:
    """Inside, SIGNALS go to the handler; yields those that they went to before, and go to again afterwards."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield before
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Interrupts:
    """Whether a signal came, and whether it waits for a step to end. ``first``: what is done before the first one stops things at once."""

    def __init__(self, first: Callable[[], None] = lambda: None):
        self.number: int | None = None
        self.waits, self._first, self._came = False, first, 0.0

    @contextmanager
    def handled(self) -> Iterator[Interrupts]:
        """Inside, signals come here; those around this one know of them afterwards. Only the main thread can do that; in another they act as before."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        with signals_to(self._receive) as before:
            try:
                yield self
            finally:
                around = getattr(before[SIGNALS[0]], "__self__", None)
                if isinstance(around, Interrupts) and self.number is not None:
                    around.number, around._came = self.number, self._came

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.number is not None:
            if now - self._came < TOGETHER:
                return
            raise Stopped(number)
        self.number, self._came = number, now
        if not self.waits:
            self._first()
            raise Stopped(number)
        os.write(2, b"\nstopping after this step; once more stops at once\n")  # print may not be called from a handler

    def end(self) -> None:
        """Raises Stopped if a signal came and waited."""
        if self.number is not None:
            raise Stopped(self.number)


class Checkpointing(Callback):
    """Calls ``keep(fit)`` after every epoch, every ``steps`` steps and ``minutes`` minutes, and before a signal ends the run.

    The last of the callbacks: what they do at a step is done and written by then. A state with NaN or Inf is not kept.
    ``greatest(*values)``: of each value the greatest of all processes that make this run, since a signal comes to each by itself.
    """

    def __init__(
        self,
        keep: Callable[[Fit], None],
        steps: int | None,
        minutes: float | None,
        interrupts: Interrupts,
        greatest: Callable[..., Sequence[int]] = lambda *values: values,
    ):
        self.keep, self.steps, self.minutes, self.interrupts = keep, steps, minutes, interrupts
        self.greatest = greatest
        self._last = time.monotonic()

    def on_start(self, fit: Fit) -> None:
        self.interrupts.waits = True

    def on_step(self, fit: Fit) -> None:
        if not fit.ends_epoch:
            self._keep(fit, self._is_due(fit.step))

    def on_epoch(self, fit: Fit) -> None:
        self._keep(fit, True)

    def _keep(self, fit: Fit, due: bool) -> None:
        due, number = self.greatest(int(due), self.interrupts.number or 0)
        if not (due or number):
            return
        fit.require_finite()
        self.keep(fit)
        self._last = time.monotonic()
        if number:
            self.greatest(0)  # none leaves before the one that writes has done so
            raise Stopped(number)

    def on_end(self, fit: Fit) -> None:
        self.interrupts.waits = False

    def _is_due(self, step: int) -> bool:
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.minutes is not None and time.monotonic() - self._last >= 60 * self.minutes
