"""One style for every figure: a criterion has one colour, marker and dash everywhere.

Okabe and Ito's palette for the colour-blind, marker and dash for grey print.
"""

import functools
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tnvp.files import write_atomically

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
    "apoz": ("#882255", ">", (0, (3, 3))),
    "random": ("#999999", "x", (0, (1, 2.5))),  # grey: what others are compared with, as are the controls
}
SCRATCH = (
    "0.25",
    "h",
    (0, (12, 2, 2, 2)),
)  # the control of the same widths, trained from random weights; its markers are hollow
COMPENSATIONS = {  # name: dash
    "none": (0, (1.5, 1.2)),
    "act_of_mean": (0, (6, 1.5, 1, 1.5)),
    "mean": (0, (5, 1.5)),
    "affine": "-",
}
DATASETS = {  # name in the config: name in a title
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "digits (8×8 pixels)",
    "cifar10-jpeg": "CIFAR-10",  # the folder that the studies read
}
NETWORKS = {
    "mlp": "MLP",
    "lenet_300_100": "LeNet-300-100",
    "lenet_5": "LeNet-5",
    "tutorial_cnn": "tutorial CNN",
    "resnet20": "ResNet-20",
    "vgg11_bn": "VGG-11 with batch norm",
    "vit_tiny": "tiny vision transformer",
}
UNKNOWN = ("#444444", "*", "-")  # a criterion not in the list above: its label still names it
OTHER = matplotlib.colormaps["viridis"]  # for what is no criterion: variances, groups, validation curves
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1, 1.5))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "h"]
DEAD = "0.8"
LEAST_SEEDS = 3  # with two, the t-interval is 13 times their half-difference wide: it would say nothing and hide all


def outline(criterion: str) -> list:
    """Yellow on white needs a dark edge to be seen."""
    return [Stroke(linewidth=2.6, foreground="0.3"), Normal()] if criterion == "bn_scale" else []


def order(criterion: str) -> tuple[int, str]:
    """Sorts criteria as CRITERIA lists them, others after these by name."""
    names = list(CRITERIA)
    return (names.index(criterion) if criterion in names else len(names), str(criterion))


def group_styles(count: int) -> list[tuple]:
    """A colour and a dash for each of so many groups of neurons, from the input on."""
    return [(OTHER(0.85 * index / max(1, count - 1)), DASHES[index % len(DASHES)]) for index in range(count)]


@FuncFormatter
def plain_number(value: float, _: int) -> str:
    """0.01 rather than a power of ten: shorter to read on few ticks, and no second font in the file."""
    return f"{value:g}"


@FuncFormatter
def short_number(value: float, _: int) -> str:
    """200k rather than 200000."""
    power = next((power for power in (9, 6, 3) if value >= 10**power), 0)
    return f"{value / 10**power:g}{ {9: 'G', 6: 'M', 3: 'k', 0: ''}[power] }"


def cost_ticks(axis: Axis, low: float, high: float) -> None:
    """`log_ticks` with labels such as 200k."""
    log_ticks(axis, low, high)
    axis.set_major_formatter(short_number)


def plural(count: int, one: str, many: str | None = None) -> str:
    """1 run, 2 runs."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Labels at powers of ten; at 2 and 5 too where there are few powers."""
    axis.set_major_locator(LogLocator(subs=(1,) if high > 1000 * low else (1, 2, 5)))
    axis.set_major_formatter(plain_number)
    axis.set_minor_formatter(NullFormatter())


def new_figure(width: float, height: float, title: str, caption: str) -> Figure:
    """An empty figure of that many inches; the caption stands at its foot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    lines = textwrap.fill(caption, int(20 * width), break_on_hyphens=False)  # a command is copied
    figure.supxlabel(lines, x=0.01, ha="left", fontsize=6.5, color="0.35")
    return figure


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Name lines right of the axes, at heights that don't overlap; ends are (x, y, name, colour)."""
    ends = sorted(ends, key=lambda end: end[1])
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform(end[:2])[1] for end in ends]
    inches = axes.figure.get_size_inches()[1] * axes.get_position().height
    for (x, y, name, colour), place in zip(ends, spread_out(heights, 10 / 72 / inches), strict=True):
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


def spread_out(heights: list[float], gap: float) -> list[float]:
    """Sorted heights, moved as little as keeps them `gap` apart (least squares); in 0 to 1 if they fit."""
    blocks: list[list[float]] = []  # sum and length of neighbours that must stand exactly `gap` apart
    for index, height in enumerate(heights):
        blocks.append([height - index * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, length = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + length]
    bases = [total / length for total, length in blocks for _ in range(int(length))]
    return [max(0.0, min(base, 1 - (len(bases) - 1) * gap)) + index * gap for index, base in enumerate(bases)]


def band(mean: np.ndarray, half: np.ndarray, n: np.ndarray, highest: float = 100) -> tuple[np.ndarray, np.ndarray]:
    """Edges of an interval of what lies in 0 to ``highest``, such as accuracies; NaN for too few seeds."""
    half = np.where(np.asarray(n) < LEAST_SEEDS, np.nan, half)
    return np.clip(mean - half, 0, highest), np.clip(mean + half, 0, highest)


def none_where(counts: Iterable[int]) -> str:
    """What a caption says of intervals that are not drawn, if any of these counts of seeds is too small."""
    return f", none where n < {LEAST_SEEDS}" if min(counts) < LEAST_SEEDS else ""


def data_name(runs: pd.DataFrame) -> str:
    """The data set of these runs; of images in class folders, the name of their folder."""
    name = runs["config.dataset.name"].iloc[0]
    folders = runs["config.dataset.folder"].unique() if "config.dataset.folder" in runs else []
    return str(folders[0]) if name == "image_folder" and len(folders) == 1 else name


def subject(runs: pd.DataFrame) -> str:
    """Data set and network of these runs as a title has them: "MNIST, LeNet-300-100"."""
    keys = ["config.dataset.name", "config.model.name"]
    return "; ".join(_subject(rows) for _, rows in runs.groupby(keys, sort=False))


def _subject(runs: pd.DataFrame) -> str:
    def only(column: str) -> str | None:
        values = runs[column].dropna().unique() if column in runs else []
        return values[0] if len(values) == 1 else None

    data, name = data_name(runs), runs["config.model.name"].iloc[0]
    data = DATASETS.get(data, data)
    if runs["config.dataset.name"].iloc[0] == "image_folder" and (size := only("config.dataset.image_size")):
        data = f"{data} ({size:g}×{size:g} pixels)"
    network = NETWORKS.get(name, name.replace("_", " "))
    widths = only("config.model.widths") if name == "mlp" else None
    return f"{data}, {network}" + (f" {'-'.join(map(str, json.loads(widths)))}" if widths else "")


def in_words(runs: pd.DataFrame, setting: str) -> str:
    """A setting, named as `results.by_setting` does, as a title has it: "MNIST, LeNet-5: one shot, affine compensation, scope layer"."""
    known = runs.iloc[0]
    compensation = known.get("config.pruning.compensation")
    how = [known["config.pruning.name"].replace("_", " ")]
    how += [f"{compensation} compensation"] if f"compensation {compensation}" in setting.split(", ") else []
    for other in re.findall(r"(?:^|, )([\w.]+)=(.*?)(?=, [\w.]+=|$)", setting):
        how.append(f"{other[0].rsplit('.', 1)[-1]} {other[1]}")
    return f"{subject(runs)}: {', '.join(word.replace('_', ' ') for word in how)}"


def provenance(runs: pd.DataFrame, command: str) -> str:
    """The end of a caption: how many runs are drawn, of which data, code and machine, and how to have them again."""
    short = {re.sub("^([0-9a-f]{7})[0-9a-f]*", r"\1", str(commit)) for commit in runs["commit"].dropna()}
    commits = ", ".join(sorted(short)) or "unknown"
    hardware = ", ".join(sorted(runs["hardware"].dropna().unique())) or "unknown hardware"
    return (
        f"{plural(len(runs), 'run')}, {data_name(runs)} test data, commit {commits}, {hardware}. Reproduce: {command}"
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
