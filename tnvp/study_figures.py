"""Figures of a study, from its table alone: accuracy against sparsity and against cost, paired differences.

Each says its n, its spread, its data and the command that drew it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from tnvp import results
from tnvp.controls import dense_accuracy, pruned_and_scratch
from tnvp.figure_style import (
    COMPENSATIONS,
    CRITERIA,
    LEAST_SEEDS,
    SCRATCH,
    STYLE,
    UNKNOWN,
    band,
    cost_ticks,
    in_words,
    label_ends,
    new_figure,
    none_where,
    order,
    outline,
    plural,
    provenance,
    subject,
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
WHEN = {"test_accuracy_pruned": "After the last prune event", "test_accuracy": "At the end, after fine-tuning"}
ASIDE = 4  # points
FEW = 5  # lines whose bands can still be told apart; more have bars, side by side
End = tuple[float, float, str, str]  # x, y, name, colour of a line's end


class Dense(NamedTuple):
    """The unpruned network: its accuracy, what that is, and the runs it is of, if they are other than the pruned ones."""

    accuracy: results.Interval
    what: str
    runs: pd.DataFrame


def accuracy_vs_sparsity(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy against achieved neuron sparsity, before and after fine-tuning, one line a criterion.

    table: rows of one setting (a part of `results.by_setting`), and controls to compare with: runs without pruning, and runs
    from scratch at the final widths. command: what draws the figure, for the caption. Lines: means over seeds at each
    requested sparsity; bands, or bars where lines are many: their 95 % t-intervals, none for fewer than three seeds; dots: single
    runs. Runs from scratch are drawn at the end alone, since they were trained that long. Raises ResultsError if settings are mixed.
    """
    pruned, scratch = pruned_and_scratch(table)
    means = results.aggregate(pruned)
    setting = _setting(means)
    dense = Dense(*dense_accuracy(table, pruned))
    crowded = _crowded(means["criterion"].nunique(), scratch)
    with matplotlib.rc_context(STYLE):
        caption = _caption(pruned, means, dense, scratch, command, crowded)
        figure = new_figure(9.5, 4.4, f"Test accuracy against sparsity: {title or in_words(pruned, setting)}", caption)
        for axes, (column, when) in zip(figure.subplots(1, 2), WHEN.items(), strict=True):
            axes.set(title=when, xlabel="Neuron sparsity (% of neurons removed)", ylabel="Test accuracy (%)")
            ends = _accuracy_lines(axes, pruned, means, column, crowded=crowded)
            _name(axes, _controls(axes, ends, dense.accuracy, _at(column, scratch), crowded=crowded))
    return figure


def accuracy_by_compensation(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy against achieved neuron sparsity, before and after fine-tuning, one line a criterion and compensation.

    table: rows that differ in nothing but these, the sparsity and the seed, and controls. Colours and markers tell the criterion,
    dashes the compensation. Lines, intervals and dots as in `accuracy_vs_sparsity`. One panel where nothing was trained after
    pruning.
    """
    pruned, scratch = pruned_and_scratch(table)
    parts = {name: rows for name, rows in pruned.groupby("config.pruning.compensation") if len(rows)}
    parts = dict(sorted(parts.items(), key=lambda part: [*COMPENSATIONS, part[0]].index(part[0])))
    means = {name: results.aggregate(rows) for name, rows in parts.items()}
    if any(rows["setting"].nunique() != 1 for rows in means.values()):
        raise ResultsError("the runs differ in more than criterion, compensation, sparsity and seed")
    dense = Dense(*dense_accuracy(table, pruned))
    alone = pruned["test_accuracy_pruned"].equals(pruned["test_accuracy"])
    when = {"test_accuracy": "Right after pruning, which is the end"} if alone else WHEN
    every = pd.concat(means.values())
    count = sum(rows["criterion"].nunique() for rows in means.values())
    crowded = _crowded(count, scratch)
    with matplotlib.rc_context(STYLE):
        caption = _caption(pruned, every, dense, scratch, command, crowded)
        title = title or subject(pruned)
        figure = new_figure(2 + 4.7 * len(when), 4.6, f"Test accuracy by criterion and compensation: {title}", caption)
        for axes, (column, what) in zip(figure.subplots(1, len(when), squeeze=False)[0], when.items(), strict=True):
            axes.set(title=what, xlabel="Neuron sparsity (% of neurons removed)", ylabel="Test accuracy (%)")
            ends, places = [], _places(count)
            for name, rows in parts.items():
                style = {"suffix": f" + {name}", "dash": COMPENSATIONS.get(name, UNKNOWN[2])}
                ends += _accuracy_lines(axes, rows, means[name], column, crowded=crowded, places=places, **style)
            _name(axes, _controls(axes, ends, dense.accuracy, _at(column, scratch), crowded=crowded))
    return figure


def accuracy_vs_cost(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy against what is left: parameters, FLOPs and, where the table has it, latency.

    A row of panels after the last prune event, where the table has it, and one at the end. table: as of `accuracy_vs_sparsity`. The
    cost falls to the right, as sparsity rises; a ring is the unpruned network. Bars at the foot of a latency panel are the
    interquartile ranges of its passes.
    """
    pruned, scratch = pruned_and_scratch(table)
    costs = [name for name in COSTS if name in pruned and pruned[name].notna().any()]
    means = results.aggregate(pruned, costs)
    setting = _setting(means)
    dense = Dense(*dense_accuracy(table, pruned))
    when = {column: what for column, what in WHEN.items() if pruned[column].notna().any()} or WHEN
    crowded = _crowded(means["criterion"].nunique(), scratch)
    with matplotlib.rc_context(STYLE):
        caption = _caption(
            pruned, means, dense, scratch, command, crowded, f"Ring: its cost. {_of_latency(pruned)}".strip()
        )
        title = title or in_words(pruned, setting)
        figure = new_figure(
            1.4 + 3.2 * len(costs), 1 + 2.9 * len(when), f"Test accuracy against cost: {title}", caption
        )
        panels = figure.subplots(len(when), len(costs), sharex="col", sharey="row", squeeze=False)
        for row, (column, what) in zip(panels, when.items(), strict=True):
            for axes, cost in zip(row, costs, strict=True):
                axes.set_xscale("log")
                axes.plot(_whole(pruned, cost), dense.accuracy.mean, "o", color="0.35", fillstyle="none", markersize=7)
                _accuracy_lines(axes, pruned, means, column, cost, crowded=crowded)
                _controls(axes, [], dense.accuracy, _at(column, scratch), cost, crowded)
            row[0].set_ylabel(f"Test accuracy (%):\n{what[0].lower()}{what[1:]}")
        for axes, cost in zip(panels[-1], costs, strict=True):
            axes.set_xlabel(f"{COSTS[cost]} (log scale)")
            cost_ticks(axes.xaxis, *axes.get_xlim())
            axes.invert_xaxis()  # of the column: shared
        for row in panels:
            for axes, cost in zip(row, costs, strict=True):
                _quartiles(axes, pruned, cost)
        _legend(panels[0, -1], panels[-1, -1])
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


def _at(column: str, scratch: pd.DataFrame) -> pd.DataFrame:
    """Controls from scratch to draw: none beside networks that were not fine-tuned yet, for they were trained to the end."""
    return scratch if column == "test_accuracy" else scratch[:0]


def _crowded(count: int, scratch: pd.DataFrame) -> bool:
    """Whether so many lines, and that of the controls from scratch, are too many for bands."""
    return count + (len(scratch) > 0) > FEW


def _places(count: int) -> Iterator[float]:
    """How far each of so many crowded lines is moved sideways, in points."""
    return iter(np.linspace(-ASIDE, ASIDE, count) if count > 1 else [0.0])


def _accuracy_lines(
    axes: Axes,
    runs: pd.DataFrame,
    means: pd.DataFrame,
    column: str,
    x: str = SPARSITY,
    suffix: str = "",
    dash: object = None,
    crowded: bool = False,
    places: Iterator[float] | None = None,
) -> list[End]:
    """Draw a line, its intervals and dots for each criterion; returns the lines' ends, to be labelled."""
    ends = []
    criteria = sorted(means["criterion"].unique(), key=order)
    places = (places or _places(len(criteria))) if crowded else None
    for criterion in criteria:
        colour, marker, own_dash = CRITERIA.get(criterion, UNKNOWN)
        mine, line = runs[runs["criterion"] == criterion], means[means["criterion"] == criterion]
        style = (colour, marker, own_dash if dash is None else dash, outline(criterion))
        aside = next(places) if places else None
        ends += _line(axes, mine, line, (x, column), f"{criterion}{suffix}", *style, aside=aside)
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
    aside: float | None = None,
) -> list[End]:
    """A line of means, its intervals, and a dot a run; returns its end, if it has one.

    aside: points that it is moved sideways, with a bar for each interval; None: in place, with a band. A single point is no line.
    """
    across, column = columns
    scale = 100 if across == SPARSITY else 1
    line = means.dropna(subset=[across, column]).sort_values(across)
    x, y, half, n = (line[name].to_numpy(float) for name in (across, column, f"{column}_half", f"{column}_n"))
    low, high = band(y, half, n)
    dots = runs[across].astype(float)  # of a column with gaps, too
    where = axes.transData + ScaledTranslation((aside or 0) / 72, 0, axes.figure.dpi_scale_trans)
    axes.scatter(scale * dots, runs[column], s=7, color=colour, alpha=0.35, linewidths=0, transform=where)
    if aside is None and len(x) > 1:
        axes.fill_between(scale * x, low, high, color=colour, alpha=0.12, linewidth=0)
    else:
        axes.vlines(scale * x, low, high, color=colour, linewidth=1, alpha=0.8, transform=where)
    axes.plot(
        scale * x,
        y,
        label=label,
        color=colour,
        marker=marker,
        fillstyle="none" if marker == SCRATCH[1] else "full",
        linestyle=dash if len(x) > 1 else "none",
        linewidth=1.4 if aside is None else 1,
        path_effects=list(effects),
        transform=where,
    )
    edges = [low, high] if np.isfinite(low).any() else [y]
    for place, up in [(scale * dots, runs[column]), *((scale * x, edge) for edge in edges)]:  # not seen through `where`
        axes.update_datalim(np.c_[place, up].astype(float))
    axes.autoscale_view()
    return [(scale * x[-1], y[-1], label, colour)] if len(x) else []


def _controls(
    axes: Axes,
    ends: list[End],
    dense: results.Interval,
    scratch: pd.DataFrame,
    x: str = SPARSITY,
    crowded: bool = False,
) -> list[End]:
    """Add the controls, and their ends to the others; fit the axis to accuracies."""
    if len(scratch) and scratch[x].notna().any():
        means, aside = results.aggregate(scratch, [x]), 0.0 if crowded else None
        ends = ends + _line(axes, scratch, means, (x, "test_accuracy"), "from scratch", *SCRATCH, aside=aside)
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


def _legend(axes: Axes, of: Axes | None = None) -> None:
    """Right of the axes: the lines, of others where given, that have a name, and the level line of the unpruned network."""
    of = of or axes
    lines = [line for line in of.lines if not line.get_label().startswith("_")]
    level = [line for line in of.lines if line.get_gid() == "unpruned"]
    names = [*(line.get_label() for line in lines), *("unpruned" for _ in level)]
    axes.legend([*lines, *level], names, loc="upper left", bbox_to_anchor=(1.02, 1))


def _quartiles(axes: Axes, pruned: pd.DataFrame, cost: str) -> None:
    """At the foot of a latency panel, for each network that was timed, its median and the interquartile range of its passes."""
    if f"{cost}_iqr" not in pruned:
        return
    timed = pruned[[cost, f"{cost}_iqr"]].drop_duplicates().dropna().astype(float)
    ring = [_whole(pruned, cost), pruned[f"{cost}_dense_iqr"].astype(float).median()]
    foot = axes.get_xaxis_transform()  # x in milliseconds, y a share of the panel's height
    for place, (middle, spread) in enumerate([*timed.sort_values(cost).to_numpy(), ring]):
        height = 0.02 + 0.025 * (place % 4)  # neighbours overlap
        axes.plot(middle, height, ".", color="0.35", markersize=3, transform=foot)
        axes.hlines(
            height,
            middle - spread / 2,
            middle + spread / 2,
            color="0.35",
            linewidth=1,
            transform=foot,
            label="quartiles",
        )


def _of_latency(pruned: pd.DataFrame) -> str:
    """What a caption says of how latency was measured."""
    timed = pruned[pruned["latency_how"].notna()] if "latency_how" in pruned else pruned[:0]
    if not len(timed):
        return ""
    how = "; ".join(sorted(timed["latency_how"].unique()))
    seeds = ", ".join(map(str, sorted(timed["seed"].unique())))
    return (
        f"Latency (latency.csv): median of {how}, of the {plural(len(timed), 'network')} of {', '.join(sorted(timed['criterion'].unique()))}, "
        f"seed {seeds}; others of the same widths have theirs. Bars at the foot: as wide as the interquartile range, centred on the "
        "median; latencies that differ by less are not told apart."
    )


def _caption(
    runs: pd.DataFrame,
    means: pd.DataFrame,
    dense: Dense,
    scratch: pd.DataFrame,
    command: str,
    crowded: bool,
    more: str = "",
) -> str:
    counts = means[["test_accuracy_pruned_n", "test_accuracy_n"]].to_numpy()
    missing = runs[ACCURACIES].isna().any(axis=1).sum()
    what = "Bars" if crowded or (means.groupby(["setting", "criterion"]).size() == 1).all() else "Bands"
    parts = [
        f"Lines: mean over seeds, n = {results.span(counts.min(), counts.max())} a point.",
        f"{what}: 95 % t-interval of the mean{none_where(counts.ravel())}.",
        "Faint dots: single runs.",
        f"Lines are moved sideways, by {ASIDE} points at most, so that bars don't hide each other." if crowded else "",
        f"Unpruned: {dense.what}, n = {dense.accuracy.n}." if dense.accuracy.n else "",
        more,
        _scratch_caption(scratch) if len(scratch) else "",
        f"{plural(missing, 'run lacks a number and is', 'runs lack a number and are')} left out there."
        if missing
        else "",
        provenance(pd.concat([runs, scratch, dense.runs]), command),
    ]
    return " ".join(part for part in parts if part)


def _scratch_caption(scratch: pd.DataFrame) -> str:
    counts = results.aggregate(scratch)["test_accuracy_n"]
    n = results.span(counts.min(), counts.max())
    return (
        f"From scratch: networks of the same widths trained as many epochs from random weights, n = {n} a point, "
        "so at the end alone."
    )
