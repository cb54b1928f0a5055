"""From a traced network to its neuron groups.

Every neuron that a layer writes gets an atom, a number of its own. Walking the graph once, each tensor dimension carries
the atoms it holds, position by position: a flatten repeats them, an addition unites those it adds. What the walk does not
understand blocks the atoms it touches, with the reason in words. At the end, united atoms are one neuron, and layers that
write the same neurons are one group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .channels import (
    NO_NEURON,
    NeuronGroup,
    NeuronGroups,
    as_arguments,
    attributes_restored,
    computed_by_hook,
    evaluating,
    shared_parameters,
)
from .errors import PruningError
from .layers import channel_dim, computed_tensors, kind_of


def find_groups(model: nn.Module, example_inputs) -> NeuronGroups:
    """Trace ``model`` on ``example_inputs`` (a tensor, or a tuple of arguments) and list its neuron groups."""
    if isinstance(model, torch.jit.ScriptModule):
        raise PruningError("a TorchScript module can't be pruned: prune the nn.Module it was made from")
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
            raise PruningError(
                f"{type(model).__name__} wraps the network: give the Pruner model.{attribute}, and wrap it anew after pruning"
            )
    with attributes_restored(model):
        return _traced_groups(model, example_inputs)


def _traced_groups(model: nn.Module, example_inputs) -> NeuronGroups:
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:
        raise PruningError(
            f"torch.fx can't trace {type(model).__name__} ({error}): pass the groups by hand, "
            'for example groups=[tnvp.NeuronGroup(producers=["fc1"], consumers=["fc2"])]'
        ) from error
    walk = _Walk(model, graph)
    with evaluating(model), torch.no_grad():
        try:
            walk.run(*as_arguments(example_inputs))
        except Exception as error:
            raise PruningError(
                f"{type(model).__name__} fails on example_inputs: {str(error).splitlines()[0]}"
            ) from error
    walk.block_bypassed_layers()
    return NeuronGroups(walk.groups())


Labels = dict[int, Tensor]  # dimension → atoms [size of that dimension]; dimensions without atoms are absent


class _Walk(fx.Interpreter):
    """Runs the graph on real inputs and carries each tensor's labels beside it."""

    def __init__(self, model: nn.Module, graph: fx.Graph):
        super().__init__(fx.GraphModule(model, graph))
        self.model = model
        self.modules = dict(model.named_modules())
        self.labels: dict[fx.Node, Labels] = {}
        self.parent: list[int] = []
        self.reasons: dict[int, str] = {}
        self.written: dict[str, Tensor] = {}
        self.carried: dict[str, Tensor] = {}
        self.read: dict[str, Tensor] = {}
        self.read_directly: list[str] = []  # parameters that the network's own code touches
        self.widths: dict[fx.Node, dict[int, list[Tensor]]] = {}  # number or size → the atoms it counts, by index

    # Atoms: a union-find, and the reasons why some can't be pruned.

    def new_atoms(self, size: int) -> Tensor:
        start = len(self.parent)
        self.parent.extend(range(start, start + size))
        return torch.arange(start, start + size)

    def root(self, atom: int) -> int:
        while self.parent[atom] != atom:
            self.parent[atom] = self.parent[self.parent[atom]]
            atom = self.parent[atom]
        return atom

    def unite(self, a: Tensor, b: Tensor) -> None:
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            x, y = sorted((self.root(x), self.root(y)))
            self.parent[y] = x

    def block(self, atoms: Iterable[Tensor], reason: str) -> None:
        for tensor in atoms:
            for atom in tensor.tolist():
                self.reasons.setdefault(atom, reason)

    # The walk.

    def run_node(self, node: fx.Node):
        result = super().run_node(node)
        rule = self._rule(node)
        self.labels[node] = rule(self, node, result) or {}
        if rule is not _size:
            self._follow_widths(node, rule, result)
        return result

    def _follow_widths(self, node: fx.Node, rule: Callable, result) -> None:
        """Numbers made from a width may become the sizes of a reshape; in any other computation they change its result."""
        counted = [
            atoms for source in node.all_input_nodes for part in self.widths.get(source, {}).values() for atoms in part
        ]
        if not counted or rule is _reshape:
            return
        if (isinstance(result, int | float) and not isinstance(result, bool)) or (
            isinstance(result, tuple) and all(isinstance(size, int) for size in result)
        ):
            self.widths[node] = {0: counted}
        else:
            self.block(counted, f"its width enters a computation ({node.name})")

    def _rule(self, node: fx.Node) -> Callable:
        if node.op == "call_module":
            module = self.modules[node.target]
            return _layer if kind_of(module) is not None else RULES.get(type(module), _unknown)
        if node.op in ("call_function", "call_method"):
            return RULES.get(node.target, _unknown)
        return {"output": _output, "get_attr": _attribute}.get(node.op, _nothing)

    def value(self, node: fx.Node):
        return self.env.get(node)

    def labelled(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self.labels.get(n)]

    def block_inputs(self, node: fx.Node, reason: str) -> None:
        for source in self.labelled(node):
            self.block(self.labels[source].values(), reason)

    # The result.

    def block_bypassed_layers(self) -> None:
        """Layers whose parameters are also used elsewhere than in the layer's own call."""
        for target in self.read_directly:
            self.block_layer(target.rpartition(".")[0], f"the network's code uses {target} itself")
        for name, module in self.modules.items():
            for tensor in computed_tensors(module):
                self.block_layer(name, computed_by_hook(name, tensor))
        for names in shared_parameters(self.model):
            for name in names:
                self.block_layer(name, f"shares a parameter with another layer ({', '.join(names)})")

    def block_layer(self, name: str, reason: str) -> None:
        self.block((t[name] for t in (self.written, self.carried, self.read) if name in t), reason)

    def groups(self) -> list[NeuronGroup]:
        reasons = {self.root(atom): why for atom, why in reversed(self.reasons.items())}
        tables = {"written": self.written, "carried": self.carried, "read": self.read}
        roots = {
            side: {name: [self.root(atom) for atom in atoms.tolist()] for name, atoms in table.items()}
            for side, table in tables.items()
        }
        families: list[tuple[list[str], dict[int, int]]] = []  # (producers, root → neuron)
        for layer, mine in roots["written"].items():
            kin = [family for family in families if any(r in family[1] for r in mine)]
            producers = [name for names, _ in kin for name in names] + [layer]
            order = dict.fromkeys(r for _, neurons in kin for r in neurons) | dict.fromkeys(mine)
            families = [f for f in families if f not in kin] + [(producers, {r: i for i, r in enumerate(order)})]
        return [self._group(producers, neurons, roots, reasons) for producers, neurons in families]

    def _group(self, producers, neurons: dict[int, int], roots, reasons) -> NeuronGroup:
        def touching(side: str) -> list[str]:
            return [name for name, mine in roots[side].items() if any(r in neurons for r in mine)]

        group = NeuronGroup(producers[0], producers, touching("carried"), touching("read"), len(neurons))
        for side, tables in (("out", ("written", "carried")), ("in", ("read",))):
            for table in tables:
                for name in touching(table):
                    positions = [neurons.get(r, NO_NEURON) for r in roots[table][name]]
                    group.maps[name, side] = torch.tensor(positions)
        why = next((reasons[r] for r in neurons if r in reasons), "")
        if not why and not group.consumers:
            why = "no layer reads it"
        group.prunable, group.reason = not why, why
        return group


# Rules: (walk, node, result) → labels of the result.


def _nothing(walk: _Walk, node: fx.Node, result) -> None:
    return None


def _unknown(walk: _Walk, node: fx.Node, result) -> None:
    target = type(walk.modules[node.target]).__name__ if node.op == "call_module" else node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    walk.block_inputs(node, f"goes through {name} ({node.name}), which is not understood")


def _output(walk: _Walk, node: fx.Node, result) -> None:
    walk.block_inputs(node, "is an output of the network")


def _attribute(walk: _Walk, node: fx.Node, result) -> None:
    walk.read_directly.append(node.target)


def _size(walk: _Walk, node: fx.Node, result) -> None:
    """``x.size()``, ``x.shape``, ``x.size(1)``, ``x.shape[1]``: which atoms the number counts."""
    source = node.all_input_nodes[0]
    if isinstance(result, Tensor):
        return _unknown(walk, node, result)
    counted = {dim: [atoms] for dim, atoms in walk.labels[source].items()} or walk.widths.get(source, {})
    asked = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if isinstance(result, torch.Size) and not isinstance(asked, slice):
        walk.widths[node] = counted
    elif isinstance(asked, int) and isinstance(walk.value(source), Tensor | torch.Size):
        dims = walk.value(source).dim() if isinstance(walk.value(source), Tensor) else len(walk.value(source))
        walk.widths[node] = {0: counted.get(asked % dims, [])}
    elif counted:
        walk.widths[node] = {0: [atoms for part in counted.values() for atoms in part]}
    return None


def _attribute_of(walk: _Walk, node: fx.Node, result) -> None:
    return _size(walk, node, result) if node.args[1] == "shape" else _number(walk, node, result)


def _number(walk: _Walk, node: fx.Node, result) -> None:
    """Something about a tensor that pruning doesn't change: its rank, dtype or device."""
    return _unknown(walk, node, result) if isinstance(result, Tensor) else None


def _getitem(walk: _Walk, node: fx.Node, result) -> None:
    return _unknown(walk, node, result) if isinstance(walk.value(node.args[0]), Tensor) else _size(walk, node, result)


def _layer(walk: _Walk, node: fx.Node, result: Tensor) -> Labels:
    name, kind = node.target, kind_of(walk.modules[node.target])
    source = node.all_input_nodes[0]
    labels = dict(walk.labels[source])
    channel = channel_dim(walk.modules[name], result)
    seen = walk.carried if kind.is_passenger else walk.written
    if name in seen:
        reason = f"goes through {name}, which is called more than once"
        walk.block([*labels.values(), seen[name]], reason)
        walk.block_layer(name, reason)
        return {}
    atoms = labels.pop(channel, None)
    if channel != result.dim() - 1:
        walk.block(labels.values(), f"lies along the space that {name} works over")
        labels = {}
    if kind.is_passenger:
        if atoms is None:
            return labels
        walk.carried[name] = atoms
        return labels | {channel: atoms}
    if atoms is not None:
        walk.read[name] = atoms
    walk.written[name] = walk.new_atoms(result.shape[channel])
    return labels | {channel: walk.written[name]}


def _elementwise(walk: _Walk, node: fx.Node, result) -> Labels | None:
    if not isinstance(result, Tensor):
        return _unknown(walk, node, result)
    labels: Labels = {}
    for source in node.all_input_nodes:
        value = walk.value(source)
        if not isinstance(value, Tensor):
            continue
        for dim, size in enumerate(value.shape, start=result.dim() - value.dim()):
            atoms = walk.labels[source].get(dim - result.dim() + value.dim())
            if atoms is not None and size != result.shape[dim]:
                walk.block([atoms], f"is broadcast in {node.name}")
            elif atoms is not None and dim in labels:
                walk.unite(labels[dim], atoms)
            elif atoms is not None:
                labels[dim] = atoms
    for source in node.all_input_nodes:
        value = walk.value(source)
        for dim, atoms in labels.items():
            own = dim - result.dim() + value.dim() if isinstance(value, Tensor) else -1
            if own >= 0 and own not in walk.labels[source] and value.shape[own] == len(atoms):
                walk.block([atoms], f"meets a tensor of fixed size in {node.name}")
    return labels


def _pool(walk: _Walk, node: fx.Node, result) -> Labels | None:
    source = node.all_input_nodes[0]
    if not isinstance(result, Tensor):
        return _unknown(walk, node, result)
    what = type(walk.modules[node.target]).__name__ if node.op == "call_module" else node.target.__name__
    first = result.dim() - int(what[-2])
    space = [d for d in walk.labels[source] if d >= first]
    walk.block((walk.labels[source][d] for d in space), f"lies along the space that {node.name} pools over")
    return {d: a for d, a in walk.labels[source].items() if d < first}


def _flatten(walk: _Walk, node: fx.Node, result: Tensor) -> Labels:
    if node.op == "call_module":
        start, end = walk.modules[node.target].start_dim, walk.modules[node.target].end_dim
    else:
        arguments = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)) | node.kwargs
        start, end = arguments.get("start_dim", 0), arguments.get("end_dim", -1)
    return _merge_dimensions(walk, node, start, end)


def _merge_dimensions(walk: _Walk, node: fx.Node, start: int, end: int) -> Labels:
    source = node.all_input_nodes[0]
    shape, labels = walk.value(source).shape, walk.labels[source]
    start, end = start % len(shape), end % len(shape)
    inside = [d for d in labels if start <= d <= end]
    moved = {d if d < start else d - (end - start): a for d, a in labels.items() if not start <= d <= end}
    if len(inside) > 1:
        walk.block((labels[d] for d in inside), f"is flattened together with other neurons in {node.name}")
    elif inside:
        column = labels[inside[0]].reshape([-1 if d == inside[0] else 1 for d in range(start, end + 1)])
        moved[start] = column.expand(shape[start : end + 1]).reshape(-1)
    return moved


def _reshape(walk: _Walk, node: fx.Node, result: Tensor) -> Labels | None:
    """A reshape that keeps every size, or flattens the trailing dimensions, if no neuron's size is hard-coded."""
    source = node.args[0]
    labels, old, new = walk.labels[source], walk.value(source).shape, result.shape
    given = node.args[1:] or (node.kwargs.get("shape", node.kwargs.get("size")),)
    sizes = given if isinstance(given[0], int | fx.Node) else tuple(given[0])
    if not labels:
        return None
    if new == old:
        moved = dict(labels)
    elif new[:-1] == old[: len(new) - 1]:
        moved = _merge_dimensions(walk, node, len(new) - 1, -1)
    else:
        return _unknown(walk, node, result)
    for dim, atoms in moved.items():
        size = sizes[dim] if dim < len(sizes) else -1
        if isinstance(size, fx.Node) and not any(walk.widths.get(size, {}).values()):
            size = walk.value(size)
        if isinstance(size, int) and size != -1:
            walk.block([atoms], f"the size {size} is hard-coded in {node.name}: write -1 or x.size(…) instead")
    return moved


ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    F.softplus, F.softsign, F.tanh, F.sigmoid, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.abs, torch.neg, torch.square, torch.sqrt, torch.clamp,
    torch.add, torch.sub, torch.mul, torch.div, operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
    operator.iadd, operator.isub, operator.imul, operator.pow,
    "relu", "relu_", "tanh", "sigmoid", "exp", "abs", "neg", "square", "sqrt", "clamp", "pow", "add", "add_", "sub", "mul",
    "mul_", "div", "contiguous", "clone", "detach", "to", "float", "half", "double",
)  # fmt: skip
POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d,
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool2d,
)  # fmt: skip
RULES: dict[object, Callable] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(POOLS, _pool),
    nn.Flatten: _flatten,
    torch.flatten: _flatten,
    "flatten": _flatten,
    "view": _reshape,
    "reshape": _reshape,
    torch.reshape: _reshape,
    "size": _size,
    "dim": _number,
    getattr: _attribute_of,
    operator.getitem: _getitem,
}
