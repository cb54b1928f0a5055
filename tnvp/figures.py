"""Figures of studies and single runs: tables in, matplotlib Figures out, nothing shown that is not on disk.

A figure says its n, its spread, its data and the command that drew it.

    python -m tnvp.figures runs --out figures
"""

import argparse
import hashlib
import math
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tnvp import results
from tnvp.figure_style import (
    CRITERIA,
    DASHES,
    SCRATCH,
    STYLE,
    UNKNOWN,
    label_ends,
    new_figure,
    order,
    outline,
    save,
)
from tnvp.run_directory import ACCURACIES, ResultsError, RunDirectory
from tnvp.run_figures import trace_heatmap, training_curves, widths_over_time

__all__ = [
    "CRITERIA", "OF_TABLES", "accuracy_vs_sparsity", "draw", "of_table", "save", "trace_heatmap", "training_curves",
    "widths_over_time",
]  # fmt: skip
CONTROLS = ["none", "scratch"]  # kinds of pruning that remove nothing from a trained network: to compare with
SHAPING = ["min_neurons", "round_to", "approximate", "ignore"]  # fields of pruning that the final widths depend on
COMMAND = "python -m tnvp.figures RUNS"


def accuracy_vs_sparsity(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy against achieved neuron sparsity, before and after fine-tuning, one line a criterion.

    table: rows of one setting (a part of `results.by_setting`), and controls to compare with: runs without pruning, and runs
    from scratch at the final widths. command: what draws the figure, for the caption. Lines: means over seeds at each
    requested sparsity; bands: their 95 % t-intervals, none for one seed; dots: single runs. Raises ResultsError if settings
    are mixed.
    """
    pruned, scratch = _pruned(table)
    means = results.aggregate(pruned)
    settings = [] if means.empty else list(means["setting"].unique())
    if len(settings) != 1:
        found = "; ".join(settings)
        raise ResultsError(
            f"a figure shows one setting, the table has {len(settings)}: {found}. "
            "Split it with tnvp.results.by_setting."
        )
    dense, what = _dense(table, pruned)
    with matplotlib.rc_context(STYLE):
        caption = _caption(pruned, means, f"Unpruned: {what}, n = {dense.n}.", scratch, command)
        figure = new_figure(9.5, 4.4, f"Test accuracy against sparsity: {title or settings[0]}", caption)
        for axes, column, when in zip(
            figure.subplots(1, 2),
            ["test_accuracy_pruned", "test_accuracy"],
            ["After the last prune event", "At the end, after fine-tuning"],
            strict=True,
        ):
            axes.set(title=when, xlabel="Neuron sparsity (% of neurons removed)", ylabel="Test accuracy (%)")
            ends = _accuracy_lines(axes, pruned, means, column)
            _finish_accuracy(axes, ends, dense, scratch)
    return figure


def accuracy_by_compensation(table: pd.DataFrame, title: str | None = None, command: str = COMMAND) -> Figure:
    """Test accuracy against achieved neuron sparsity right after pruning, one line a criterion and compensation.

    table: rows that differ in nothing but these, the sparsity and the seed, and controls. Colours and markers tell the criterion,
    dashes the compensation. Lines, bands and dots as in `accuracy_vs_sparsity`.
    """
    pruned, scratch = _pruned(table)
    parts = {name: rows for name, rows in pruned.groupby("config.pruning.compensation") if len(rows)}
    means = {name: results.aggregate(rows) for name, rows in parts.items()}
    if any(rows["setting"].nunique() != 1 for rows in means.values()):
        raise ResultsError("the runs differ in more than criterion, compensation, sparsity and seed")
    dense, what = _dense(table, pruned)
    title = title or ", ".join(pruned[results.BASE[:3]].iloc[0])
    with matplotlib.rc_context(STYLE):
        caption = _caption(pruned, pd.concat(means.values()), f"Unpruned: {what}, n = {dense.n}.", scratch, command)
        figure = new_figure(6.4, 4.6, f"Accuracy by criterion and compensation: {title}", caption)
        axes = figure.subplots()
        axes.set(xlabel="Neuron sparsity (% of neurons removed)", ylabel="Test accuracy right after pruning (%)")
        ends = []
        for (name, rows), dash in zip(parts.items(), DASHES, strict=False):
            ends += _accuracy_lines(axes, rows, means[name], "test_accuracy_pruned", f" + {name}", dash)
        _finish_accuracy(axes, ends, dense, scratch)
    return figure


OF_TABLES = {  # what can be drawn of a table alone; a study names them
    "accuracy_vs_sparsity": accuracy_vs_sparsity,
    "accuracy_by_compensation": accuracy_by_compensation,
}


def of_table(table: pd.DataFrame, name: str, command: str) -> dict[str, Figure]:
    """The figure called ``name`` in `OF_TABLES`, for each setting of the table that it shows."""
    controls = table["config.pruning.name"].isin(CONTROLS)
    by_compensation = name == "accuracy_by_compensation"
    parts = dict(_by_compensation(table[~controls])) if by_compensation else results.by_setting(table[~controls])
    if not parts:
        raise ResultsError(f"the table has no runs for {name}" + " (several compensations)" * by_compensation)
    return {title: OF_TABLES[name](pd.concat([rows, table[controls]]), title, command) for title, rows in parts.items()}


def _pruned(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The runs that pruned, and of those from scratch the ones to compare them with."""
    kinds = table["config.pruning.name"]
    pruned, scratch = table[~kinds.isin(CONTROLS)], table[kinds == "scratch"]
    if len(pruned) and len(scratch):
        scratch = _alike(scratch, pruned.iloc[0])
    return pruned, scratch


def _alike(controls: pd.DataFrame, run: pd.Series) -> pd.DataFrame:
    """The controls that agree with a pruned run in all but the pruning, and train for as many epochs."""
    for name in results.setting_fields(controls):
        if not name.startswith("config.pruning."):
            same = controls[name].isna() if pd.isna(run[name]) else controls[name].eq(run[name]).fillna(False)
            controls = controls[same]
    for name in (f"config.pruning.{field}" for field in SHAPING):
        if name in controls and not pd.isna(run[name]):
            controls = controls[controls[name].isna() | controls[name].eq(run[name]).fillna(False)]
    return controls[_epochs(controls) == _epochs(run.to_frame().T).iloc[0]]


def _epochs(table: pd.DataFrame) -> pd.Series:
    """Training epochs of each run, before and after its events."""
    total, dense, finetune = (
        table.get(f"config.pruning.{name}", pd.Series(math.nan, table.index)).astype("float64")
        for name in ("epochs", "dense_epochs", "finetune_epochs")
    )
    return total.fillna(dense + finetune)


def _accuracy_lines(
    axes: Axes, runs: pd.DataFrame, means: pd.DataFrame, column: str, suffix: str = "", dash: object = None
) -> list[tuple[float, float, str, str]]:
    """Draw a line, a band and dots for each criterion; returns the lines' ends, to be labelled."""
    ends = []
    for criterion in sorted(means["criterion"].unique(), key=order):
        colour, marker, own_dash = CRITERIA.get(criterion, UNKNOWN)
        mine, line = runs[runs["criterion"] == criterion], means[means["criterion"] == criterion]
        dash_here = own_dash if dash is None else dash
        ends += _line(axes, mine, line, column, f"{criterion}{suffix}", colour, marker, dash_here, outline(criterion))
    return ends


def _line(
    axes: Axes, runs: pd.DataFrame, means: pd.DataFrame, column: str, label: str, colour, marker, dash, effects=()
) -> list[tuple[float, float, str, str]]:
    """A line of means, its band, and a dot a run; returns its end, if it has one."""
    line = means.dropna(subset=[column]).sort_values("neuron_sparsity")
    x, y, half = (line[name].to_numpy(float) for name in ("neuron_sparsity", column, f"{column}_half"))
    axes.scatter(100 * runs["neuron_sparsity"], runs[column], s=7, color=colour, alpha=0.35, linewidths=0)
    axes.fill_between(100 * x, y - half, y + half, color=colour, alpha=0.12, linewidth=0)
    axes.plot(100 * x, y, label=label, color=colour, marker=marker, linestyle=dash, path_effects=list(effects))
    return [(100 * x[-1], y[-1], label, colour)] if len(x) else []


def _finish_accuracy(
    axes: Axes, ends: list[tuple[float, float, str, str]], dense: results.Interval, scratch: pd.DataFrame
) -> None:
    """Add the controls, and name all lines."""
    if len(scratch):
        ends += _line(axes, scratch, results.aggregate(scratch), "test_accuracy", "from scratch", *SCRATCH)
    if dense.n:
        axes.axhline(dense.mean, color="0.35", linewidth=1, zorder=1.5)
        spread = np.nan_to_num(dense.half)
        axes.axhspan(dense.mean - spread, dense.mean + spread, color="0.35", alpha=0.15, linewidth=0)
        ends.append((axes.get_xlim()[1], dense.mean, "unpruned", "0.35"))
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(max(axes.get_ylim()[0], -2), min(axes.get_ylim()[1], 100.5))
    label_ends(axes, ends)


def _dense(table: pd.DataFrame, pruned: pd.DataFrame) -> tuple[results.Interval, str]:
    """Accuracy to compare with, and what it is: the trunk's, or of runs trained as long without pruning."""
    if "config.pruning.dense_epochs" in pruned and pruned["config.pruning.dense_epochs"].notna().all():
        return results.interval(pruned, "test_accuracy_dense"), "the trained network before pruning"
    rows = _alike(table[table["config.pruning.name"] == "none"], pruned.iloc[0])
    if len(rows):
        return results.interval(rows, "test_accuracy"), "trained as long without pruning"
    return results.interval(pruned, "test_accuracy_dense"), "before the first prune event"


def _caption(runs: pd.DataFrame, means: pd.DataFrame, dense: str, scratch: pd.DataFrame, command: str) -> str:
    counts = means[["test_accuracy_pruned_n", "test_accuracy_n"]].to_numpy()
    missing = runs[ACCURACIES].isna().any(axis=1).sum()
    commits = ", ".join(sorted({str(commit)[:7] for commit in runs["commit"].dropna()})) or "unknown"
    hardware = ", ".join(sorted(runs["hardware"].dropna().unique())) or "unknown hardware"
    parts = [
        f"Lines: mean over seeds, n = {results.span(counts.min(), counts.max())} a point.",
        "Bands: 95 % t-interval of the mean" + (", none where n = 1." if counts.min() < 2 else "."),
        "Faint dots: single runs.",
        dense,
        _scratch_caption(scratch) if len(scratch) else "",
        f"{missing} run(s) lack a number and are left out there." if missing else "",
        f"{len(runs)} runs, {runs['config.dataset.name'].iloc[0]} test data, commit {commits}, {hardware}.",
        f"Reproduce: {command}",
    ]
    return " ".join(part for part in parts if part)


def _scratch_caption(scratch: pd.DataFrame) -> str:
    counts = results.aggregate(scratch)["test_accuracy_n"]
    n = results.span(counts.min(), counts.max())
    return f"From scratch: networks of the same widths trained as many epochs from random weights, n = {n} a point."


def draw(root: str | Path, out: str | Path) -> list[Path]:
    """Every figure of the runs under `root`, written to the folder `out`; returns the files' paths.

    One accuracy figure a setting. For each data set, model, kind of pruning and criterion a trace of one run,
    and for the first of these criteria widths and training curves, too. Raises ResultsError for bad runs.
    """
    table, out = results.table(root), Path(out)
    command, pruned = f"python -m tnvp.figures {root}", table[~table["config.pruning.name"].isin(CONTROLS)]
    written = []
    for setting, figure in of_table(table, "accuracy_vs_sparsity", command).items() if len(pruned) else ():
        written += save(figure, out / slug(f"accuracy-{setting}"))
    if any(_by_compensation(pruned)):
        for title, figure in of_table(table, "accuracy_by_compensation", command).items():
            written += save(figure, out / slug(f"compensation-{title}"))
    seen = set()
    for name, row in _representatives(table):
        kind = tuple(row[results.BASE[:3]])
        for noun, figure in _run_figures(Path(root), name, row, only_trace=kind in seen):
            written += save(figure, out / slug(f"{noun}-{name}"))
        seen.add(kind)
    return written


def _by_compensation(pruned: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Title, rows of each setting that was run with several compensations."""
    column = "config.pruning.compensation"
    if column not in pruned:
        return
    fields = [name for name in results.setting_fields(pruned) if name != column]
    for _, rows in pruned.groupby(fields, dropna=False):
        if rows[column].nunique() > 1:
            yield ", ".join(rows[results.BASE[:3]].iloc[0]), rows


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


def _run_figures(root: Path, name: str, row: pd.Series, only_trace: bool) -> Iterator[tuple[str, Figure]]:
    run = RunDirectory.open(root / row["run"])
    metrics, events, traces = run.metrics(), run.events(), run.traces()
    asked = "" if pd.isna(row["requested"]) else f", {row['requested']:g} requested"
    title = f"{name}{asked}, seed {row['seed']}"
    caption = f"One run, {row['run']}: n = 1, no spread. Reproduce: python -m tnvp.figures {root}"
    if len(traces):
        yield "trace", trace_heatmap(traces, events, f"Variance of each neuron: {title}", caption)
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
