"""Figures of one run's trace: the variances of neurons over time, when they died, how early that could be told."""

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tnvp.figure_style import CRITERIA, DEAD, OTHER, STYLE, group_styles, label_ends, log_ticks, new_figure
from tnvp.run_directory import ResultsError

GONE = CRITERIA["obs"][0]  # marks what dies; no criterion is drawn in these figures


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
    traces, merged = _whole(traces, events)
    norm = _colours(traces)
    columns = math.ceil(len(groups) / 4)
    rows = math.ceil(len(groups) / columns)
    caption = (
        "Rows: neurons, sorted by the last variance seen. Grey: removed, from the orange tick on. "
        f"Variances under {norm.vmin:.1e}, zero too, have the darkest colour.{merged} {caption}"
    )
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = new_figure(max(7.0, 3.6 * columns), 1.2 + 1.5 * rows, title, caption)
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, group in zip(panels.T.flat, groups, strict=False):
            mesh = _heat_panel(axes, group, traces[traces["group"] == group], deaths(events, group), norm)
        for axes in panels.T.flat[len(groups) :]:
            axes.set_visible(False)
        bar = figure.colorbar(mesh, ax=panels, label="Variance (log scale)", extend="min", aspect=30)
        log_ticks(bar.ax.yaxis, norm.vmin, norm.vmax)
    return figure


def deaths(events: list[dict], group: str) -> dict[int, int]:
    """Neuron id -> step of its removal."""
    return {
        neuron: event["step"]
        for event in events
        for pruned in event["groups"]
        if pruned["name"] == group
        for neuron in pruned["removed"]
    }


def _heat_panel(axes: Axes, group: str, traces: pd.DataFrame, died: dict[int, int], norm: LogNorm) -> QuadMesh:
    wide, _ = _until_death(traces, died)
    steps = wide.columns.to_numpy(float)
    last = wide.ffill(axis=1).iloc[:, -1]
    wide = wide.loc[last.sort_values(na_position="first", kind="stable").index]
    cells = np.ma.masked_invalid(wide.to_numpy(float))
    mesh = axes.pcolormesh(
        np.r_[0, steps], np.arange(len(wide) + 1), cells, norm=norm, cmap=OTHER.with_extremes(bad=DEAD), rasterized=True
    )
    dead = [row for row, neuron in enumerate(wide.index) if neuron in died]
    when = [died[wide.index[row]] for row in dead]
    axes.vlines(when, dead, np.add(dead, 1), color=GONE, linewidth=1.2)
    axes.set(
        title=f"{group}: {len(wide)} to {len(wide) - len(dead)} neurons",
        ylabel="Neurons",
        xlabel="Training step" if axes.get_subplotspec().is_last_row() else "",
    )
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return mesh


def _whole(traces: pd.DataFrame, events: list[dict]) -> tuple[pd.DataFrame, str]:
    """The trace in `whole_windows`, and what the caption says of it."""
    whole = whole_windows(traces, events)
    return whole, " Short windows at epochs' ends are merged into the next." if len(whole) < len(traces) else ""


def whole_windows(traces: pd.DataFrame, events: list[dict]) -> pd.DataFrame:
    """The trace with windows that are shorter than half of the longest merged into the next.

    An epoch's end closes a window, too: steps 10, 11, 20, 22 … would be columns of one step. Windows are merged by their counts
    (Chan et al.'s formula, as in `pruning.moments`); none is merged across an event.
    """
    steps = np.unique(traces["step"])
    ends = _window_ends(steps, {event["step"] for event in events})
    if len(ends) == len(steps):
        return traces
    part = traces.assign(step=ends[np.searchsorted(ends, traces["step"])], total=traces["mean"] * traces["count"])
    keys = ["step", "group", "neuron"]
    sums = part.groupby(keys, sort=False)[["count", "total"]].transform("sum")
    mean = sums["total"] / sums["count"]
    squares = (part["count"] - 1) * part["variance"] + part["count"] * (part["mean"] - mean) ** 2
    whole = part.assign(mean=mean, variance=squares, sum=sums["count"]).groupby(keys, sort=False, as_index=False)
    merged = whole.agg({"mean": "first", "variance": "sum", "count": "sum"})
    return merged.assign(variance=merged["variance"] / (merged["count"] - 1))


def _window_ends(steps: np.ndarray, fixed: set[int]) -> np.ndarray:
    """The ends that stay. Windows that end with an event or the run stay, and swallow a short one before."""
    fixed = {*(int(steps[steps <= step].max()) for step in fixed if (steps <= step).any()), int(steps[-1])}
    least, ends = np.diff(steps, prepend=0).max() / 2, [0]
    for step in steps.tolist():
        if step - ends[-1] < least and step in fixed and ends[-1] not in {0, *fixed}:
            ends.pop()
        if step - ends[-1] >= least or step in fixed:
            ends.append(step)
    return np.array(ends[1:])


def survival(traces: pd.DataFrame, events: list[dict], title: str = "Survival of neurons", caption: str = "") -> Figure:
    """When each neuron died, with its variance until then: two panels a group.

    Left: a row a neuron, coloured by its variance as long as it lived; the first to die on top, so that the edge is the survival
    curve. Right: the id of each removed neuron at the step of its removal. Raises ResultsError without a trace or an event.
    """
    groups = _groups(traces, events)
    (traces, merged), last = _whole(traces, events), int(traces["step"].max())
    norm = _colours(traces)
    blocks = math.ceil(len(groups) / 5)
    rows = math.ceil(len(groups) / blocks)
    caption = (
        "Left: a row a neuron, in order of death (those of one event by the variance last seen), as long as it lived; the edge, orange, is "
        "the survival curve. Right: a dot where the neuron of that id was removed; ids without a dot are alive at the end. Dotted: "
        f"prune events. Variances under {norm.vmin:.1e}, zero too, have the darkest colour.{merged} {caption}"
    )
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = new_figure(7.2 * blocks, 1.2 + 2.1 * rows, title, caption)
        panels = figure.subplots(rows, 2 * blocks, squeeze=False, width_ratios=[1.3, 1] * blocks)
        pairs = [panels[row, 2 * block : 2 * block + 2] for block in range(blocks) for row in range(rows)]
        for (left, right), (group, size) in zip(pairs, groups.items(), strict=False):
            died = deaths(events, group)
            mesh = _lives(left, traces[traces["group"] == group], died, size, last, norm)
            left.set(title=f"{group}: {size} to {size - len(died)} neurons", ylabel="Neurons alive")
            right.plot(list(died.values()), list(died), ".", color=GONE, markersize=3 if size < 200 else 1.5)
            right.set(ylabel="Neuron id", ylim=(-0.5, size - 0.5), xlim=(0, last))
            for axes in (left, right):
                for step in sorted(set(died.values())):
                    axes.axvline(step, color="0.3", linewidth=0.6, linestyle=(0, (1, 2)), zorder=0.5)
                axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
                axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for pair in pairs[len(groups) :]:
            for axes in pair:
                axes.set_visible(False)
        for axes in [*pairs[len(groups) - 1], *panels[-1]]:
            axes.set_xlabel("Training step")
        bar = figure.colorbar(mesh, ax=panels, label="Variance (log scale)", extend="min", aspect=30)
        log_ticks(bar.ax.yaxis, norm.vmin, norm.vmax)
    return figure


def _colours(traces: pd.DataFrame) -> LogNorm:
    """From the first percentile of the variances that are not zero to the greatest."""
    positive = traces["variance"][traces["variance"] > 0]
    low, high = np.quantile(positive, [0.01, 1]) if len(positive) else (1e-12, 1.0)
    return LogNorm(low, max(high, 1.001 * low), clip=True)


def _lives(axes: Axes, traces: pd.DataFrame, died: dict[int, int], size: int, last: int, norm: LogNorm) -> QuadMesh:
    """A row a neuron until it died, the first to die on top, and the survival curve along their ends."""
    wide, until = _until_death(traces, died)
    seen = wide.ffill(axis=1).iloc[:, -1].to_numpy()
    wide = wide.iloc[np.lexsort([-np.nan_to_num(seen), -until])]  # row 0, the foot, lives longest
    cells = np.ma.masked_invalid(wide.to_numpy(float))
    steps = wide.columns.to_numpy(float)
    mesh = axes.pcolormesh(np.r_[0, steps], np.arange(len(wide) + 1), cells, norm=norm, cmap=OTHER, rasterized=True)
    when, counts = np.unique(np.array(list(died.values()), int), return_counts=True)
    alive = size - np.cumsum([0, *counts])
    axes.step([0, *when, last], [*alive, alive[-1]], where="post", color=GONE, linewidth=1.2, label="alive")
    axes.set(xlim=(0, last), ylim=(0, 1.02 * size))
    return mesh


def _until_death(traces: pd.DataFrame, died: dict[int, int]) -> tuple[pd.DataFrame, np.ndarray]:
    """Variances, a row a neuron and a column a window, NaN after its death; and when it died, infinity for who lives."""
    wide = traces.pivot(index="neuron", columns="step", values="variance")
    wide = wide.reindex(sorted({*wide.index, *died}))  # a neuron may go before its first window
    until = np.array([died.get(neuron, math.inf) for neuron in wide.index])
    steps = wide.columns.to_numpy(float)  # where windows end; the first begins with the run
    return wide.mask(steps[None, :] > until[:, None]), until


def _groups(traces: pd.DataFrame, events: list[dict]) -> dict[str, int]:
    """Group -> neurons it began with, of a trace with events."""
    if not len(traces):
        raise ResultsError("the trace is empty: the run recorded no window. Lower pruning.trace_every.")
    if not any(group["removed"] for event in events for group in event["groups"]):
        raise ResultsError("no neuron was removed: the run has no prune event that did anything")
    names = dict.fromkeys(traces["group"])
    born = traces.groupby("group")["neuron"].unique()
    return {name: len({*born[name], *deaths(events, name)}) for name in names}


def rank_stability(
    traces: pd.DataFrame, events: list[dict], title: str = "Stability of the ranking", caption: str = ""
) -> Figure:
    """How early the variances rank the neurons as they do before the first event, and name those that are removed in the end.

    Left: Spearman's rank correlation of each window's variances with those of the last window before the first event. Right: of the
    k neurons of the smallest variance in a window, the share that is removed by the end, k being how many are;
    dotted: what a choice by chance would give. One line a group. Raises ResultsError without a trace or an event, or without a
    window before the event.
    """
    groups = _groups(traces, events)
    stable, (_, merged) = stability(traces, events), _whole(traces, events)
    first = min(event["step"] for event in events)
    caption = (
        f"Windows up to the first event, step {first}. Spearman's correlation is over neurons; a line begins where variances "
        f"first differ. Dotted: the share that a choice by chance would find.{merged} {caption}"
    )
    with matplotlib.rc_context(STYLE):
        figure = new_figure(9.5, 3.6, title, caption)
        panels = figure.subplots(1, 2)
        for axes, column, what in zip(
            panels,
            ["correlation", "overlap"],
            ["Correlation with the last window's ranking", "Removed later, of the k least (%)"],
            strict=True,
        ):
            ends = []
            for (group, size), (colour, dash) in zip(groups.items(), group_styles(len(groups)), strict=True):
                line = stable[(stable["group"] == group) & stable[column].notna()]
                axes.plot(
                    line["step"], line[column], color=colour, linestyle=dash, label=group, marker="o", markersize=2.5
                )
                ends += [(line["step"].iloc[-1], line[column].iloc[-1], group, colour)] if len(line) else []
                if column == "overlap":
                    chance = 100 * len(deaths(events, group)) / size
                    axes.axhline(chance, color=colour, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.set(title=what, xlabel="Training step")
            label_ends(axes, ends)
        panels[1].set_ylim(0, 103)
    return figure


def stability(traces: pd.DataFrame, events: list[dict]) -> pd.DataFrame:
    """One row a group and window up to the first event: step, group, correlation, overlap (percent); see `rank_stability`."""
    first = min(event["step"] for event in events)
    before = whole_windows(traces, events)
    before = before[before["step"] <= first]
    if not len(before):
        raise ResultsError(f"no window before the first event, at step {first}. Lower pruning.trace_every.")
    rows = []
    for group, part in before.groupby("group", sort=False):
        wide = part.pivot(index="step", columns="neuron", values="variance")
        removed = set(deaths(events, group))
        for step, scores in wide.iterrows():
            least = scores.nsmallest(len(removed)).index
            overlap = 100 * len(removed.intersection(least)) / len(removed) if removed else math.nan
            rows.append([step, group, _spearman(scores, wide.iloc[-1]), overlap])
    return pd.DataFrame(rows, columns=["step", "group", "correlation", "overlap"])


def _spearman(one: pd.Series, other: pd.Series) -> float:
    """Pearson's correlation of the ranks; NaN where all are equal."""
    ranks = [values.rank().to_numpy() for values in (one, other)]
    if min(np.ptp(values) for values in ranks) == 0:
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])
