"""What a search for accuracy and FLOPs found: a figure of its table, which also has the validation accuracy it looked at."""

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from tnvp.figure_style import CRITERIA, STYLE, UNKNOWN, cost_ticks, new_figure, order, outline, plural, provenance
from tnvp.run_directory import require_columns

VALIDATION = "validation_accuracy"


def on_front(accuracy: pd.Series, flops: pd.Series) -> list[bool]:
    """True where no other run is at least as good in both, and better in one."""
    points = list(zip(accuracy, flops, strict=True))
    return [not any(a >= b and f <= g and (a, f) != (b, g) for a, f in points) for b, g in points]


def accuracy_flops_front(table: pd.DataFrame, title: str, command: str) -> Figure:
    """Validation accuracy against FLOPs, a marker a run, the front as steps; crosses: the front's test accuracy, read once a run.

    table: a row a run, with a column validation_accuracy (percent). Raises ResultsError without it.
    """
    require_columns(table, [VALIDATION, "test_accuracy", "flops", "criterion"], "table's rows")
    table = table.sort_values("flops", ignore_index=True)
    front = table[on_front(table[VALIDATION], table["flops"])]
    flops, best = front["flops"].astype(float), front["test_accuracy"].astype(float)
    caption = (
        f"Markers: single runs, n = 1 each, of {plural(table['seed'].nunique(), 'seed')}, no spread: what lies close together is not "
        "told apart. Lines: no run is better in both. Crosses: test accuracy of these, read once a run. "
        f"{provenance(table, command)}"
    )
    with matplotlib.rc_context(STYLE):
        figure = new_figure(6.4, 4, f"Search for accuracy and FLOPs: {title}", caption)
        axes = figure.subplots()
        axes.step(flops, front[VALIDATION], where="post", color="0.6", zorder=1)
        for criterion in sorted(table["criterion"].dropna().unique(), key=order):
            rows, (colour, marker, _) = table[table["criterion"] == criterion], CRITERIA.get(criterion, UNKNOWN)
            points = {"color": colour, "marker": marker, "path_effects": outline(criterion), "label": criterion}
            axes.plot(rows["flops"].astype(float), rows[VALIDATION], linestyle="", **points)
        axes.plot(flops, best, linestyle="", color="0.3", marker="+", label="front, test")
        axes.set(xscale="log", xlabel="FLOPs of an image (log scale)", ylabel="Validation accuracy (%)")
        cost_ticks(axes.xaxis, table["flops"].min(), table["flops"].max())
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure
