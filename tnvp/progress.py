"""A progress bar on a terminal: loss, accuracy, widths, time left. Elsewhere it is quiet."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tnvp.training import Callback, Fit

REFRESH_SECONDS = 0.25  # reading the loss waits for the device, so not at every step


class ProgressBar(Callback):
    """One bar a phase. ``widths()`` gives each group's neurons alive."""

    def __init__(self, widths: Callable[[], dict[str, int]], console: Console):
        self.widths, self.console = widths, console

    def on_start(self, fit: Fit) -> None:
        self.bar = Progress(
            TextColumn("{task.description:9}"),
            BarColumn(bar_width=24),
            TextColumn("epoch {task.fields[epoch]}"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        steps = fit.epochs * fit.steps_per_epoch
        self.task = self.bar.add_task(fit.phase, total=steps, epoch=f"0/{fit.epochs}", state="")
        self.shown = float("-inf")
        self.bar.start()

    def on_step(self, fit: Fit) -> None:
        done = fit.epochs_done * fit.steps_per_epoch + fit.batches_done
        if self.bar.disable or (time.monotonic() - self.shown < REFRESH_SECONDS and done < self.bar.tasks[0].total):
            return
        self.shown = time.monotonic()
        averages = fit.totals().averages()
        widths = "–".join(str(width) for width in self.widths().values())
        state = f"loss {averages['train/loss']:.3f}  accuracy {averages['train/accuracy']:.1f} %  widths {widths}"
        self.bar.update(self.task, completed=done, epoch=f"{fit.epoch:.1f}/{fit.epochs}", state=state)

    def on_end(self, fit: Fit) -> None:
        self.bar.stop()
