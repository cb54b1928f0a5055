"""Figures of runs from their events and metrics: widths over time, training curves."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from tnvp.figure_style import (
    DASHES,
    OTHER,
    STYLE,
    group_styles,
    label_ends,
    log_ticks,
    new_figure,
    plain_number,
)
from tnvp.run_directory import ResultsError


def widths_over_time(metrics: pd.DataFrame, events: list[dict], title: str = "Widths", caption: str = "") -> Figure:
    """Neurons left in each group against training steps: from the prune events, else from the metrics.

    Raises ResultsError if neither names a group.
    """
    last = max([event["step"] for event in events] + [int(metrics["step"].max()) if len(metrics) else 0])
    lines = _widths(metrics, events, last)
    if not lines:
        raise ResultsError("no widths to draw: there is no prune event, and no metrics column widths/<group>")
    widths = np.concatenate([left for _, left in lines.values()])
    ends = []
    with matplotlib.rc_context(STYLE):
        figure = new_figure(6.5, 3.6, title, caption)
        axes = figure.subplots()
        axes.set(xlabel="Training step", ylabel="Neurons left")
        for (name, (steps, left)), (colour, dash) in zip(lines.items(), group_styles(len(lines)), strict=True):
            axes.step(steps, left, where="post", color=colour, linestyle=dash, label=name)
            ends.append((last, left[-1], f"{name}: {left[0]:g} to {left[-1]:g}", colour))
        if widths.max() > 8 * max(1, widths.min()):
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(plain_number)
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(0, 1.05 * widths.max())
        label_ends(axes, ends)
    return figure


def _widths(metrics: pd.DataFrame, events: list[dict], last: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Group -> steps, and neurons left from each on. Events know the step, metrics only a later one."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for event in events:
        for group in event["groups"]:
            line = lines.setdefault(group["name"], [(0, group["width_before"])])
            line.append((event["step"], group["width_after"]))
    for column in metrics.filter(regex="^widths/"):
        rows = metrics.dropna(subset=[column])
        lines.setdefault(column.removeprefix("widths/"), list(zip(rows["step"], rows[column], strict=True)))
    lines = {name: [*line, (last, line[-1][1])] for name, line in lines.items() if line}
    return {name: tuple(np.array(line, float).T) for name, line in lines.items()}


def training_curves(metrics: pd.DataFrame, events: list[dict], title: str = "Training", caption: str = "") -> Figure:
    """Loss and accuracy, training and validation, against training steps; prune events are vertical lines.

    metrics: as RunDirectory.metrics() returns. Raises ResultsError if there are no records.
    """
    if not len(metrics):
        raise ResultsError("no metrics to draw: the run has no record yet")
    with matplotlib.rc_context(STYLE):
        figure = new_figure(6.5, 4.6, title, caption)
        loss, accuracy = figure.subplots(2, 1, sharex=True)
        loss.set(ylabel="Loss (nats, log scale)", yscale="log")
        accuracy.set(ylabel="Accuracy (%)", xlabel="Training step")
        _curves(loss, metrics, events, "loss")
        _curves(accuracy, metrics, events, "accuracy")
        log_ticks(loss.yaxis, *loss.get_ylim())
        handles, labels = accuracy.get_legend_handles_labels()
        loss.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def _curves(axes: Axes, metrics: pd.DataFrame, events: list[dict], name: str) -> None:
    epochs = metrics.reindex(columns=["validation/loss"]).notna().any(axis=1)  # records at an epoch's end
    dashed = {"color": OTHER(0.5), "marker": "D", "linestyle": DASHES[1]}
    parts = [
        ("training", f"train/{name}", ~epochs, {"color": "0.7", "linewidth": 0.7}),
        ("training, epoch", f"train/{name}", epochs, {"color": "0.1", "marker": "o"}),
        ("validation", f"validation/{name}", epochs, dashed),
    ]
    for label, column, chosen, style in parts:
        if column in metrics and metrics.loc[chosen, column].notna().any():
            rows = metrics[chosen]
            axes.plot(rows["step"], rows[column], markersize=3.5, label=label, **style)
    after = [event.get(f"{name}_after") for event in events]
    if any(value is not None for value in after):  # accuracy alone is measured there
        steps = [event["step"] for event in events]
        lone = {"linestyle": "none", "marker": "D", "fillstyle": "none", "color": OTHER(0.5), "markersize": 4.5}
        axes.plot(steps, np.array(after, float), label="validation, right after an event", **lone)
    width = 0.9 if len(events) < 6 else 0.4
    for index, event in enumerate(events):
        axes.axvline(
            event["step"],
            color="0.3",
            linewidth=width,
            linestyle=(0, (2, 2)),
            label=None if index else f"prune event ({len(events)})",
        )
