"""A progress bar on a terminal: loss, accuracy, widths, time left, as much of it as a line holds. Elsewhere it is quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tnvp.training import Callback, Fit

REFRESH_SECONDS = 0.25  # reading the loss waits for the device, so not at every step
WIDE = 120  # columns of a terminal that has room for a bar and the time elapsed
AROUND = len("finetune ") + len(" left 0:00:00")  # columns of every line; WIDE ones have more
BAR, ELAPSED = 24, len("0:00:00")


class ProgressBar(Callback):
    """One bar a phase. ``widths()`` gives each group's neurons alive."""

    def __init__(self, widths: Callable[[], dict[str, int]], console: Console):
        self.widths, self.console = widths, console

    def on_start(self, fit: Fit) -> None:
        wide = self.console.width >= WIDE
        self.room = self.console.width - AROUND - (BAR + ELAPSED + 2 if wide else 0)
        self.bar = Progress(
            TextColumn("{task.description:8}"),
            *([BarColumn(bar_width=BAR)] if wide else []),
            TextColumn("{task.fields[state]}"),
            *([TimeElapsedColumn()] if wide else []),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        steps = fit.epochs * fit.steps_per_epoch
        self.task = self.bar.add_task(fit.phase, total=steps, state=f"epoch 0/{fit.epochs}")
        self.shown = float("-inf")
        self.bar.start()

    def on_step(self, fit: Fit) -> None:
        done = fit.epochs_done * fit.steps_per_epoch + fit.batches_done
        if self.bar.disable or (time.monotonic() - self.shown < REFRESH_SECONDS and done < self.bar.tasks[0].total):
            return
        self.shown = time.monotonic()
        averages, widths = fit.totals().averages(), self.widths().values()
        parts = [
            [f"epoch {fit.epoch:.1f}/{fit.epochs}"],
            [f"loss {averages['train/loss']:.3f}"],
            [f"accuracy {averages['train/accuracy']:.1f} %"],
            ["widths " + "–".join(map(str, widths)), f"neurons {sum(widths)}"],
        ]
        self.bar.update(self.task, completed=done, state=fitting(parts, self.room))

    def on_end(self, fit: Fit) -> None:
        self.bar.stop()


def fitting(parts: Sequence[Sequence[str]], room: int) -> str:
    """One line of at most ``room`` characters: of each part the first wording that still fits; what is of most use comes first."""
    line = ""
    for wordings in parts:
        gap = " " if line else ""
        line += next((gap + text for text in wordings if len(line) + len(gap + text) <= room), "")
    return line
