"""Figures of a study that compares settings by other things than the criterion: some columns of its table name a setting."""

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator

from tnvp import results
from tnvp.figure_style import LEAST_SEEDS, MARKERS, OTHER, STYLE, new_figure, none_where, provenance, subject
from tnvp.run_directory import ResultsError, require_columns

PANELS = {"test_accuracy_pruned": "After the last prune event", "test_accuracy": "At the end"}
EDGE = [Stroke(linewidth=2, foreground="white"), Normal()]  # a label on a line stays legible
ASKED = "config.pruning.sparsity"


def accuracy_by_setting(table: pd.DataFrame, columns: list[str], title: str, command: str) -> Figure:
    """Test accuracy, after the last event and at the end, of each setting: a row a setting, a row of panels a requested sparsity.

    columns: those of the config whose values name a setting, such as ["pruning.window"]; runs may differ in these, the requested
    sparsity and the seed alone. Markers: means over seeds; bars: 95 % t-intervals; dots: single runs. Runs that were asked for no
    sparsity share a row of panels. What would squeeze the others on a common axis has panels of its own (`_apart`). Raises
    ResultsError for a column that isn't there or leaves settings mixed.
    """
    parts = _parts(table, columns)
    names = {}
    for asked, rows in parts.groupby(ASKED, dropna=False):
        what = f"{asked:.0%} of the neurons removed" if asked == asked else "No sparsity requested"
        names |= {", ".join([what, *more]): part for more, part in _apart(rows, f"config.{columns[0]}")}
    counts = parts.groupby(["setting", ASKED], dropna=False)["seed"].nunique()
    caption = _caption(parts, counts, command)
    heights = [rows["setting"].nunique() for rows in names.values()]
    with matplotlib.rc_context(STYLE):
        height = 1.1 + 0.2 * sum(heights) + 0.42 * len(heights)
        figure = new_figure(9, height, f"Test accuracy by setting: {subject(parts)} (study {title})", caption)
        panels = figure.subplots(len(names), 2, squeeze=False, sharey="row", height_ratios=[n + 0.5 for n in heights])
        for row, (what, rows) in zip(panels, names.items(), strict=True):
            for axes, column in zip(row, PANELS, strict=True):
                _rows(axes, rows, column)
            row[0].set_title(what, loc="left")
        for axes, when in zip(panels[-1], PANELS.values(), strict=True):
            axes.set_xlabel(f"Test accuracy (%): {when[0].lower()}{when[1:]}")
    return figure


def accuracy_vs_training(table: pd.DataFrame, columns: list[str], title: str, command: str) -> Figure:
    """Test accuracy at the end against the training FLOPs saved, against runs without pruning: a marker a setting and request.

    A share beside a marker is the requested sparsity. table, columns: as of `accuracy_by_setting`. Crosses: 95 % t-intervals of both. Raises ResultsError without runs of pruning=none.
    """
    parts = _parts(table, columns)
    whole = parts.loc[parts["config.pruning.name"] == "none", "training_flops"].astype(float).mean()
    if math.isnan(whole):
        raise ResultsError("what training costs without pruning is not known: the study needs runs with pruning=none")
    parts = parts.assign(saved=100 * (1 - parts["training_flops"].astype(float) / whole))
    counts = parts.groupby(["setting", ASKED], dropna=False)["seed"].nunique()
    with matplotlib.rc_context(STYLE):
        figure = new_figure(
            6.8,
            4.2,
            f"Test accuracy against training saved: {subject(parts)} (study {title})",
            _caption(parts, counts, command),
        )
        axes = figure.subplots()
        axes.set(xlabel="Training FLOPs saved (%)", ylabel="Test accuracy at the end (%)")
        settings = list(dict.fromkeys(parts["setting"]))
        for index, setting in enumerate(settings):
            style = OTHER(0.9 * index / max(1, len(settings) - 1)), MARKERS[index % len(MARKERS)]
            _crosses(axes, parts[parts["setting"] == setting], setting, *style)
        bars, names = axes.get_legend_handles_labels()
        axes.legend([bar.lines[0] for bar in bars], names, loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure


def _apart(rows: pd.DataFrame, column: str) -> list[tuple[list[str], pd.DataFrame]]:
    """Words, rows of each value of a column if, at both moments, the values' runs lie further apart than those of any value do
    among themselves: one axis would then show that gap and hide what is asked. Else all rows, with no words.
    """
    ranges = [rows.groupby(column, sort=False)[name].agg(["min", "max"]).astype(float) for name in PANELS]
    for edges in ranges:
        edges = edges.sort_values("min")
        gaps = edges["min"].to_numpy()[1:] - edges["max"].to_numpy()[:-1]
        if not len(gaps) or edges.isna().any(axis=None) or gaps.min() <= (edges["max"] - edges["min"]).max():
            return [([], rows)]
    return [([_words({column: value})], part) for value, part in rows.groupby(column, sort=False)]


def _parts(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The table sorted by ``columns``, with a column `setting`: their values in words."""
    keys = [f"config.{name}" for name in columns]
    require_columns(table, keys, "table's rows")
    parts = table.assign(**{ASKED: table.get(ASKED, math.nan)}).sort_values([*keys, "seed"], ignore_index=True)
    parts["setting"] = [_words(row) for row in parts[keys].to_dict("records")]
    for (setting, _), rows in parts.groupby(["setting", ASKED], dropna=False):
        mixed = [name for name in results.setting_fields(rows) if rows[name].nunique(dropna=False) > 1]
        if mixed:
            raise ResultsError(
                f"runs of one setting ({setting}) differ in {', '.join(mixed)}: name it among the columns"
            )
    return parts


def _words(values: dict) -> str:
    """Values as a label has them, numbers with the last part of their key: "one shot, dense epochs 2"."""
    words = []
    for key, value in values.items():
        if pd.isna(value):
            continue
        if not isinstance(value, int | float):
            words.append(str(value).replace("_", " "))
        else:
            word = f"{key.rsplit('.', 1)[-1].replace('_', ' ')} {value:g}"
            words = [*(other for other in words if not word.startswith(other)), word]  # threshold 0.5 says threshold
    return ", ".join(words)


def _rows(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    """A row a setting, the first on top."""
    settings = list(dict.fromkeys(rows["setting"]))
    for place, setting in enumerate(settings):
        mine = rows[rows["setting"] == setting]
        n, mean, half = results.interval(mine, column)
        axes.scatter(mine[column], np.full(len(mine), place + 0.22), s=7, color=OTHER(0.3), alpha=0.45, linewidths=0)
        bar = half if n >= LEAST_SEEDS else math.nan
        axes.errorbar(mean, place, xerr=bar, color=OTHER(0.3), marker="o", linestyle="none", capsize=2)
    axes.set_yticks(range(len(settings)), settings)
    axes.set_ylim(len(settings) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="y", visible=False)


def _crosses(axes: Axes, rows: pd.DataFrame, label: str, colour, marker: str) -> None:
    """A setting's means at each requested sparsity, joined in that order, with a cross of intervals; dots: runs."""
    means = [
        (asked, results.interval(mine, "saved"), results.interval(mine, "test_accuracy"))
        for asked, mine in rows.groupby(ASKED, dropna=False)
    ]
    axes.scatter(rows["saved"], rows["test_accuracy"], s=7, color=colour, alpha=0.35, linewidths=0)
    enough = [x.n >= LEAST_SEEDS for _, x, _ in means]
    x, y = ([interval[i].mean for interval in means] for i in (1, 2))
    spread = [
        [interval[i].half if ok else math.nan for interval, ok in zip(means, enough, strict=True)] for i in (1, 2)
    ]
    axes.errorbar(
        x, y, xerr=spread[0], yerr=spread[1], color=colour, marker=marker, linewidth=1, capsize=2, label=label
    )
    for asked, across, up in zip((m[0] for m in means), x, y, strict=True):
        if asked == asked:
            note = {"textcoords": "offset points", "fontsize": 6.5, "color": colour, "path_effects": EDGE}
            axes.annotate(f"{asked:.0%}", (across, up), (4, 4), **note)


def _caption(parts: pd.DataFrame, counts: pd.Series, command: str) -> str:
    n = results.span(counts.min(), counts.max())
    return (
        f"Markers: mean over seeds, n = {n}. Bars: 95 % t-interval of the mean{none_where(counts)}. "
        f"Faint dots: single runs. {provenance(parts, command)}"
    )
