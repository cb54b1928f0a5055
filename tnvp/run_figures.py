"""Figures of one run: the trace heatmap, widths and training curves, with the prune events."""

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from tnvp.figure_style import CRITERIA, DASHES, DEAD, OTHER, STYLE, label_ends, log_ticks, new_figure, plain_number
from tnvp.run_directory import ResultsError


def trace_heatmap(
    traces: pd.DataFrame, events: list[dict], title: str = "Variance of each neuron", caption: str = ""
) -> Figure:
    """Neurons against training steps, one panel a group; colour: variance of the neuron's output, log scale.

    traces: columns run_directory.TRACE_COLUMNS; events: the run's prune events. Rows are sorted by the last
    variance seen; a removed neuron is grey from its removal on. Raises ResultsError for an empty trace.
    """
    groups = list(dict.fromkeys(traces["group"]))
    if not groups:
        raise ResultsError("the trace is empty: the run recorded no window. Lower pruning.trace_every.")
    positive = traces["variance"][traces["variance"] > 0]
    low, high = np.quantile(positive, [0.01, 1]) if len(positive) else (1e-12, 1.0)
    norm = LogNorm(low, max(high, 1.001 * low), clip=True)
    columns = math.ceil(len(groups) / 4)
    rows = math.ceil(len(groups) / columns)
    caption = (
        "Rows: neurons, sorted by the last variance seen. Grey: removed, from the orange tick on. "
        f"Variances under {low:.1e}, zero too, have the darkest colour. {caption}"
    )
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = new_figure(max(7.0, 3.6 * columns), 1.2 + 1.5 * rows, title, caption)
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, group in zip(panels.T.flat, groups, strict=False):
            mesh = _heat_panel(axes, group, traces[traces["group"] == group], _deaths(events, group), norm)
        for axes in panels.T.flat[len(groups) :]:
            axes.set_visible(False)
        bar = figure.colorbar(mesh, ax=panels, label="Variance (log scale)", extend="min", aspect=30)
        log_ticks(bar.ax.yaxis, norm.vmin, norm.vmax)
    return figure


def _deaths(events: list[dict], group: str) -> dict[int, int]:
    """Neuron id -> step of its removal."""
    return {
        neuron: event["step"]
        for event in events
        for pruned in event["groups"]
        if pruned["name"] == group
        for neuron in pruned["removed"]
    }


def _heat_panel(axes: Axes, group: str, traces: pd.DataFrame, deaths: dict[int, int], norm: LogNorm) -> QuadMesh:
    wide = traces.pivot(index="neuron", columns="step", values="variance")
    wide = wide.reindex(sorted({*wide.index, *deaths}))  # a neuron may go before its first window
    steps = wide.columns.to_numpy(float)  # where windows end; the first begins with the run
    until = np.array([deaths.get(neuron, math.inf) for neuron in wide.index])
    wide = wide.mask(steps[None, :] > until[:, None])
    last = wide.ffill(axis=1).iloc[:, -1]
    wide = wide.loc[last.sort_values(na_position="first", kind="stable").index]
    cells = np.ma.masked_invalid(wide.to_numpy(float))
    mesh = axes.pcolormesh(
        np.r_[0, steps], np.arange(len(wide) + 1), cells, norm=norm, cmap=OTHER.with_extremes(bad=DEAD), rasterized=True
    )
    dead = [row for row, neuron in enumerate(wide.index) if neuron in deaths]
    when = [deaths[wide.index[row]] for row in dead]
    axes.vlines(when, dead, np.add(dead, 1), color=CRITERIA["obs"][0], linewidth=1.2)
    axes.set(
        title=f"{group}: {len(wide)} to {len(wide) - len(dead)} neurons",
        ylabel="Neurons",
        xlabel="Training step" if axes.get_subplotspec().is_last_row() else "",
    )
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return mesh


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
        for index, (name, (steps, left)) in enumerate(lines.items()):
            colour = OTHER(0.85 * index / max(1, len(lines) - 1))
            dash = DASHES[index % len(DASHES)]
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
        loss.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
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
    width = 0.9 if len(events) < 6 else 0.4
    for index, event in enumerate(events):
        axes.axvline(
            event["step"],
            color="0.3",
            linewidth=width,
            linestyle=(0, (2, 2)),
            label=None if index else f"prune event ({len(events)})",
        )
