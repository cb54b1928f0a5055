"""Where this project comes from: why pruning through `.data` breaks the next backward, and what doesn't.

    layer = nn.Linear(100, 10); x = 5 - layer(torch.ones(100)).sum(); x.backward()
    layer.weight.data = layer.weight.data[:, :90]            # prune ten inputs; and the same for .grad
    x = 5 - layer(torch.ones(90)).sum(); x.backward()        # RuntimeError

Read it top to bottom: the error; the five facts that explain it; the ways to prune, and which of them work;
the quieter trap behind those that do; `stale_leaves`, which sees the trouble before backward meets it. The
last section is how surgery avoids both.
"""

import ast
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import prune

import tnvp
from tnvp.pruning.errors import PruningError
from tnvp.pruning.leaves import stale_leaves

INPUTS, KEPT, OUTPUTS = 100, 90, 10
STALE_NODE = (
    "Function TBackward0 returned an invalid gradient at index 0 - "
    "got [10, 90] but expected shape compatible with [10, 100]"
)
STALE_TENSOR = "The size of tensor a (100) must match the size of tensor b (90) at non-singleton dimension 1"


def new_model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(layer=nn.Linear(INPUTS, OUTPUTS)))


def loss(model: nn.Module) -> torch.Tensor:
    """A scalar whose gradient is -1 in every weight and bias, whatever the layer's width is by now."""
    return 5 - model(torch.ones(model.layer.weight.shape[1])).sum()


@pytest.fixture
def model():
    """A model after its first backward. This frame's `x` keeps the old graph alive until the test is over."""
    model = new_model()
    x = loss(model)
    x.backward()
    yield model


def error_of(call, *arguments) -> str | None:
    """What torch complains of. As text, because a kept exception keeps its frames, and they a graph."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    return None


def backward_error(model: nn.Module) -> str | None:
    return error_of(lambda: loss(model).backward())


def node_of(parameter: torch.Tensor):
    return get_gradient_edge(parameter).node


def recorded_shape(node) -> list[int]:
    return list(node._input_metadata[0].shape)


def transpose_in(root):
    """The TBackward0 node in the graph under `root`."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if node.name() == "TBackward0":
            return node
        nodes += [child for child, _ in node.next_functions if child is not None]
    raise LookupError("no TBackward0 in the graph")


# ==== The ways to prune ten inputs. Each leaves the layer with a [10, 90] weight. ====


def assign_data(model):
    weight = model.layer.weight
    weight.data = weight.data[:, :KEPT].contiguous()
    weight.grad = weight.grad[:, :KEPT].contiguous()


def assign_data_under_no_grad(model):
    with torch.no_grad():
        assign_data(model)


def new_parameter(model):
    model.layer.weight = nn.Parameter(model.layer.weight[:, :KEPT])


def new_linear(model):
    model.layer = nn.Linear(KEPT, OUTPUTS)


def set_in_place(model):
    weight = model.layer.weight
    with torch.no_grad():
        weight.set_(weight[:, :KEPT].clone())
    weight.grad = weight.grad[:, :KEPT].contiguous()


def swap_tensors(model):
    torch.utils.swap_tensors(model.layer.weight, nn.Parameter(model.layer.weight.detach()[:, :KEPT]))


FAILING = {".data =": assign_data, ".data = under no_grad": assign_data_under_no_grad}
WORKING = {
    "new Parameter": new_parameter,
    "new Linear": new_linear,
    "set_ under no_grad": set_in_place,
    "swap_tensors": swap_tensors,
}


def each(name: str, table: dict):
    return pytest.mark.parametrize(name, table.values(), ids=table.keys())


# ==== The error ====


def test_the_error_as_it_was_met():
    layer = nn.Linear(100, 10)
    x = 5 - layer(torch.ones(100)).sum()
    x.backward()
    layer.weight.data = layer.weight.data[:, :90]
    layer.weight.grad = layer.weight.grad[:, :90]
    with pytest.raises(RuntimeError) as caught:
        x = 5 - layer(torch.ones(90)).sum()
        x.backward()
    assert str(caught.value) == STALE_NODE


# ==== The facts ====


@each("shape", {"vector": (INPUTS,), "batch": (4, INPUTS)})
def test_fact_1_the_node_it_names_is_the_backward_of_the_weights_transpose(shape):
    layer = nn.Linear(INPUTS, OUTPUTS)
    assert layer.weight.t().grad_fn.name() == "TBackward0"
    [(leaf, _)] = transpose_in(layer(torch.ones(shape)).grad_fn).next_functions
    assert leaf is node_of(layer.weight)


def test_fact_2_that_node_is_not_the_stale_one_and_its_gradient_is_right(model):
    assign_data(model)
    transpose = transpose_in(loss(model).grad_fn)
    assert recorded_shape(transpose) == [KEPT, OUTPUTS]
    assert transpose(torch.ones(KEPT, OUTPUTS)).shape == model.layer.weight.shape == (OUTPUTS, KEPT)


def test_fact_3_its_edge_leads_to_the_leafs_node_which_recorded_the_old_shape(model):
    assign_data(model)
    [(leaf, _)] = transpose_in(loss(model).grad_fn).next_functions
    assert leaf.name() == "torch::autograd::AccumulateGrad"
    assert leaf.variable is model.layer.weight
    assert recorded_shape(leaf) == [OUTPUTS, INPUTS]


@each("way", FAILING)
def test_fact_4_the_node_is_the_same_before_and_after_the_edit(model, way):
    before = node_of(model.layer.weight)
    way(model)
    assert node_of(model.layer.weight) is before
    assert recorded_shape(before) == [OUTPUTS, INPUTS]


def test_fact_4_the_leaf_holds_its_node_only_weakly():
    model = new_model()
    x = loss(model)
    node_of(model.layer.weight).metadata["seen"] = True  # marked, so that we know it again without holding it
    x.backward()  # frees the graph's buffers, not its nodes
    assert "seen" in node_of(model.layer.weight).metadata
    del x
    assert "seen" not in node_of(model.layer.weight).metadata


HOLDERS = {
    "a list of losses": lambda x: [x],
    "a logged tensor": lambda x: {"train/loss": x},
    "a closure": lambda x: lambda: x,
    "a grad_fn": lambda x: x.grad_fn,
}


@each("hold", HOLDERS)
def test_fact_4_anything_that_holds_the_old_graph_will_do(hold):
    model = new_model()
    x = loss(model)
    x.backward()
    held = hold(x)
    del x
    assign_data(model)
    assert backward_error(model) == STALE_NODE
    del held
    assert backward_error(model) is None


@each("log", {"item()": torch.Tensor.item, "detach()": torch.Tensor.detach})
def test_fact_4_a_loss_logged_without_its_graph_holds_nothing(log):
    model = new_model()
    x = loss(model)
    x.backward()
    logged = [log(x)]
    del x
    assign_data(model)
    assert backward_error(model) is None
    assert logged, "the value is still here; its graph is not"


GRADS = {
    "left": lambda weight: None,
    "sliced": lambda weight: setattr(weight, "grad", weight.grad[:, :KEPT]),
    "dropped": lambda weight: setattr(weight, "grad", None),
}


@each("correct", GRADS)
def test_fact_4_correcting_grad_changes_nothing(model, correct):
    weight = model.layer.weight
    weight.data = weight.data[:, :KEPT]
    correct(weight)
    assert backward_error(model) == STALE_NODE


def test_fact_4_a_stale_grad_is_another_error_met_only_when_the_old_graph_is_gone():
    model = new_model()
    loss(model).backward()
    model.layer.weight.data = model.layer.weight.data[:, :KEPT]
    assert stale_leaves(model) == []
    assert backward_error(model) == STALE_TENSOR


def test_fact_5_deleting_the_old_graph_works_by_luck():
    model = new_model()
    x = loss(model)
    x.backward()
    assign_data(model)
    assert stale_leaves(model) == ["layer.weight"]
    assert backward_error(model) == STALE_NODE
    del x
    assert stale_leaves(model) == []
    assert backward_error(model) is None


def test_fact_5_a_new_parameter_works_by_construction(model):
    before = node_of(model.layer.weight)
    new_parameter(model)
    assert recorded_shape(before) == [OUTPUTS, INPUTS]
    assert recorded_shape(node_of(model.layer.weight)) == [OUTPUTS, KEPT]


# ==== The table: a way to prune while the old graph is alive, and the next backward ====


@each("way", FAILING)
def test_table_fails(model, way):
    way(model)
    assert stale_leaves(model) == ["layer.weight"]
    assert backward_error(model) == STALE_NODE


@each("way", WORKING)
def test_table_works(model, way):
    way(model)
    assert stale_leaves(model) == []
    model.zero_grad()
    loss(model).backward()
    assert model.layer.weight.shape == (OUTPUTS, KEPT)
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, -torch.ones_like(parameter))


@each("mode", {"resize_": torch.enable_grad, "resize_ under no_grad": torch.no_grad})
def test_table_refused(model, mode):
    with mode():
        refusal = error_of(model.layer.weight.resize_, OUTPUTS, KEPT)
    assert refusal == "cannot resize variables that require grad"
    assert model.layer.weight.shape == (OUTPUTS, INPUTS)
    assert stale_leaves(model) == []


def test_table_does_not_exist():
    assert not hasattr(torch.autograd.graph, "clear")


def test_table_masks_work_and_shrink_nothing(model):
    prune.random_structured(model.layer, "weight", amount=INPUTS - KEPT, dim=1)
    assert stale_leaves(model) == []
    loss(model).backward()
    assert int((model.layer.weight == 0).all(dim=0).sum()) == INPUTS - KEPT
    assert sum(parameter.numel() for parameter in model.parameters()) == OUTPUTS * INPUTS + OUTPUTS


def test_beyond_the_table_a_stale_node_can_be_wrong_without_a_word():
    """A record that broadcasts to the gradient's shape raises nothing: the gradient is summed down to it."""
    layer = nn.Linear(1, OUTPUTS)
    x = layer(torch.ones(1)).sum()
    x.backward()
    layer.zero_grad()
    layer.weight.data = torch.ones(OUTPUTS, 3)
    layer(torch.ones(3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((OUTPUTS, 3), 3.0)), "1 would be right"
    assert stale_leaves(layer) == ["weight"]


# ==== The quieter trap: the optimizer still holds the old parameter ====


def learns(model, optimizer) -> dict[str, bool]:
    """Takes one training step and says which parameters it changed."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()
    return {name: not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("way", "weight", "bias"),
    [
        pytest.param(new_parameter, False, True, id="new Parameter"),
        pytest.param(new_linear, False, False, id="new Linear"),
        pytest.param(set_in_place, True, True, id="set_ under no_grad"),
        pytest.param(swap_tensors, True, True, id="swap_tensors"),
    ],
)
def test_trap_a_parameter_the_optimizer_does_not_know_stops_learning(model, way, weight, bias):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert learns(model, optimizer) == {"layer.weight": True, "layer.bias": True}
    way(model)
    assert learns(model, optimizer) == {"layer.weight": weight, "layer.bias": bias}
    assert torch.all(model.layer.weight.grad != 0), "the gradient is there, used or not"


@pytest.mark.parametrize("way", [set_in_place, swap_tensors])
def test_trap_a_parameter_the_optimizer_knows_meets_the_momentum_of_its_old_shape(model, way):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    learns(model, optimizer)
    way(model)
    assert error_of(learns, model, optimizer) == STALE_TENSOR


# ==== stale_leaves: the trouble, seen before backward meets it (on each way: in the table above) ====

MODULES = {
    "nothing": nn.ReLU,
    "scalar": lambda: nn.ParameterList([torch.tensor(1.0)]),
    "conv and batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "lstm": lambda: nn.LSTM(3, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "bfloat16": lambda: nn.Embedding(3, 4, dtype=torch.bfloat16),
    "meta": lambda: nn.Linear(3, 4, device="meta"),
}


@each("build", MODULES)
def test_stale_leaves_names_exactly_the_edited_parameters_of_any_module(build):
    module = build()
    graph = [parameter * 1 for parameter in module.parameters()]
    edited = []
    assert stale_leaves(module) == edited
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data[None]
        edited.append(name)
        assert stale_leaves(module) == edited
    del graph
    assert stale_leaves(module) == []


def test_stale_leaves_names_a_tied_parameter_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    x = model(torch.ones(4)).sum()
    x.backward()
    model[1].weight.data = model[1].weight.data[:, :3]
    assert stale_leaves(model) == ["0.weight"]


def test_stale_leaves_changes_nothing_and_leaves_nothing_behind(model):
    def state():
        return [(id(p), id(p.grad), p._version, p.requires_grad, p.is_leaf) for p in model.parameters()]

    assign_data(model)
    before = state()
    assert stale_leaves(model) == stale_leaves(model) == ["layer.weight"]
    assert state() == before

    fresh = new_model()
    assert stale_leaves(fresh) == []
    fresh.layer.weight.data = fresh.layer.weight.data[:, :KEPT]
    assert backward_error(fresh) is None, "a node outlived the call that made it"


def test_stale_leaves_passes_over_a_frozen_parameter_until_it_is_unfrozen(model):
    assign_data(model)
    model.layer.weight.requires_grad_(False)
    assert stale_leaves(model) == []
    assert backward_error(model) is None
    model.layer.weight.requires_grad_(True)
    assert stale_leaves(model) == ["layer.weight"]
    assert backward_error(model) == STALE_NODE


def test_stale_leaves_passes_over_parameters_without_a_node():
    with torch.inference_mode():
        made_in_inference_mode = nn.Linear(3, 4)
    assert stale_leaves(nn.Sequential(nn.LazyLinear(4), made_in_inference_mode)) == []


def test_stale_leaves_passes_over_weights_that_another_computation_made():
    model, found = new_model(), []
    model.layer.register_forward_hook(lambda *_: found.append(stale_leaves(model)))
    _, weight = torch.ones(OUTPUTS, 7 + INPUTS, requires_grad=True).split([7, INPUTS], dim=1)
    torch.func.functional_call(model, {"layer.weight": weight}, torch.ones(INPUTS))
    assert found == [[]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_stale_leaves_sees_as_well_where_gradients_are_off(model, mode):
    assign_data(model)
    with mode():
        assert stale_leaves(model) == ["layer.weight"]


def test_stale_leaves_need_not_fear_another_dtype_which_torch_itself_watches(model):
    """Assigning `.data` of another dtype makes torch drop the node. Only the shape isn't asked about."""
    model.layer.weight.data = model.layer.weight.data.double()
    assert stale_leaves(model) == []


OTHER = {"shape": torch.Size([7]), "dtype": torch.float16, "device": torch.device("meta")}


@pytest.mark.parametrize("field", OTHER)
def test_stale_leaves_compares_dtype_and_device_too_should_torch_stop_watching_them(monkeypatch, field):
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    record = {"shape": layer.weight.shape, "dtype": layer.weight.dtype, "device": layer.weight.device}
    for metadata, stale in ((record, []), (record | {field: OTHER[field]}, ["weight"])):
        edge = SimpleNamespace(node=SimpleNamespace(_input_metadata=(SimpleNamespace(**metadata),)))
        monkeypatch.setattr("tnvp.pruning.leaves.get_gradient_edge", lambda _, edge=edge: edge)
        assert stale_leaves(layer) == stale


def test_stale_leaves_fails_loudly_where_torch_hides_the_record(monkeypatch):
    edge = SimpleNamespace(node=SimpleNamespace())
    monkeypatch.setattr("tnvp.pruning.leaves.get_gradient_edge", lambda _: edge)
    message = rf"'layer\.weight'.*torch {re.escape(torch.__version__)}.*AttributeError.*_input_metadata"
    with pytest.raises(PruningError, match=message):
        stale_leaves(new_model())


def test_stale_leaves_fails_loudly_on_a_layout_it_cannot_read():
    with pytest.raises(PruningError, match=r"'0'.*torch\.sparse_coo"):
        stale_leaves(nn.ParameterList([torch.eye(3).to_sparse()]))


# ==== How surgery avoids both: new parameters, and an optimizer that is told ====


def test_surgery_never_assigns_data():
    for path in Path(tnvp.__file__).parent.glob("pruning/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert node.attr != "data", f"{path.name}:{node.lineno} assigns to .data"


def trained_network() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """A network with momentum behind it, its optimizer, a batch, and a loss whose graph is still alive."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 8)
    for _ in range(3):
        alive = network(x).square().sum()
        optimizer.zero_grad()
        alive.backward(retain_graph=True)
        optimizer.step()
    return network, optimizer, x, alive


def pruned_by_half(network: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tnvp.PruneReport:
    pruner = tnvp.Pruner(network, optimizer=optimizer, example_inputs=x)
    with pruner.record():
        network(x)
    return pruner.prune(sparsity=0.5)


def test_after_surgery_backward_works_while_the_old_graph_is_alive():
    network, optimizer, x, alive = trained_network()
    pruned_by_half(network, optimizer, x)
    assert alive.grad_fn is not None
    assert tnvp.stale_leaves(network) == []
    network(x).square().sum().backward()
    assert [p.grad.shape for p in network.parameters()] == [p.shape for p in network.parameters()]


def test_after_surgery_the_gradient_kept_has_the_new_shape():
    network, optimizer, x, _ = trained_network()
    wide = network[2].weight.grad
    report = pruned_by_half(network, optimizer, x)
    assert torch.equal(network[2].weight.grad, wide[:, report.groups[0].kept])


def test_after_surgery_every_parameter_goes_on_learning_with_its_momentum():
    network, optimizer, x, _ = trained_network()
    momentum = optimizer.state[network[0].weight]["momentum_buffer"]
    report = pruned_by_half(network, optimizer, x)
    assert torch.equal(optimizer.state[network[0].weight]["momentum_buffer"], momentum[report.groups[0].kept])
    before = [p.detach().clone() for p in network.parameters()]
    optimizer.zero_grad()
    network(x).square().sum().backward()
    optimizer.step()
    assert all((p != b).any() for p, b in zip(network.parameters(), before, strict=True))
