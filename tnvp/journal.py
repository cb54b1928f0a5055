"""What a run tells while it trains: the same records to its directory and to the tracker."""

from __future__ import annotations

import pandas as pd

from tnvp.pruning import Pruner
from tnvp.pruning.recorder import TraceRow
from tnvp.run_directory import RunDirectory
from tnvp.tracking import Tracker
from tnvp.training import Callback, Fit, Totals, Validation


class Journal(Callback):
    """Writes a metrics record every ``every`` steps and a full one, with validation and widths, after each epoch."""

    def __init__(self, directory: RunDirectory, tracker: Tracker, pruner: Pruner, validation: Validation, every: int):
        self.directory, self.tracker, self.pruner = directory, tracker, pruner
        self.validation, self.every = validation, every
        self._logged = Totals(0.0, 0, 0)
        self._written = 0
        self._events_after: list[int] = []  # how many records each event came after

    def on_step(self, fit: Fit) -> None:
        if fit.step % self.every == 0:
            totals = fit.totals()
            self._write(self._record(fit) | totals.since(self._logged).averages())
            self._logged = totals

    def on_epoch(self, fit: Fit) -> None:
        record = self._record(fit) | fit.totals().averages()
        record |= {f"validation/{name}": value for name, value in self.validation.latest.items()}
        record |= {f"widths/{name}": width for name, width in self.pruner.widths.items()}
        self._write(record)
        self._logged = Totals(0.0, 0, 0)
        self._histograms(fit.step)

    def replay(self, state: dict, records: list[dict]) -> None:
        """Tell the ``records`` of another run of the same trunk, which then gave `state`; the pruner has its trace by now."""
        self._logged = Totals(*state["logged"])
        for record in records:
            self._write(record)
            if "validation/accuracy" in record:
                self._histograms(record["step"])

    def state(self) -> dict:
        return {
            "logged": tuple(self._logged),
            "written": self._written,
            "events_after": self._events_after,
        }

    def go_on_from(self, state: dict) -> None:
        """Go on where another was when it gave `state`; what it wrote is in the directory, and is told to the tracker again."""
        self._logged = Totals(*state["logged"])
        self._written, self._events_after = state["written"], list(state["events_after"])
        if self.tracker.where:
            self._tell_again()

    def _tell_again(self) -> None:
        """All rows that the tracker had, in the same order."""
        written = self.directory.traces(columns=["step", "group", "variance"])
        traces = pd.concat([written, trace_table(self.pruner.trace)[list(written)]], ignore_index=True)
        windows = dict(list(traces.groupby("step")))
        events = list(zip(self._events_after, self.directory.events(), strict=True))
        for number, record in enumerate([*self.directory.records(), None]):
            while events and events[0][0] == number:
                self.tracker.event(events.pop(0)[1])
            if record is not None:
                self.tracker.log(record)
                if "validation/accuracy" in record and record["step"] in windows:
                    for group, rows in windows[record["step"]].groupby("group", sort=False):
                        self.tracker.histogram(f"variance/{group}", rows["variance"].tolist(), record["step"])

    def write_traces(self, at_least: int = 1) -> None:
        """Move the pruner's trace to the directory, if it has ``at_least`` rows there."""
        if sum(len(row.neuron) for row in self.pruner.trace) >= at_least:
            self.directory.write_traces(trace_table(self.pruner.take_trace()))

    def event(self, record: dict) -> None:
        """One prune event."""
        self._events_after.append(self._written)
        self.directory.event(record)
        self.tracker.event(record)

    def _record(self, fit: Fit) -> dict:
        epoch = fit.step / fit.steps_per_epoch
        return {
            "step": fit.step,
            "epoch": epoch,
            "phase": fit.phase,
            "learning_rate": fit.optimizer.param_groups[0]["lr"],
        }

    def _histograms(self, step: int) -> None:
        for row in rows_at(self.pruner.trace, step):
            self.tracker.histogram(f"variance/{row.group}", row.variance.tolist(), step)

    def _write(self, record: dict) -> None:
        self._written += 1
        self.directory.log(record)
        self.tracker.log(record)


def rows_at(trace: list[TraceRow], step: int) -> list[TraceRow]:
    """The rows of the window that closed at ``step``, one a group."""
    return [row for row in trace if row.step == step]


def trace_table(trace: list[TraceRow]) -> pd.DataFrame:
    """The trace as a table: one row per neuron and window, columns step, group, neuron, mean, variance, count."""
    parts = [
        pd.DataFrame(
            {
                "step": row.step,
                "group": row.group,
                "neuron": row.neuron.numpy(),
                "mean": row.mean.numpy(),
                "variance": row.variance.numpy(),
                "count": row.count,
            }
        )
        for row in trace
    ]
    columns = ["step", "group", "neuron", "mean", "variance", "count"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
