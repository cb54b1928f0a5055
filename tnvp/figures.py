"""Figures of studies and single runs: tables in, matplotlib Figures out, nothing shown that is not on disk.

A criterion has one colour, marker and dash everywhere: Okabe and Ito's palette for the colour-blind, marker
and dash for grey print. A figure says its n, its spread, its data and the command that drew it.

    python -m tnvp.figures runs --out figures
"""

import argparse
import functools
import hashlib
import math
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tnvp import results
from tnvp.run_directory import ACCURACIES, ResultsError, RunDirectory, write_atomically

STYLE = {  # every figure is made and saved under these, whatever the caller's own settings are
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "figure.titlesize": 10,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "figure.facecolor": "white",
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "figure.constrained_layout.w_pad": 0.08,
    "text.hinting": "none",  # text is as wide at 200 dpi as at 100, where it was laid out
}
CRITERIA = {  # name: colour, marker, dash (points on, off)
    "variance": ("#0072B2", "o", "-"),
    "variance_preactivation": ("#56B4E9", "s", (0, (5, 1.5))),
    "variance_out": ("#009E73", "^", (0, (6, 1.5, 1, 1.5))),
    "obs": ("#D55E00", "D", (0, (9, 2))),
    "l1": ("#E69F00", "v", (0, (2.5, 1.2))),
    "l2": ("#CC79A7", "P", (0, (4, 1.2, 1, 1.2, 1, 1.2))),
    "bn_scale": ("#F0E442", "X", (0, (7, 1.2))),
    "taylor": ("#000000", "<", (0, (1.2, 1.2))),
    "apoz": ("#666666", ">", (0, (3, 3))),
    "random": ("#999999", "x", (0, (1, 2.5))),
}
UNKNOWN = ("#444444", "*", "-")  # a criterion not in the list above: its label still names it
OTHER = matplotlib.colormaps["viridis"]  # for what is no criterion: variances, groups, validation curves
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1, 1.5))]
DEAD = "0.8"


def accuracy_vs_sparsity(table: pd.DataFrame, title: str | None = None, source: str = "RUNS") -> Figure:
    """Test accuracy against achieved neuron sparsity, before and after fine-tuning, one line a criterion.

    table: rows of one setting (a part of `results.by_setting`), and runs without pruning to compare with.
    source: where the runs lie, for the caption. Lines: means over seeds at each requested sparsity; bands:
    their 95 % t-intervals, none for one seed; dots: single runs. Raises ResultsError if settings are mixed.
    """
    pruned = table[table["config.pruning.name"] != "none"]
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
        caption = _caption(pruned, means, f"Unpruned: {what}, n = {dense.n}.", source)
        figure = _figure(9.5, 4.4, f"Test accuracy against sparsity: {title or settings[0]}", caption)
        for axes, column, when in zip(
            figure.subplots(1, 2),
            ["test_accuracy_pruned", "test_accuracy"],
            ["After the last prune event", "At the end, after fine-tuning"],
            strict=True,
        ):
            axes.set(title=when, xlabel="Neuron sparsity (% of neurons removed)", ylabel="Test accuracy (%)")
            _accuracy_panel(axes, pruned, means, column, dense)
    return figure


def _accuracy_panel(axes: Axes, runs: pd.DataFrame, means: pd.DataFrame, column: str, dense: results.Interval) -> None:
    ends = []
    for criterion in sorted(means["criterion"].unique(), key=_order):
        colour, marker, dash = CRITERIA.get(criterion, UNKNOWN)
        line = means[means["criterion"] == criterion].dropna(subset=[column]).sort_values("neuron_sparsity")
        x, y, half = (line[name].to_numpy(float) for name in ("neuron_sparsity", column, f"{column}_half"))
        dots = runs[runs["criterion"] == criterion]
        axes.scatter(100 * dots["neuron_sparsity"], dots[column], s=7, color=colour, alpha=0.35, linewidths=0)
        axes.fill_between(100 * x, y - half, y + half, color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            100 * x, y, color=colour, marker=marker, linestyle=dash, label=criterion, path_effects=_outline(criterion)
        )
        ends += [(100 * x[-1], y[-1], criterion, colour)] if len(x) else []
    if dense.n:
        axes.axhline(dense.mean, color="0.35", linewidth=1, zorder=1.5)
        spread = np.nan_to_num(dense.half)
        axes.axhspan(dense.mean - spread, dense.mean + spread, color="0.35", alpha=0.15, linewidth=0)
        ends.append((axes.get_xlim()[1], dense.mean, "unpruned", "0.35"))
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(max(axes.get_ylim()[0], -2), min(axes.get_ylim()[1], 100.5))
    _label_ends(axes, ends)


def _outline(criterion: str) -> list:
    """Yellow on white needs a dark edge to be seen."""
    return [Stroke(linewidth=2.6, foreground="0.3"), Normal()] if criterion == "bn_scale" else []


def _order(criterion: str) -> tuple[int, str]:
    """Sorts criteria as CRITERIA lists them, others after these by name."""
    names = list(CRITERIA)
    return (names.index(criterion) if criterion in names else len(names), str(criterion))


def _dense(table: pd.DataFrame, pruned: pd.DataFrame) -> tuple[results.Interval, str]:
    """Accuracy to compare with, and what it is: the trunk's, or of runs trained as long without pruning."""
    if "config.pruning.dense_epochs" in pruned and pruned["config.pruning.dense_epochs"].notna().all():
        return results.interval(pruned, "test_accuracy_dense"), "the trained network before pruning"
    rows, one = table[table["config.pruning.name"] == "none"], pruned.iloc[0]
    for name in results.setting_fields(table):
        if not name.startswith("config.pruning.") or name == "config.pruning.epochs":
            rows = rows[rows[name].isna() if pd.isna(one[name]) else rows[name].eq(one[name]).fillna(False)]
    if len(rows):
        return results.interval(rows, "test_accuracy"), "trained as long without pruning"
    return results.interval(pruned, "test_accuracy_dense"), "before the first prune event"


def _caption(runs: pd.DataFrame, means: pd.DataFrame, dense: str, source: str) -> str:
    counts = means[["test_accuracy_pruned_n", "test_accuracy_n"]].to_numpy()
    missing = runs[ACCURACIES].isna().any(axis=1).sum()
    commits = ", ".join(sorted({str(commit)[:7] for commit in runs["commit"].dropna()})) or "unknown"
    hardware = ", ".join(sorted(runs["hardware"].dropna().unique())) or "unknown hardware"
    parts = [
        f"Lines: mean over seeds, n = {results.span(counts.min(), counts.max())} a point.",
        "Bands: 95 % t-interval of the mean" + (", none where n = 1." if counts.min() < 2 else "."),
        "Faint dots: single runs.",
        dense,
        f"{missing} run(s) lack a number and are left out there." if missing else "",
        f"{len(runs)} runs, {runs['config.dataset.name'].iloc[0]} test data, commit {commits}, {hardware}.",
        f"Reproduce: python -m tnvp.figures {source}",
    ]
    return " ".join(part for part in parts if part)


@FuncFormatter
def _plain(value: float, _: int) -> str:
    """0.01 rather than a power of ten: shorter to read on few ticks, and no second font in the file."""
    return f"{value:g}"


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Labels at powers of ten; at 2 and 5 too where there are few powers."""
    axis.set_major_locator(LogLocator(subs=(1,) if high > 1000 * low else (1, 2, 5)))
    axis.set_major_formatter(_plain)
    axis.set_minor_formatter(NullFormatter())


def _figure(width: float, height: float, title: str, caption: str) -> Figure:
    """An empty figure of that many inches; the caption stands at its foot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    figure.supxlabel(textwrap.fill(caption, int(20 * width)), x=0.01, ha="left", fontsize=6.5, color="0.35")
    return figure


def _label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Name lines right of the axes, at heights that don't overlap; ends are (x, y, name, colour)."""
    ends = sorted(ends, key=lambda end: end[1])
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform(end[:2])[1] for end in ends]
    inches = axes.figure.get_size_inches()[1] * axes.get_position().height
    for (x, y, name, colour), place in zip(ends, _spread(heights, 10 / 72 / inches), strict=True):
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.8}
        arrow |= {"shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
        axes.annotate(
            name,
            (x, y),
            (1.04, place),
            textcoords="axes fraction",
            va="center",
            fontsize=7.5,
            annotation_clip=False,
            arrowprops=arrow,
        )


def _spread(heights: list[float], gap: float) -> list[float]:
    """Sorted heights, moved as little as keeps them `gap` apart (least squares); in 0 to 1 if they fit."""
    blocks: list[list[float]] = []  # sum and length of neighbours that must stand exactly `gap` apart
    for index, height in enumerate(heights):
        blocks.append([height - index * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, length = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + length]
    bases = [total / length for total, length in blocks for _ in range(int(length))]
    return [max(0.0, min(base, 1 - (len(bases) - 1) * gap)) + index * gap for index, base in enumerate(bases)]


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
    positive = traces["variance"][traces["variance"] > 0]
    low, high = np.quantile(positive, [0.01, 1]) if len(positive) else (1e-12, 1.0)
    norm = LogNorm(low, max(high, 1.001 * low), clip=True)
    columns = math.ceil(len(groups) / 4)
    rows = math.ceil(len(groups) / columns)
    caption = (
        "Rows: neurons, sorted by the last variance seen. Grey: removed, from the orange tick on. "
        f"Variances under {low:.1e}, zero too, have the darkest colour. {caption}"
    )
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = _figure(max(7.0, 3.6 * columns), 1.2 + 1.5 * rows, title, caption)
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, group in zip(panels.T.flat, groups, strict=False):
            mesh = _heat_panel(axes, group, traces[traces["group"] == group], _deaths(events, group), norm)
        for axes in panels.T.flat[len(groups) :]:
            axes.set_visible(False)
        bar = figure.colorbar(mesh, ax=panels, label="Variance (log scale)", extend="min", aspect=30)
        _log_ticks(bar.ax.yaxis, norm.vmin, norm.vmax)
    return figure


def _deaths(events: list[dict], group: str) -> dict[int, int]:
    """Neuron id -> step of its removal."""
    return {
        neuron: event["step"]
        for event in events
        for pruned in event["groups"]
        if pruned["name"] == group
        for neuron in pruned["removed"]
    }


def _heat_panel(axes: Axes, group: str, traces: pd.DataFrame, deaths: dict[int, int], norm: LogNorm) -> QuadMesh:
    wide = traces.pivot(index="neuron", columns="step", values="variance")
    wide = wide.reindex(sorted({*wide.index, *deaths}))  # a neuron may go before its first window
    steps = wide.columns.to_numpy(float)  # where windows end; the first begins with the run
    until = np.array([deaths.get(neuron, math.inf) for neuron in wide.index])
    wide = wide.mask(steps[None, :] > until[:, None])
    last = wide.ffill(axis=1).iloc[:, -1]
    wide = wide.loc[last.sort_values(na_position="first", kind="stable").index]
    cells = np.ma.masked_invalid(wide.to_numpy(float))
    mesh = axes.pcolormesh(
        np.r_[0, steps], np.arange(len(wide) + 1), cells, norm=norm, cmap=OTHER.with_extremes(bad=DEAD), rasterized=True
    )
    dead = [row for row, neuron in enumerate(wide.index) if neuron in deaths]
    when = [deaths[wide.index[row]] for row in dead]
    axes.vlines(when, dead, np.add(dead, 1), color=CRITERIA["obs"][0], linewidth=1.2)
    axes.set(
        title=f"{group}: {len(wide)} to {len(wide) - len(dead)} neurons",
        ylabel="Neurons",
        xlabel="Training step" if axes.get_subplotspec().is_last_row() else "",
    )
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return mesh


def widths_over_time(metrics: pd.DataFrame, events: list[dict], title: str = "Widths", caption: str = "") -> Figure:
    """Neurons left in each group against training steps: from the prune events, else from the metrics.

    Raises ResultsError if neither names a group.
    """
    last = max([event["step"] for event in events] + [int(metrics["step"].max()) if len(metrics) else 0])
    lines = _widths(metrics, events, last)
    if not lines:
        raise ResultsError("no widths to draw: there is no prune event, and no metrics column widths/<group>")
    widths = np.concatenate([left for _, left in lines.values()])
    ends = []
    with matplotlib.rc_context(STYLE):
        figure = _figure(6.5, 3.6, title, caption)
        axes = figure.subplots()
        axes.set(xlabel="Training step", ylabel="Neurons left")
        for index, (name, (steps, left)) in enumerate(lines.items()):
            colour = OTHER(0.85 * index / max(1, len(lines) - 1))
            dash = DASHES[index % len(DASHES)]
            axes.step(steps, left, where="post", color=colour, linestyle=dash, label=name)
            ends.append((last, left[-1], f"{name}: {left[0]:g} to {left[-1]:g}", colour))
        if widths.max() > 8 * max(1, widths.min()):
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(_plain)
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(0, 1.05 * widths.max())
        _label_ends(axes, ends)
    return figure


def _widths(metrics: pd.DataFrame, events: list[dict], last: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Group -> steps, and neurons left from each on. Events know the step, metrics only a later one."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for event in events:
        for group in event["groups"]:
            line = lines.setdefault(group["name"], [(0, group["width_before"])])
            line.append((event["step"], group["width_after"]))
    for column in metrics.filter(regex="^widths/"):
        rows = metrics.dropna(subset=[column])
        lines.setdefault(column.removeprefix("widths/"), list(zip(rows["step"], rows[column], strict=True)))
    lines = {name: [*line, (last, line[-1][1])] for name, line in lines.items() if line}
    return {name: tuple(np.array(line, float).T) for name, line in lines.items()}


def training_curves(metrics: pd.DataFrame, events: list[dict], title: str = "Training", caption: str = "") -> Figure:
    """Loss and accuracy, training and validation, against training steps; prune events are vertical lines.

    metrics: as RunDirectory.metrics() returns. Raises ResultsError if there are no records.
    """
    if not len(metrics):
        raise ResultsError("no metrics to draw: the run has no record yet")
    with matplotlib.rc_context(STYLE):
        figure = _figure(6.5, 4.6, title, caption)
        loss, accuracy = figure.subplots(2, 1, sharex=True)
        loss.set(ylabel="Loss (nats, log scale)", yscale="log")
        accuracy.set(ylabel="Accuracy (%)", xlabel="Training step")
        _curves(loss, metrics, events, "loss")
        _curves(accuracy, metrics, events, "accuracy")
        _log_ticks(loss.yaxis, *loss.get_ylim())
        loss.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return figure


def _curves(axes: Axes, metrics: pd.DataFrame, events: list[dict], name: str) -> None:
    epochs = metrics.reindex(columns=["validation/loss"]).notna().any(axis=1)  # records at an epoch's end
    dashed = {"color": OTHER(0.5), "marker": "D", "linestyle": DASHES[1]}
    parts = [
        ("training", f"train/{name}", ~epochs, {"color": "0.7", "linewidth": 0.7}),
        ("training, epoch", f"train/{name}", epochs, {"color": "0.1", "marker": "o"}),
        ("validation", f"validation/{name}", epochs, dashed),
    ]
    for label, column, chosen, style in parts:
        if column in metrics and metrics.loc[chosen, column].notna().any():
            rows = metrics[chosen]
            axes.plot(rows["step"], rows[column], markersize=3.5, label=label, **style)
    width = 0.9 if len(events) < 6 else 0.4
    for index, event in enumerate(events):
        axes.axvline(
            event["step"],
            color="0.3",
            linewidth=width,
            linestyle=(0, (2, 2)),
            label=None if index else f"prune event ({len(events)})",
        )


def save(figure: Figure, path: str | Path, kinds: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write `<path>.png` (200 dpi) and `<path>.pdf`, or one of them, the same bytes each time; returns the paths."""
    path = Path(path)
    undated = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    layout = figure.get_layout_engine()
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out now, once for all files
        for kind in kinds:
            write = functools.partial(figure.savefig, format=kind, metadata=undated[kind])
            write_atomically(path.with_name(f"{path.name}.{kind}"), write)
        figure.set_layout_engine(layout)
    return [path.with_name(f"{path.name}.{kind}") for kind in kinds]


def draw(root: str | Path, out: str | Path) -> list[Path]:
    """Every figure of the runs under `root`, written to the folder `out`; returns the files' paths.

    One accuracy figure a setting. For each data set, model, kind of pruning and criterion a trace of one run,
    and for the first of these criteria widths and training curves, too. Raises ResultsError for bad runs.
    """
    table, out = results.table(root), Path(out)
    unpruned = table["config.pruning.name"] == "none"
    written = []
    for setting, rows in results.by_setting(table[~unpruned]).items() if not unpruned.all() else ():
        figure = accuracy_vs_sparsity(pd.concat([rows, table[unpruned]]), setting, str(root))
        written += save(figure, out / _slug(f"accuracy-{setting}"))
    seen = set()
    for name, row in _representatives(table):
        kind = tuple(row[results.BASE[:3]])
        for noun, figure in _run_figures(Path(root), name, row, only_trace=kind in seen):
            written += save(figure, out / _slug(f"{noun}-{name}"))
        seen.add(kind)
    return written


def _representatives(table: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Name, row of a run for each data set, model, kind and criterion: middle request, then lowest seed."""
    order = table["criterion"].fillna("none").map(_order)
    table, chosen = table.assign(requested=results.requested(table), order=order), []
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


def _slug(text: str) -> str:
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
