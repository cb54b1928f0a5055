"""Figures of studies and single runs: tables in, matplotlib Figures out, nothing shown that is not on disk.

A figure says its n, its spread, its data and the command that drew it.

    python -m tnvp.figures RUNS --out DIR
"""

import argparse
import hashlib
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tnvp import results
from tnvp.controls import CONTROLS
from tnvp.figure_style import CRITERIA, in_words, order, save
from tnvp.run_directory import ResultsError, RunDirectory
from tnvp.run_figures import training_curves, widths_over_time
from tnvp.search_figure import accuracy_flops_front
from tnvp.setting_figures import accuracy_by_setting, accuracy_vs_training
from tnvp.stability_figure import stability_over_seeds
from tnvp.study_figures import accuracy_by_compensation, accuracy_vs_cost, accuracy_vs_sparsity, paired_differences
from tnvp.trace_figures import rank_stability, survival, trace_heatmap
from tnvp.width_figures import widths_by_criterion, with_widths

__all__ = [
    "BY_SETTING", "CRITERIA", "KINDS", "OF_SEARCH", "OF_STABILITY", "OF_TABLES", "accuracy_by_compensation", "accuracy_by_setting",
    "accuracy_vs_cost", "accuracy_vs_sparsity", "accuracy_vs_training", "draw", "of_table", "paired_differences",
    "rank_stability", "save", "stability_over_seeds", "survival", "trace_heatmap", "training_curves",
    "widths_by_criterion", "widths_over_time",
]  # fmt: skip
OF_TABLES = {  # what can be drawn of a table alone; a study names them
    "accuracy_vs_sparsity": accuracy_vs_sparsity,
    "accuracy_by_compensation": accuracy_by_compensation,
    "accuracy_vs_cost": accuracy_vs_cost,
    "paired_differences": paired_differences,
    "widths_by_criterion": widths_by_criterion,
}
BY_SETTING = {  # what is drawn of a table whose settings some of its columns name; a study names both
    "accuracy_by_setting": accuracy_by_setting,
    "accuracy_vs_training": accuracy_vs_training,
}
OF_STABILITY = {"rank_stability": stability_over_seeds}  # what is drawn of a stability.csv
OF_SEARCH = {"accuracy_flops_front": accuracy_flops_front}  # what is drawn of the table of a search
KINDS = [*OF_TABLES, *BY_SETTING, *OF_STABILITY, *OF_SEARCH]
FILES = ["accuracy", "compensation", "cost", "differences", "widths-by-criterion"]  # how `draw` names their files
NEEDS = {
    "accuracy_by_compensation": "several compensations",
    "paired_differences": "several criteria",
    "widths_by_criterion": "several criteria with pruning.scope=global, and the column widths",
}
OF_RUNS = {  # what is drawn of the trace and events of one run
    "trace": (trace_heatmap, "Variance of each neuron"),
    "survival": (survival, "Survival of neurons"),
    "stability": (rank_stability, "Stability of the ranking"),
}


def of_table(table: pd.DataFrame, name: str, command: str) -> dict[str, Figure]:
    """The figure called ``name`` in `OF_TABLES`, for each setting of the table that it shows."""
    controls = table["config.pruning.name"].isin(CONTROLS)
    parts = _parts(table[~controls], name)
    if not parts:
        raise ResultsError(f"the table has no runs for {name}" + f" ({NEEDS[name]})" * (name in NEEDS))
    drawn = {}
    for title, rows in parts.items():
        drawn[title] = OF_TABLES[name](pd.concat([rows, table[controls]]), in_words(rows, title), command)
    return drawn


def _parts(pruned: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    """Title → the rows of each figure called ``name``."""
    if name == "accuracy_by_compensation":
        return dict(_by_compensation(pruned))
    pruned = with_widths(pruned) if name == "widths_by_criterion" else pruned
    parts = results.by_setting(pruned) if len(pruned) else {}
    several = name in ("paired_differences", "widths_by_criterion")
    return {title: rows for title, rows in parts.items() if not several or rows["criterion"].nunique() > 1}


def draw(root: str | Path, out: str | Path, table: pd.DataFrame | None = None) -> list[Path]:
    """Every figure of the runs under `root`, written to the folder `out`; returns the files' paths.

    table: of these runs, if it was read already. Figures of tables are drawn for each setting. For each data set, model, kind of
    pruning and criterion there is the trace of one run, and for the first of these criteria all else that one run shows. Raises ResultsError for bad runs.
    """
    table, out = results.table(root) if table is None else table, Path(out)
    command, pruned = f"python -m tnvp.figures {root} --out {out}", table[~table["config.pruning.name"].isin(CONTROLS)]
    written = []
    for name, stem in zip(OF_TABLES, FILES, strict=True):
        if len(pruned) and _parts(pruned, name):
            for title, figure in of_table(table, name, command).items():
                written += save(figure, out / slug(f"{stem}-{title}"))
    seen = set()
    for name, row in _representatives(table):
        kind = tuple(row[results.BASE[:3]])
        try:
            for noun, figure in _run_figures(Path(root), name, row, command, only_trace=kind in seen):
                written += save(figure, out / slug(f"{noun}-{name}"))
        except ResultsError as error:
            warnings.warn(f"no figures of the run {row['run']}: {error}", stacklevel=2)
        seen.add(kind)
    return written


def _by_compensation(pruned: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Title, rows of each setting that was run with several compensations."""
    column = "config.pruning.compensation"
    if column not in pruned:
        return
    for title, part in results.by_setting(pruned.drop(columns=column)).items():
        rows = pruned.loc[part.index]
        if rows[column].nunique() > 1:
            yield title, rows


def _representatives(table: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Name, row of a run for each data set, model, kind and criterion: middle request, then lowest seed."""
    places = table["criterion"].fillna("none").map(order)
    table, chosen = table.assign(requested=results.requested(table), order=places), []
    for key, rows in table.groupby([*results.BASE[:3], "order"]):
        distance = (rows["requested"] - rows["requested"].median()).abs()
        row = rows.assign(distance=distance).sort_values(["distance", "seed", "run"]).iloc[0]
        name = [*key[:3], row["criterion"]]
        chosen.append((", ".join(str(part) for part in name if not pd.isna(part)), row))
    return chosen


def _run_figures(root: Path, name: str, row: pd.Series, command: str, only_trace: bool) -> Iterator[tuple[str, Figure]]:
    run = RunDirectory.open(root / row["run"])
    metrics, events, traces = run.metrics(), run.events(), run.traces()
    asked = "" if pd.isna(row["requested"]) else f", {row['requested']:g} requested"
    title = f"{name}{asked}, seed {row['seed']}"
    caption = f"One run, {row['run']}: n = 1, no spread. Reproduce: {command}"
    for noun, (function, what) in OF_RUNS.items() if len(traces) else ():
        if noun == "trace" or (events and not only_trace):
            yield noun, function(traces, events, f"{what}: {title}", caption)
    if events and not only_trace:
        yield "widths", widths_over_time(metrics, events, f"Widths: {title}", caption)
    if len(metrics) and not only_trace:
        yield "curves", training_curves(metrics, events, f"Training: {title}", caption)


def slug(text: str) -> str:
    """A file name of the text; a very long one is cut and keeps a hash."""
    name = re.sub(r"[^\w.=-]+", "-", text).strip("-")
    return name if len(name) < 150 else f"{name[:140]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def main(arguments: list[str] | None = None) -> int:
    """Draw the figures of a tree of runs and print their paths; 0, or 2 for a tree that can't be read."""
    parser = argparse.ArgumentParser(prog="python -m tnvp.figures", description="Draw every figure of runs.")
    parser.add_argument("root", metavar="RUNS", help="folder of runs, such as runs")
    parser.add_argument("--out", metavar="DIR", default="figures", help="folder for the figures")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(map(str, draw(options.root, options.out))))
    except (ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.exit(main())
