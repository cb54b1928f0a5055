"""A drawn graph shows every node once, above what it hands gradients to, and orange leaves are those of `stale_leaves`."""

from itertools import combinations

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from torch import nn

import tnvp
from tnvp.figure_style import STYLE
from tnvp.graph_figure import GONE, LEAF, STALE, backward_graph

NETWORKS = {
    "linear": lambda: nn.Linear(8, 3),
    "two layers": lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)),
}


def plain(network):
    return {"loss": network(torch.ones(4, 8)).sum()}


def penalised(network):
    return {"loss": network(torch.ones(4, 8)).sum() + sum(p.square().sum() for p in network.parameters())}


def two(network):
    return {"old": network(torch.ones(4, 8)).sum(), "new": network(torch.ones(8)).sum()}


def nodes(losses) -> set:
    found, ahead = set(), [loss.grad_fn for loss in losses.values()]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [child for child, _ in node.next_functions]
    return found


def boxes(figure) -> list:
    return [text for text in figure.axes[0].texts if text.get_bbox_patch() and text.get_text()]


def leaves(figure, colour: str) -> set[str]:
    """Names of the leaves of that edge colour: the last line of a box, before the shape."""
    drawn = [box for box in boxes(figure) if to_hex(box.get_bbox_patch().get_edgecolor()) == to_hex(colour)]
    return {box.get_text().splitlines()[-1].split(" [")[0] for box in drawn}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("losses_of", [plain, penalised, two])
def test_every_node_is_drawn_once_and_boxes_keep_apart(network, losses_of):
    network = network()
    losses = losses_of(network)
    figure = backward_graph(losses, network, "title")
    names = sorted(box.get_text().splitlines()[0] for box in boxes(figure))
    assert names == sorted(node.name().rpartition("::")[2] for node in nodes(losses))
    assert leaves(figure, LEAF[1]) == {name for name, _ in network.named_parameters()}
    with matplotlib.rc_context(STYLE):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
    frames = [box.get_bbox_patch().get_window_extent(renderer) for box in boxes(figure)]
    assert not any(a.overlaps(b) for a, b in combinations(frames, 2))
    assert all(figure.bbox.x0 <= frame.x0 and frame.x1 <= figure.bbox.x1 for frame in frames)


@pytest.mark.parametrize("losses_of", [plain, penalised, two])
def test_arrows_run_down_and_as_many_arrive_as_the_graph_has_edges(losses_of):
    network = NETWORKS["two layers"]()
    losses = losses_of(network)
    arrows = [text for text in backward_graph(losses, network, "title").axes[0].texts if hasattr(text, "xyann")]
    assert all(arrow.xy[1] < arrow.xyann[1] for arrow in arrows)
    edges = {(node, child) for node in nodes(losses) for child, _ in node.next_functions if child is not None}
    assert sum("|>" in arrow.arrowprops["arrowstyle"] for arrow in arrows) == len(edges)


def test_orange_leaves_are_those_of_stale_leaves():
    network = NETWORKS["two layers"]()
    losses = plain(network)
    assert leaves(backward_graph(losses, network, "title"), STALE[1]) == set()
    network[2].weight.data = network[2].weight.data[:, :2]
    assert leaves(backward_graph(losses, network, "title"), STALE[1]) == set(tnvp.stale_leaves(network)) == {"2.weight"}


def test_a_leaf_that_left_the_model_is_called_so():
    network = nn.Linear(8, 3)
    losses = plain(network)
    network.weight = nn.Parameter(network.weight[:, :5])
    figure = backward_graph(losses, network, "title")
    assert leaves(figure, LEAF[1]) == {"bias"}
    assert leaves(figure, GONE[1]) == {"not in the model"}


def test_drawing_keeps_no_graph_alive():
    network = nn.Linear(8, 3)
    losses = plain(network)
    figure = backward_graph(losses, network, "title")
    network.weight.data = network.weight.data[:, :5]
    assert tnvp.stale_leaves(network) == ["weight"]
    losses.clear()
    assert tnvp.stale_leaves(network) == []
    assert boxes(figure), "the picture is still here"


def test_a_loss_without_a_graph_is_an_error_that_names_it():
    network = nn.Linear(8, 3)
    with torch.no_grad():
        losses = {"the loss of step 3": network(torch.ones(8)).sum()}
    with pytest.raises(ValueError, match=r"'the loss of step 3' has no graph"):
        backward_graph(losses, network, "title")
