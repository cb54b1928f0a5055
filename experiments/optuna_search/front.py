"""The table and the figure of a search for accuracy and FLOPs, from its runs.

python experiments/optuna_search/front.py runs/optuna_search
"""

import sys
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from tnvp import results, sweep
from tnvp.figure_style import CRITERIA, STYLE, cost_ticks, new_figure, save

HERE = Path(__file__).resolve().parent
VALIDATION = "validation_accuracy"


def table_of(folder: Path) -> pd.DataFrame:
    """One row a run, with what the search looked at: validation accuracy in percent, and whether it is on the front."""
    table = results.table(folder)
    table.insert(1, VALIDATION, [sweep.objectives(folder / name, 1) for name in table["run"]])
    table.insert(2, "on_front", on_front(table[VALIDATION], table["flops"]))
    return table.sort_values("flops", ignore_index=True)


def on_front(accuracy: pd.Series, flops: pd.Series) -> list[bool]:
    """True where no other run is at least as good in both, and better in one."""
    points = list(zip(accuracy, flops, strict=True))
    return [not any(a >= b and f <= g and (a, f) != (b, g) for a, f in points) for b, g in points]


def draw(table: pd.DataFrame) -> Figure:
    """Validation accuracy against FLOPs, the front as steps; crosses: the front's test accuracy, read once a run."""
    front = table[table["on_front"]]
    with matplotlib.rc_context(STYLE):
        caption = f"{len(table)} runs on digits, one seed: what lies close together is not told apart. Lines: no run is better in both."
        figure = new_figure(4.6, 3.6, "Search for accuracy and FLOPs", caption)
        axes = figure.subplots()
        axes.step(front["flops"], front[VALIDATION], where="post", color="0.6", zorder=1)
        for criterion, rows in table.groupby("criterion"):
            colour, marker, _ = CRITERIA[criterion]
            axes.plot(rows["flops"], rows[VALIDATION], linestyle="", color=colour, marker=marker, label=criterion)
        axes.plot(front["flops"], front["test_accuracy"], linestyle="", color="0.3", marker="+", label="front, test")
        axes.set_xscale("log")
        cost_ticks(axes.xaxis, table["flops"].min(), table["flops"].max())
        axes.set_xlabel("FLOPs of an image")
        axes.set_ylabel("validation accuracy (%)")
        axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    found = table_of(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/optuna_search"))
    results.publish(found, HERE / "results.csv")
    print(HERE / "results.csv", *save(draw(found), HERE / "front", kinds=["png"]), sep="\n")
