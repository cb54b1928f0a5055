"""Figures of a study, from its table alone: accuracy against sparsity and against cost, paired differences.

Each says its n, its spread, its data and the command that drew it.
"""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tnvp import results
from tnvp.controls import dense_accuracy, pruned_and_scratch
from tnvp.figure_style import (
    CRITERIA,
    DASHES,
    LEAST_SEEDS,
    SCRATCH,
    STYLE,
    UNKNOWN,
    band,
    cost_ticks,
    label_ends,
    new_figure,
    none_where,
    order,
    outline,
    plural,
    provenance,
)
from tnvp.run_directory import ACCURACIES, ResultsError

COMMAND = "python -m tnvp.figures RUNS --out DIR"
SPARSITY = "neuron_sparsity"
COSTS = {  # column of the table: label of its axis
    "parameters": "Parameters left",
    "flops": "FLOPs left, a forward pass",
    "latency_1": "Latency (ms), batch of 1",
    "latency_256": "Latency (ms), batch of 256",
}
WHOLE = {"parameters": "parameter_sparsity", "flops": "flops_reduction"}  # cost: column of the share removed
End = tuple[float, float, str, str]  # x, y, name, colour of a line's end


def accuracy_vs_sparsity(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy against achieved neuron sparsity, before and after fine-tuning, one line a criterion.

    table: rows of one setting (a part of `results.by_setting`), and controls to compare with: runs without pruning, and runs
    from scratch at the final widths. command: what draws the figure, for the caption. Lines: means over seeds at each
    requested sparsity; bands: their 95 % t-intervals, none for fewer than three seeds; dots: single runs. Raises
    ResultsError if settings are mixed.
    """
    pruned, scratch = pruned_and_scratch(table)
    means = results.aggregate(pruned)
    title = title or _setting(means)
    dense, what = dense_accuracy(table, pruned)
    with matplotlib.rc_context(STYLE):
        caption = _caption(pruned, means, _of_dense(dense, what), scratch, command)
        figure = new_figure(9.5, 4.4, f"Test accuracy against sparsity: {title}", caption)
        for axes, column, when in zip(
            figure.subplots(1, 2),
            ["test_accuracy_pruned", "test_accuracy"],
            ["After the last prune event", "At the end, after fine-tuning"],
            strict=True,
        ):
            axes.set(title=when, xlabel="Neuron sparsity (% of neurons removed)", ylabel="Test accuracy (%)")
            ends = _accuracy_lines(axes, pruned, means, column)
            _name(axes, _controls(axes, ends, dense, scratch))
    return figure


def accuracy_by_compensation(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy against achieved neuron sparsity right after pruning, one line a criterion and compensation.

    table: rows that differ in nothing but these, the sparsity and the seed, and controls. Colours and markers tell the criterion,
    dashes the compensation. Lines, bands and dots as in `accuracy_vs_sparsity`.
    """
    pruned, scratch = pruned_and_scratch(table)
    parts = {name: rows for name, rows in pruned.groupby("config.pruning.compensation") if len(rows)}
    means = {name: results.aggregate(rows) for name, rows in parts.items()}
    if any(rows["setting"].nunique() != 1 for rows in means.values()):
        raise ResultsError("the runs differ in more than criterion, compensation, sparsity and seed")
    dense, what = dense_accuracy(table, pruned)
    title = title or ", ".join(pruned[results.BASE[:3]].iloc[0])
    with matplotlib.rc_context(STYLE):
        caption = _caption(pruned, pd.concat(means.values()), _of_dense(dense, what), scratch, command)
        figure = new_figure(6.4, 4.6, f"Accuracy by criterion and compensation: {title}", caption)
        axes = figure.subplots()
        axes.set(xlabel="Neuron sparsity (% of neurons removed)", ylabel="Test accuracy right after pruning (%)")
        ends = []
        for (name, rows), dash in zip(parts.items(), DASHES, strict=False):
            ends += _accuracy_lines(axes, rows, means[name], "test_accuracy_pruned", suffix=f" + {name}", dash=dash)
        _name(axes, _controls(axes, ends, dense, scratch))
    return figure


def accuracy_vs_cost(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy at the end against what is left: parameters, FLOPs and, where the table has it, latency.

    table: as of `accuracy_vs_sparsity`. The cost falls to the right, as sparsity rises; a ring is the unpruned network.
    """
    pruned, scratch = pruned_and_scratch(table)
    costs = [name for name in COSTS if name in pruned and pruned[name].notna().any()]
    means = results.aggregate(pruned, costs)
    title = title or _setting(means)
    dense, what = dense_accuracy(table, pruned)
    with matplotlib.rc_context(STYLE):
        timed = (
            ["Latency: median on the machine of latency.csv."] if any(c.startswith("latency") for c in costs) else []
        )
        about = " ".join([_of_dense(dense, what), "Ring: its cost.", *timed])
        caption = _caption(pruned, means, about, scratch, command)
        figure = new_figure(1.4 + 3.2 * len(costs), 3.9, f"Test accuracy against cost: {title}", caption)
        panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
        for axes, cost in zip(panels, costs, strict=True):
            axes.set(xscale="log", xlabel=f"{COSTS[cost]} (log scale)")
            axes.plot(_whole(pruned, cost), dense.mean, "o", color="0.35", fillstyle="none", markersize=7)
            _accuracy_lines(axes, pruned, means, "test_accuracy", cost)
            _controls(axes, [], dense, scratch, cost)
            cost_ticks(axes.xaxis, *axes.get_xlim())
            axes.invert_xaxis()
        panels[0].set_ylabel("Test accuracy at the end (%)")
        _legend(panels[-1])
    return figure


def paired_differences(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Forest plot: each criterion's test accuracy minus the reference's, run by run of the same seed.

    table: rows of one setting; controls are left out. The reference is `random`, or the first of the criteria where there is no
    such run. Points: mean differences at each requested sparsity; bars: 95 % t-intervals (`results.paired`); dots: seeds.
    Raises ResultsError for one criterion alone.
    """
    pruned, _ = pruned_and_scratch(table)
    title = title or _setting(results.aggregate(pruned))
    criteria = sorted(pruned["criterion"].dropna().unique(), key=order)
    if len(criteria) < 2:
        raise ResultsError(f"differences need two criteria; the table has {', '.join(criteria) or 'none'}")
    reference = "random" if "random" in criteria else criteria[0]
    criteria.remove(reference)
    found = {
        column: {name: results.differences(pruned, name, reference, column) for name in criteria}
        for column in ACCURACIES[1:]
    }
    counts = [n for rows in found.values() for seeds in rows.values() for n in results.mean_differences(seeds)["n"]]
    caption = " ".join(
        [
            f"Markers: mean of the differences between runs of the same seed, n = {results.span(min(counts), max(counts))}.",
            f"Bars: its 95 % t-interval, not corrected for their number{none_where(counts)}. Faint dots: single seeds. Requested: share of neurons, or the threshold.",
            provenance(pruned, command),
        ]
    )
    asked = sorted(results.requested(pruned).dropna().unique())
    with matplotlib.rc_context(STYLE):
        height = 1.6 + 0.16 * len(asked) * (len(criteria) + 1)
        figure = new_figure(9.5, height, f"Differences to {reference}: {title}", caption)
        for axes, rows, when in zip(
            figure.subplots(1, 2, sharey=True),
            found.values(),
            ["after the last prune event", "at the end"],
            strict=True,
        ):
            _forest(axes, rows, asked)
            axes.set(title=f"Test accuracy {when}", xlabel=f"Criterion − {reference} (percentage points)")
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
        figure.axes[0].set_ylabel("Requested")
    return figure


def _forest(axes: Axes, found: dict[str, pd.DataFrame], asked: list[float]) -> None:
    """A block a request, the least on top, and in it a row a criterion."""
    block = len(found) + 1
    axes.axvline(0, color="0.35", linewidth=1)
    for place, (criterion, seeds) in enumerate(found.items()):
        colour, marker, _ = CRITERIA.get(criterion, UNKNOWN)
        means = results.mean_differences(seeds)
        rows, dots = ([block * asked.index(value) + place for value in part["requested"]] for part in (means, seeds))
        half = means["half"].where(means["n"] >= LEAST_SEEDS)
        axes.scatter(seeds["difference"], np.add(dots, 0.25), s=7, color=colour, alpha=0.35, linewidths=0)
        bars = {"color": colour, "marker": marker, "linestyle": "none", "capsize": 2, "label": criterion}
        axes.errorbar(means["difference"], rows, xerr=half, **bars)
    axes.set_yticks([block * index + (block - 2) / 2 for index in range(len(asked))], [f"{value:g}" for value in asked])
    axes.set_ylim(block * len(asked) - 1, -1)
    axes.grid(axis="y", visible=False)


def _setting(means: pd.DataFrame) -> str:
    """The one setting of these means. Raises ResultsError if there are several, or none."""
    settings = [] if means.empty else list(means["setting"].unique())
    if len(settings) != 1:
        raise ResultsError(
            f"a figure shows one setting, the table has {len(settings)}: {'; '.join(settings)}. "
            "Split it with tnvp.results.by_setting."
        )
    return settings[0]


def _whole(pruned: pd.DataFrame, cost: str) -> float:
    """The cost of the unpruned network: the median of what the runs say of it; NaN where they don't."""
    if cost in WHOLE:
        return (pruned[cost].astype(float) / (1 - pruned[WHOLE[cost]])).median()
    return pruned.get(f"{cost}_dense", pd.Series(dtype=float)).median()


def _accuracy_lines(
    axes: Axes,
    runs: pd.DataFrame,
    means: pd.DataFrame,
    column: str,
    x: str = SPARSITY,
    suffix: str = "",
    dash: object = None,
) -> list[End]:
    """Draw a line, a band and dots for each criterion; returns the lines' ends, to be labelled."""
    ends = []
    for criterion in sorted(means["criterion"].unique(), key=order):
        colour, marker, own_dash = CRITERIA.get(criterion, UNKNOWN)
        mine, line = runs[runs["criterion"] == criterion], means[means["criterion"] == criterion]
        style = (colour, marker, own_dash if dash is None else dash, outline(criterion))
        ends += _line(axes, mine, line, (x, column), f"{criterion}{suffix}", *style)
    return ends


def _line(
    axes: Axes,
    runs: pd.DataFrame,
    means: pd.DataFrame,
    columns: tuple[str, str],
    label: str,
    colour,
    marker,
    dash,
    effects=(),
) -> list[End]:
    """A line of means, its band, and a dot a run; returns its end, if it has one."""
    across, column = columns
    scale = 100 if across == SPARSITY else 1
    line = means.dropna(subset=[across, column]).sort_values(across)
    x, y, half, n = (line[name].to_numpy(float) for name in (across, column, f"{column}_half", f"{column}_n"))
    low, high = band(y, half, n)
    dots = runs[across].astype(float)  # of a column with gaps, too
    axes.scatter(scale * dots, runs[column], s=7, color=colour, alpha=0.35, linewidths=0)
    axes.fill_between(scale * x, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(scale * x, y, label=label, color=colour, marker=marker, linestyle=dash, path_effects=list(effects))
    return [(scale * x[-1], y[-1], label, colour)] if len(x) else []


def _controls(
    axes: Axes, ends: list[End], dense: results.Interval, scratch: pd.DataFrame, x: str = SPARSITY
) -> list[End]:
    """Add the controls, and their ends to the others; fit the axis to accuracies."""
    if len(scratch) and scratch[x].notna().any():
        ends = ends + _line(
            axes, scratch, results.aggregate(scratch, [x]), (x, "test_accuracy"), "from scratch", *SCRATCH
        )
    if dense.n:
        axes.axhline(dense.mean, color="0.35", linewidth=1, zorder=1.5, gid="unpruned")
        low, high = band(dense.mean, dense.half, dense.n)
        if np.isfinite(low):
            axes.axhspan(low, high, color="0.35", alpha=0.15, linewidth=0)
        ends = [*ends, (axes.get_xlim()[1], dense.mean, "unpruned", "0.35")]
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(max(axes.get_ylim()[0], -2), min(axes.get_ylim()[1], 100.5))
    return ends


def _name(axes: Axes, ends: list[End]) -> None:
    """Name the lines at their ends; in a legend where all are single points, since leaders would look like lines."""
    drawn = [line for line in axes.lines if not line.get_label().startswith("_")]
    if any(len(line.get_xdata()) > 1 for line in drawn):
        label_ends(axes, ends)
    else:
        _legend(axes)


def _legend(axes: Axes) -> None:
    """Right of the axes: the lines that have a name, and the level line of the unpruned network."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    level = [line for line in axes.lines if line.get_gid() == "unpruned"]
    names = [*(line.get_label() for line in lines), *("unpruned" for _ in level)]
    axes.legend([*lines, *level], names, loc="upper left", bbox_to_anchor=(1.02, 1))


def _caption(runs: pd.DataFrame, means: pd.DataFrame, dense: str, scratch: pd.DataFrame, command: str) -> str:
    counts = means[["test_accuracy_pruned_n", "test_accuracy_n"]].to_numpy()
    missing = runs[ACCURACIES].isna().any(axis=1).sum()
    parts = [
        f"Lines: mean over seeds, n = {results.span(counts.min(), counts.max())} a point.",
        f"Bands: 95 % t-interval of the mean{none_where(counts.ravel())}.",
        "Faint dots: single runs.",
        dense,
        _scratch_caption(scratch) if len(scratch) else "",
        f"{plural(missing, 'run lacks a number and is', 'runs lack a number and are')} left out there."
        if missing
        else "",
        provenance(runs, command),
    ]
    return " ".join(part for part in parts if part)


def _of_dense(dense: results.Interval, what: str) -> str:
    return f"Unpruned: {what}, n = {dense.n}."


def _scratch_caption(scratch: pd.DataFrame) -> str:
    counts = results.aggregate(scratch)["test_accuracy_n"]
    n = results.span(counts.min(), counts.max())
    return f"From scratch: networks of the same widths trained as many epochs from random weights, n = {n} a point."
