"""From a traced network to its neuron groups.

Every neuron that a layer writes gets an atom. Walking the graph once on real inputs, each tensor carries fields of atoms beside
it (`atoms`), and `rules` tells what each operation does to them. What the walk does not understand blocks the atoms it touches,
with the reason in words. At the end, united atoms are one neuron, and layers that write the same neurons are one group.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, fx, nn

from .atoms import NO_NEURON, Atoms, varying
from .attention import Attention
from .channels import (
    NeuronGroup,
    NeuronGroups,
    as_arguments,
    computed_by_hook,
    copy_of,
    evaluating,
    shared_parameters,
)
from .errors import PruningError
from .layers import computed_tensors, kind_of
from .rules import follow_widths, rule_of
from .rules.base import Fields, fields_in


def find_groups(model: nn.Module, example_inputs, approximate: bool = False) -> NeuronGroups:
    """Trace ``model`` on ``example_inputs`` (a tensor, or a tuple of arguments) and list its neuron groups.

    ``approximate``: groups behind a mixer, such as LayerNorm, count as prunable too.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise PruningError("a TorchScript module can't be pruned: prune the nn.Module it was made from")
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
            raise PruningError(
                f"{type(model).__name__} wraps the network: give the Pruner model.{attribute}, and wrap it anew after pruning"
            )
    with torch.random.fork_rng(devices=[]):
        walk = _traced(copy_of(model), example_inputs, approximate)
    walk.block_bypassed_layers(model)
    return NeuronGroups(walk.groups())


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else a buffer can't be sliced by sizes

    def iter(self, obj: fx.Proxy):
        """``for part in x.chunk(n)``: the number of parts is known."""
        node = obj.node
        count = node.args[1] if len(node.args) > 1 else node.kwargs.get("chunks")
        if node.target in ("chunk", torch.chunk) and isinstance(count, int):
            return iter([obj[i] for i in range(count)])
        return super().iter(obj)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, Attention) or super().is_leaf_module(module, name)


def _traced(model: nn.Module, example_inputs, approximate: bool) -> Walk:
    try:
        graph = _Tracer().trace(model, _left_out(model, as_arguments(example_inputs)))
    except Exception as error:
        raise PruningError(
            f"torch.fx can't trace {type(model).__name__} ({error}): pass the groups by hand, "
            'for example groups=[tnvp.NeuronGroup(producers=["fc1"], consumers=["fc2"])]'
        ) from error
    walk = Walk(model, graph, approximate)
    with evaluating(model), torch.no_grad():
        try:
            walk.run(*as_arguments(example_inputs))
        except Exception as error:
            raise PruningError(
                f"{type(model).__name__} fails on example_inputs: {(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error
    return walk


def _left_out(model: nn.Module, arguments: tuple) -> dict[str, object]:
    """Optional arguments of the forward pass that ``arguments`` leave out, with their defaults."""
    parameters = list(inspect.signature(model.forward).parameters.values())[len(arguments) :]
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.kind is not p.VAR_KEYWORD}


class Walk(fx.Interpreter):
    """Runs the graph on real inputs and carries each tensor's fields beside it."""

    def __init__(self, model: nn.Module, graph: fx.Graph, approximate: bool):
        super().__init__(fx.GraphModule(model, graph))
        self.model, self.approximate = model, approximate
        self.layers = dict(model.named_modules())
        self.atoms = Atoms()
        self.fields: dict[fx.Node, Fields] = {}
        self.written: dict[str, Tensor] = {}  # layer → the atom at each position of its own dimension
        self.carried: dict[str, Tensor] = {}
        self.read: dict[str, Tensor] = {}
        self.read_directly: list[str] = []  # parameters that the network's own code touches
        self.widths: dict[fx.Node, dict[int, list[Tensor]]] = {}  # number or size → the fields it counts, by index

    def run_node(self, node: fx.Node):
        result = super().run_node(node)
        rule = rule_of(self, node)
        found = rule(self, node, result)
        self.fields[node] = [] if found is None else found
        self._separate(node)
        follow_widths(self, node, rule, result)
        return result

    def _separate(self, node: fx.Node) -> None:
        """Fields of one tensor must vary along different dimensions, or a position belongs to several neurons."""
        fields = self.fields[node]
        if isinstance(fields, list) and len(fields) > 1:
            taken = [varying(field) for field in fields]
            if sum(map(len, taken)) > len(set().union(*taken)):
                self.atoms.block(fields, f"is mixed with other neurons in {node.name}")
                self.fields[node] = []

    def value(self, node):
        return self.env.get(node) if isinstance(node, fx.Node) else node

    def block_inputs(self, node: fx.Node, reason: str) -> None:
        for source in node.all_input_nodes:
            self.atoms.block(fields_in(self.fields.get(source, [])), reason)

    # What layers do to atoms.

    def write(self, name: str, size: int) -> Tensor:
        """The atoms [size] that a layer writes: the same ones at each of its calls."""
        if name not in self.written:
            self.written[name] = self.atoms.new(size)
        return self.written[name]

    def pass_through(self, table: dict[str, Tensor], name: str, positions: Tensor) -> Tensor:
        """Note the atoms [P] at the positions of a layer that reads or carries them; a second call unites both calls' atoms."""
        if name in table:
            reason = f"{name} is called more than once, and not always on neurons"
            positions = self.atoms.unite(table[name], positions, reason)
        table[name] = positions
        return positions

    # The result.

    def block_bypassed_layers(self, model: nn.Module) -> None:
        """Layers of ``model``, whose copy was walked, with parameters used elsewhere than in the layer's own call."""
        for target in self.read_directly:
            self.block_layer(target.rpartition(".")[0], f"the network's code uses {target} itself")
        for name, module in model.named_modules():
            for tensor in computed_tensors(module):
                self.block_layer(name, computed_by_hook(name, tensor))
        for names in shared_parameters(model):
            for name in names:
                self.block_layer(name, f"shares a parameter with another layer ({', '.join(names)})")

    def block_layer(self, name: str, reason: str) -> None:
        self.atoms.block((t[name] for t in (self.written, self.carried, self.read) if name in t), reason)

    def groups(self) -> list[NeuronGroup]:
        root = self.atoms.root
        reasons = {root(atom): why for atom, why in reversed(self.atoms.reasons.items())}
        roots = {
            side: {name: self.atoms.roots(atoms).tolist() for name, atoms in table.items()}
            for side, table in {"written": self.written, "carried": self.carried, "read": self.read}.items()
        }
        families: list[tuple[list[str], dict[int, int]]] = []  # (producers, root → neuron)
        for layer, mine in roots["written"].items():
            kin = [family for family in families if not family[1].keys().isdisjoint(mine)]
            producers = [name for names, _ in kin for name in names] + [layer]
            order = dict.fromkeys(r for _, neurons in kin for r in neurons) | dict.fromkeys(mine)
            families = [f for f in families if f not in kin] + [(producers, {r: i for i, r in enumerate(order)})]
        rank = {name: i for i, name in enumerate(self.written)}
        families.sort(key=lambda family: min(rank[name] for name in family[0]))
        return [self._group(producers, neurons, roots, reasons) for producers, neurons in families]

    def _group(self, producers, neurons: dict[int, int], roots, reasons) -> NeuronGroup:
        def touching(side: str) -> list[str]:
            return [name for name, mine in roots[side].items() if not neurons.keys().isdisjoint(mine)]

        group = NeuronGroup(producers[0], producers, touching("carried"), touching("read"), len(neurons))
        for side, tables in (("out", ("written", "carried")), ("in", ("read",))):
            for table in tables:
                for name in touching(table):
                    positions = [neurons.get(r, NO_NEURON) for r in roots[table][name]]
                    group.maps[name, side] = torch.tensor(positions)
        group.mixers = [name for name in group.passengers if kind_of(self.layers[name]).is_mixer]
        group.reason = self._reason(group, neurons, reasons)
        group.prunable = not group.reason
        return group

    def _reason(self, group: NeuronGroup, neurons: dict[int, int], reasons: dict[int, str]) -> str:
        if why := next((reasons[r] for r in neurons if r in reasons), ""):
            return why
        if group.size == 1:
            return (
                "all its neurons are tied to each other"
                if len(group.maps[group.name, "out"]) > 1
                else "has one neuron only"
            )
        if not group.consumers:
            return "no layer reads it"
        return ""
