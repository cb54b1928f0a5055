"""How early the dead can be told, over seeds: a figure of what `tnvp.stability` wrote."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tnvp import results
from tnvp.figure_style import DASHES, OTHER, STYLE, band, new_figure, none_where, provenance, subject
from tnvp.run_directory import ResultsError


def stability_over_seeds(table: pd.DataFrame, runs: pd.DataFrame, title: str, command: str) -> Figure:
    """A column of panels a group. Above: correlation of each window's ranking with the last one before the first event. Below: of the
    neurons that vary least, the share that is removed in the end; dotted: what a draw by chance finds.

    table: `stability.COLUMNS`, of runs of one kind of pruning; runs: the study's table, which tells data, code and machine. ResultsError
    for other runs. Lines: means over seeds, bands: their 95 %
    t-intervals. Colours tell the requested sparsity, dashes what the scores looked at.
    """
    if table["pruning"].nunique() != 1:
        kinds = ", ".join(sorted(table["pruning"].unique()))
        raise ResultsError(f"the figure shows one kind of pruning, the table has {kinds}: write one of them")
    names = results.folder_names(runs)
    drawn = runs[names.isin(table["run"])]
    if missing := set(table["run"]) - set(names):
        raise ResultsError(f"the study's table lacks {len(missing)} of the runs, such as {min(missing)}")
    groups = list(dict.fromkeys(table["group"]))
    counts = table.groupby(["group", "step", "window", "sparsity"], dropna=False)["seed"].nunique()
    caption = (
        f"Lines: mean over seeds, n = {results.span(counts.min(), counts.max())}. Bands: 95 % t-interval of the mean{none_where(counts)}. "
        "Above: Spearman's correlation over neurons, the same for all scores. Below: of the k neurons that vary least in a recording "
        "window, the share that is removed, k being how many are; dotted: by chance. Windows of training steps up to the first event. "
        f"{provenance(drawn, command)}"
    )
    with matplotlib.rc_context(STYLE):
        figure = new_figure(
            1.6 + 3.2 * len(groups), 5.2, f"How early the dead can be told: {subject(drawn)} (study {title})", caption
        )
        panels = figure.subplots(2, len(groups), sharex=True, sharey="row", squeeze=False)
        for (above, below), group in zip(panels.T, groups, strict=True):
            part = table[table["group"] == group]
            _line(above, part, "rho", OTHER(0.3), "-")
            _overlaps(below, part)
            above.set(title=group)
            below.set_xlabel("Epoch in which a window ends")
        panels[0, 0].set_ylabel("Rank correlation")
        panels[1, 0].set_ylabel("Removed later, of the k least (%)")
        panels[1, -1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure


def _overlaps(axes: Axes, part: pd.DataFrame) -> None:
    """A line a requested sparsity and window of the scores, in percent."""
    asked, windows = sorted(part["sparsity"].unique()), sorted(part["window"].unique())
    for index, sparsity in enumerate(asked):
        colour = OTHER(0.85 * index / max(1, len(asked) - 1))
        rows = part[part["sparsity"] == sparsity] if sparsity == sparsity else part[part["sparsity"].isna()]
        for window, dash in zip(windows, DASHES, strict=False):
            mine = rows[rows["window"] == window]
            if len(mine):
                label = f"{window}, {sparsity:.0%} removed" if sparsity == sparsity else window
                _line(axes, mine.assign(overlap=100 * mine["overlap"]), "overlap", colour, dash, label, 100)
        axes.axhline(100 * rows["chance"].mean(), color=colour, linewidth=0.8, linestyle=(0, (1, 2)))


def _line(axes: Axes, part: pd.DataFrame, column: str, colour, dash, label: str | None = None, highest=1) -> None:
    """A line of means over seeds with its band, window by window."""
    means = [(rows["epoch"].mean(), *results.interval(rows, column)) for _, rows in part.groupby("step")]
    x, n, y, half = np.array(means, float).T
    low, high = band(y, half, n, highest)
    axes.plot(x, y, color=colour, linestyle=dash, label=label)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
