"""What is left of each layer at equal sparsity: a figure of a study whose criteria share one budget for all layers."""

import json
import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from tnvp import results
from tnvp.controls import CONTROLS
from tnvp.figure_style import (
    CRITERIA,
    LEAST_SEEDS,
    STYLE,
    UNKNOWN,
    new_figure,
    none_where,
    order,
    outline,
    plain_number,
    provenance,
)
from tnvp.run_directory import ResultsError

COMMAND = "python -m tnvp.figures RUNS --out DIR"
SCOPE = "config.pruning.scope"


def widths_by_criterion(table: pd.DataFrame, title: str, command: str = COMMAND) -> Figure:
    """What each criterion leaves of each layer: a panel a requested sparsity, a line a criterion, layers from input to output.

    table: rows of one setting with a budget for all layers together (scope=global), and controls, which are left out. Shares in
    percent where the config tells the layers' widths before, else neurons. Lines: means over seeds; bars: their 95 % t-intervals;
    dots: single runs. Raises ResultsError for a table without such runs, or of networks that differ.
    """
    pruned = with_widths(table)
    if not len(pruned):
        raise ResultsError("no widths to draw: there is no run with pruning.scope=global and the column widths")
    layers = layer_widths(pruned)
    asked = sorted(layers["requested"].unique())
    counts = layers.groupby(["requested", "criterion"])["seed"].nunique()
    caption = (
        f"Lines: mean over seeds, n = {results.span(counts.min(), counts.max())} a criterion. "
        f"Bars: 95 % t-interval of the mean{none_where(counts)}. Faint dots: single runs. Criteria stand side by side at each layer. "
        f"One budget for all layers (scope=global). {provenance(pruned, command)}"
    )
    with matplotlib.rc_context(STYLE):
        count = layers["layer"].nunique()
        figure = new_figure(
            2.2 + len(asked) * max(2.6, 0.75 * count), 3.9, f"What is left of each layer: {title}", caption
        )
        panels = figure.subplots(1, len(asked), sharey=True, squeeze=False)[0]
        for axes, request in zip(panels, asked, strict=True):
            _panel(axes, layers[layers["requested"] == request])
            axes.set(title=f"{request:.3g} requested" if request > 1 else f"{request:.0%} of all neurons removed")
        _scale(panels[0], layers)
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure


def with_widths(table: pd.DataFrame) -> pd.DataFrame:
    """The rows whose criteria may leave different widths, and that say which."""
    scope = table.get(SCOPE, pd.Series(pd.NA, table.index, dtype=object))
    chosen = ~table["config.pruning.name"].isin(CONTROLS) & (scope == "global").fillna(False)
    return table[chosen & table["widths"].notna()] if "widths" in table else table[:0]


def layer_widths(runs: pd.DataFrame) -> pd.DataFrame:
    """A row a run and layer: criterion, requested, seed, layer (from 0, input to output), before (NaN: not known), after, left.

    left: percent of before, or neurons where that is not known. Raises ResultsError for networks of different depths.
    """
    rows = []
    for (_, run), asked in zip(runs.iterrows(), results.requested(runs), strict=True):
        after = [int(width) for width in str(run["widths"]).split("-")]
        whole = run.get("config.model.widths")
        before = json.loads(whole) if isinstance(whole, str) else []
        before = before if len(before) == len(after) else [math.nan] * len(after)
        rows += [
            [run["criterion"], asked, run["seed"], layer, *pair]
            for layer, pair in enumerate(zip(before, after, strict=True))
        ]
    layers = pd.DataFrame(rows, columns=["criterion", "requested", "seed", "layer", "before", "after"])
    depths = runs["widths"].str.count("-") + 1
    if depths.nunique() > 1:
        raise ResultsError(f"the runs differ in how many layers they have: {sorted(depths.unique())}")
    known = layers["before"].notna().all()
    return layers.assign(left=100 * layers["after"] / layers["before"] if known else layers["after"])


def _panel(axes: Axes, layers: pd.DataFrame) -> None:
    """A line, bars and dots a criterion, moved sideways so that bars don't hide each other."""
    criteria = sorted(layers["criterion"].unique(), key=order)
    for place, criterion in enumerate(criteria):
        colour, marker, dash = CRITERIA.get(criterion, UNKNOWN)
        aside = 0.5 * ((place + 0.5) / len(criteria) - 0.5)
        mine = layers[layers["criterion"] == criterion]
        means = [results.interval(rows, "left") for _, rows in mine.groupby("layer")]
        n, y, half = np.array(means, float).T
        half = np.where(n < LEAST_SEEDS, np.nan, half)
        x = np.arange(len(y)) + aside
        axes.scatter(mine["layer"] + aside, mine["left"], s=7, color=colour, alpha=0.35, linewidths=0)
        axes.vlines(x, np.maximum(y - half, 0), y + half, color=colour, linewidth=1)
        axes.plot(
            x,
            y,
            color=colour,
            marker=marker,
            linestyle=dash,
            label=criterion,
            linewidth=1,
            path_effects=outline(criterion),
        )
    before = layers.groupby("layer")["before"].max()
    names = [f"{layer + 1}" + ("" if math.isnan(width) else f"\n({width:g})") for layer, width in before.items()]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("Layer, from input to output" + ("" if before.isna().any() else " (its width before)"))
    axes.grid(axis="x", visible=False)


def _scale(axes: Axes, layers: pd.DataFrame) -> None:
    """Percent from 0; neurons in a log scale where layers are of very different widths."""
    if layers["before"].notna().all():
        axes.set(ylabel="Neurons left (% of the layer)", ylim=(0, min(102, 1.05 * axes.get_ylim()[1])))
        return
    axes.set_ylabel("Neurons left")
    if layers["after"].max() > 8 * max(1, layers["after"].min()):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(plain_number)
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, None)
