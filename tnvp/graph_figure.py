"""The autograd graph under losses, drawn: what each node expects of a gradient, and which leaf no longer fits.

Rows run as backward does, losses above, leaves at the foot. An edge that passes a row bends there, so that it crosses no
box (layered drawing: Sugiyama, Tagawa and Toda, IEEE Trans. SMC 1981).
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from graphlib import TopologicalSorter
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import Node

from tnvp.figure_style import STYLE, new_figure, spread_out

Spot = Hashable  # a node, or a bend: (from node, to node, row)
INCHES = 1.45, 0.76  # of a column, of a row
INNER, GONE = ("white", "0.6"), ("0.92", "0.4")  # fill, edge
LEAF, STALE = ("#E3F0F8", "#0072B2"), ("#FBE6D9", "#D55E00")
CAPTION = (
    "Arrows run as backward does. A box is a node: its name, and the shape that it expects of a gradient. Blue: the model's "
    "leaves, with the shape that each has now; orange: the two differ; grey: a leaf that is not in the model."
)


def backward_graph(losses: Mapping[str, Tensor], model: nn.Module, title: str) -> Figure:
    """The graphs under ``losses`` (by the name to be shown) in one picture: what they share is drawn once.

    Leaves are called by their names in ``model``. The figure holds text alone: no graph lives longer for being drawn.
    Raises ValueError for a loss without a graph.
    """
    roots = {name: _root(name, loss) for name, loss in losses.items()}
    children = _children(list(roots.values()))
    rows, above = _rows(children)
    x, gap = _columns(rows, above)
    y = {spot: row for row, spots in enumerate(rows) for spot in spots}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with matplotlib.rc_context(STYLE):
        figure = new_figure(INCHES[0] * (1 + 1 / gap), INCHES[1] * len(rows) + 0.9, title, CAPTION)
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-gap / 2, 1 + gap / 2), ylim=(-0.5, len(rows) - 0.3))
        for spot, uppers in above.items():
            for upper in uppers:
                ends = [(x[end], y[end], _half(end)) for end in (upper, spot)]
                _edge(axes, *ends, arrives=spot in children)
        for node in children:
            _box(axes, x[node], y[node], *_label(node, names))
        for name, root in roots.items():
            axes.text(x[root], y[root] + 0.48, name, ha="center", va="center", weight="bold")
    return figure


def _root(name: str, loss: Tensor) -> Node:
    if loss.grad_fn is None:
        raise ValueError(
            f"the loss {name!r} has no graph: it was computed under no_grad, or from nothing that requires a gradient"
        )
    return loss.grad_fn


def _children(roots: list[Node]) -> dict[Node, list[Node]]:
    """Each node under ``roots`` → the nodes it hands gradients to, each once."""
    children, ahead = {}, roots[::-1]
    while ahead:
        node = ahead.pop()
        if node not in children:
            children[node] = list(dict.fromkeys(child for child, _ in node.next_functions if child is not None))
            ahead += children[node][::-1]
    return children


def _rows(children: dict[Node, list[Node]]) -> tuple[list[list[Spot]], dict[Spot, list[Spot]]]:
    """Rows from the foot up, a node one above the highest of its children; and spot → those of the next row it hangs from."""
    height = {}
    for node in TopologicalSorter(children).static_order():
        height[node] = 1 + max((height[child] for child in children[node]), default=-1)
    rows, above = [[] for _ in range(1 + max(height.values()))], defaultdict(list)
    for node, its_children in children.items():
        rows[height[node]].append(node)
        for child in its_children:
            upper = node
            for row in range(height[node] - 1, height[child], -1):
                bend = (node, child, row)
                rows[row].append(bend)
                above[bend].append(upper)
                upper = bend
            above[child].append(upper)
    return rows, above


def _columns(rows: list[list[Spot]], above: dict[Spot, list[Spot]]) -> tuple[dict[Spot, float], float]:
    """Spot → its place, 0 to 1, as near to the mean of those it hangs from as the gap allows; and the gap."""
    gap = 1 / max(map(len, rows))
    tops = [spot for row in rows for spot in row if spot not in above]
    x = {spot: (index + 0.5) / len(tops) for index, spot in enumerate(tops)}
    for row in reversed(rows):
        wishes = {spot: fmean(x[upper] for upper in above[spot]) if spot in above else x[spot] for spot in row}
        ordered = sorted(row, key=wishes.get)
        x |= zip(ordered, spread_out(sorted(wishes.values()), gap), strict=True)
    return x, gap


def _label(node: Node, names: dict[int, str]) -> tuple[str, tuple[str, str]]:
    """A node's text, and its colours."""
    # Underscored, yet it is what torch.autograd.backward itself reads when handed a gradient edge.
    shapes = [list(record.shape) for record in node._input_metadata]
    text = f"{node.name().rpartition('::')[2]}\nexpects {', '.join(map(str, shapes))}"
    leaf = getattr(node, "variable", None)
    if leaf is None:
        return text, INNER
    now = list(leaf.shape)
    if id(leaf) not in names:
        return f"{text}\nnot in the model {now}", GONE
    return f"{text}\n{names[id(leaf)]} {now}", LEAF if shapes == [now] else STALE


def _box(axes: Axes, x: float, y: float, text: str, colours: tuple[str, str]) -> None:
    box = {"boxstyle": "round,pad=0.4", "facecolor": colours[0], "edgecolor": colours[1]}
    axes.text(x, y, text, ha="center", va="center", bbox=box, linespacing=1.3)


def _half(spot: Spot) -> float:
    """Half the height of its box in rows: a leaf has a line more, a bend has none."""
    return 0.0 if isinstance(spot, tuple) else 0.36 if hasattr(spot, "variable") else 0.27


def _edge(axes: Axes, upper: tuple[float, float, float], lower: tuple[float, float, float], arrives: bool) -> None:
    """An edge between neighbouring rows, from box or bend to box or bend, each (x, y, half its height)."""
    start, end = (upper[0], upper[1] - upper[2]), (lower[0], lower[1] + lower[2])
    arrow = {"arrowstyle": "-|>" if arrives else "-", "color": "0.45", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=arrow)
