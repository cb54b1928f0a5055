"""What once slipped through: networks that the walk misread or the trial could not tell apart, and events that broke half-way.

Never a silently wrong network, never a crash in the next forward; on an error everything is as before.
"""

import copy
import io
from enum import Enum

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tnvp
from tnvp.pruning.cost import flop_count

from .networks import mlp

X = torch.randn(16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """a, something in between, b; in float64."""

    def __init__(self, between, width: int = 10, **layers: nn.Module):
        super().__init__()
        self.a, self.b, self.between = nn.Linear(12, width), nn.Linear(width, 3), between
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.double()

    def forward(self, x):
        return self.b(self.between(self, F.relu(self.a(x))))


class Stacked(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.a, self.c, self.b, self.dim = nn.Linear(12, 3), nn.Linear(12, 3), nn.Linear(6, 3), dim
        self.double()

    def forward(self, x):
        return self.b(torch.stack([F.relu(self.a(x)), F.relu(self.c(x))], self.dim).flatten(1))


def by_name(model: nn.Module, x=X) -> dict[str, tnvp.NeuronGroup]:
    return {group.name: group for group in tnvp.explain(model, x)}


def pruned(model: nn.Module, sparsity: float = 0.5, x=X, **options) -> tnvp.PruneReport:
    chosen = {"example_inputs": x, "criterion": "l1", "compensation": "none"} | options
    return tnvp.Pruner(model, **chosen).prune(sparsity=sparsity)


def as_masked(before: nn.Module, after: nn.Module, report, consumer: str, x=X) -> bool:
    removed = torch.tensor(next(g.removed_in[consumer] for g in report.groups if consumer in g.consumers))
    before.get_submodule(consumer).register_forward_pre_hook(lambda m, a: (a[0].index_fill(-1, removed, 0),))
    return torch.allclose(before(x), after(x), rtol=1e-10, atol=1e-10)


# ==== Misread or hidden ====


@pytest.mark.parametrize("width", [3, 10])
def test_neurons_that_are_rolled_stay(width):
    group = by_name(Two(lambda m, h: torch.roll(h, 1, 1), width))["a"]
    assert not group.prunable and "roll" in group.reason
    assert by_name(Two(lambda m, h: torch.roll(h, 1, 0), width))["a"].prunable, "samples may be rolled"


@pytest.mark.parametrize("dim", [1, -1])
def test_what_is_stacked_goes_together(dim):
    model = Stacked(dim)
    before = copy.deepcopy(model)
    report = pruned(model, 1 / 3)
    (group,) = report.groups
    assert group.producers == ["a", "c"] and model.a.out_features == model.c.out_features == 2
    assert as_masked(before, model, report, "b")


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_a_head_that_starts_at_nothing_hides_nothing(scale):
    model = Two(lambda m, h: h * m.a.out_features**-0.5)
    model.b.weight.data.mul_(scale)
    model.b.bias.data.zero_()
    assert "may depend on the width" in by_name(model)["a"].reason


def test_a_branch_of_training_is_tried_too():
    model = Two(lambda m, h: h - h.mean(1, keepdim=True) if m.training else h).eval()
    group = by_name(model)["a"]
    assert not group.prunable and "in training mode" in group.reason and not model.training


def test_a_width_at_which_the_code_does_something_else_is_met_at_the_event():
    model = Two(lambda m, h: h + X if m.a.out_features == 12 else h, width=24)
    before = copy.deepcopy(model.state_dict())
    assert by_name(model)["a"].prunable
    with pytest.raises(tnvp.PruningError, match=r"this cut can't be made.*\n.*may depend on the width"):
        pruned(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert pruned(model, 0.4).groups[0].kept


def test_a_network_that_gives_nan_proves_nothing():
    model = Two(lambda m, h: h * float("nan"))
    assert "gives NaN" in by_name(model)["a"].reason


def test_eval_mode_that_answers_in_classes_is_not_the_only_witness():
    class Classes(Two):
        def forward(self, x):
            y = super().forward(x)
            return y if self.training else y.argmax(1)

    model = Classes(lambda m, h: h * m.a.out_features**-0.5)
    model.b.bias.data = torch.tensor([9.0, 0, 0], dtype=torch.float64)
    assert not by_name(model)["a"].prunable


def test_neurons_that_an_embedding_looks_up_stay():
    def between(m, h):
        return h + m.e((h > 0).to(torch.long)).sum((1, 2))[:, None]

    group = by_name(Two(between, e=nn.Embedding(2, 6)))["a"]
    assert not group.prunable and "read by e otherwise" in group.reason


def test_only_those_that_fail_together_are_left_alone():
    """The code minds only if both a and c are narrower; d has nothing to do with it."""

    class Bound(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c, self.d = nn.Linear(12, 6), nn.Linear(12, 6), nn.Linear(12, 6)
            self.b, self.e, self.f = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
            self.double()

        def forward(self, x):
            extra = 2.0 if self.a.out_features < 6 and self.c.out_features < 6 else 1.0
            return extra * (self.b(self.a(x)) + self.e(self.c(x))) + self.f(self.d(x))

    groups = by_name(Bound())
    assert groups["d"].prunable
    assert all("together" in groups[name].reason for name in "ac")


def test_weights_over_one_memory_are_tied():
    model = Two(lambda m, h: h * m.c(X), c=nn.Linear(12, 10))
    assert by_name(model)["a"].prunable
    model.c.weight.data = model.a.weight.data
    assert "shares a parameter" in by_name(model)["a"].reason


# ==== Networks as people write them ====


def test_optional_arguments_buffers_in_slices_and_loops_over_chunks_are_traced():
    class Usual(Two):
        def __init__(self):
            super().__init__(None)
            self.register_buffer("table", torch.randn(20, 1, dtype=torch.float64))

        def forward(self, x, mask=None, flag: bool = False):
            h = F.relu(self.a(x))
            h = h * mask if mask is not None else h
            h = -h if flag else h
            h = h + self.table[: x.shape[0]]
            return self.b(torch.cat([part.tanh() for part in h.chunk(2, 1)], 1))

    model = Usual()
    before = copy.deepcopy(model)
    report = pruned(model, 0.4)
    assert model.a.out_features == 6 and as_masked(before, model, report, "b")


def test_finding_groups_leaves_buffers_and_random_numbers_alone():
    class Counts(Two):
        def __init__(self):
            super().__init__(lambda m, h: F.dropout(h, 0.5, m.training))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return super().forward(x)

    model = Counts()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    tnvp.explain(model, X)
    assert model.calls == 0 and torch.equal(torch.rand(3), expected)


class Kind(Enum):
    ONE = 1


@pytest.mark.parametrize("extra", ["enum", "itself"])
def test_outputs_may_hold_anything(extra):
    class Odd(Two):
        def forward(self, x):
            found = {"y": super().forward(x), "kind": Kind.ONE}
            return found | ({"itself": found} if extra == "itself" else {})

    model = Odd(lambda m, h: h)
    groups = [tnvp.NeuronGroup(producers=["a"], consumers=["b"])]
    assert tnvp.Pruner(model, groups=groups, example_inputs=X, criterion="l1").prune(sparsity=0.5, calibration=[X])


def test_packed_sequences_are_recorded_and_cut():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.r = nn.Linear(12, 8), nn.GRU(8, 5, batch_first=True)
            self.double()

        def forward(self, x):
            lengths = torch.tensor([5, 4, 3, 2])
            return self.r(nn.utils.rnn.pack_padded_sequence(self.e(x), lengths, batch_first=True))[1]

    model, x = Packed(), torch.randn(4, 5, 12, dtype=torch.float64)
    groups = [tnvp.NeuronGroup(producers=["e"], consumers=["r"])]
    pruner = tnvp.Pruner(model, groups=groups, example_inputs=x)
    with pruner.record():
        model(x)
    report = pruner.prune(sparsity=0.5, calibration=[x])
    assert model.r.input_size == 4 and report.certificate.border_part < 1e-12


def test_the_flops_of_recurrent_layers_are_their_weights():
    model = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
    weights = sum(p.numel() for name, p in model.named_parameters() if "weight" in name)
    assert flop_count(model, (torch.randn(7, 3, 6),)) == 2 * 7 * 3 * weights


# ==== All or nothing ====


def undisturbed(model: nn.Module, optimizer: torch.optim.Optimizer, before: list, state: dict) -> bool:
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    same = all(a is b for a, b in zip(model.parameters(), before, strict=True)) and held == list(map(id, before))
    return same and all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "fault", ["averaged is the model", "one optimizer twice", "two with the same parameters", "a warning"]
)
def test_an_error_leaves_everything_as_it_was(fault, recwarn):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    model[0].bias.data += 3
    x = torch.randn(2, 3, 6, 6)
    optimizer = torch.optim.Adam(model.parameters())
    before, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    other = torch.optim.SGD(model.parameters(), 0.1)
    options = {
        "averaged is the model": {"averaged": [model]},
        "one optimizer twice": {"optimizer": [optimizer, optimizer]},
        "two with the same parameters": {"optimizer": [optimizer, other]},
    }.get(fault, {})

    def event():
        chosen = {"optimizer": optimizer, "example_inputs": x, "criterion": "l1"} | options
        tnvp.Pruner(model, **chosen).prune(sparsity=0.5, calibration=[x])

    if fault == "a warning":
        import warnings

        with warnings.catch_warnings(), pytest.raises(UserWarning, match="can't take a constant"):
            warnings.simplefilter("error")
            event()
    else:
        with pytest.raises(tnvp.PruningError):
            event()
    assert undisturbed(model, optimizer, before, state)


def test_optimizers_from_a_generator_are_followed():
    model = mlp(widths=(12, 10, 8, 3)).double()
    optimizer = torch.optim.Adam(model.parameters())
    pruned(model, optimizer=(o for o in [optimizer]))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_batches_may_answer_with_different_numbers_of_tensors():
    class Some(Two):
        def forward(self, x):
            y = super().forward(x)
            return [y, y.sum()] if len(x) > 10 else [y]

    model = Some(lambda m, h: h)
    pruner = tnvp.Pruner(
        model, groups=[tnvp.NeuronGroup(producers=["a"], consumers=["b"])], example_inputs=X, criterion="l1"
    )
    assert pruner.prune(sparsity=0.5, calibration=[X, X[:5]]).certificate.measured > 0


def test_a_batch_of_nan_does_not_spoil_batch_norms():
    model = mlp(widths=(12, 10, 3), norm=True).double()
    state = copy.deepcopy(model.state_dict())
    pruner = tnvp.Pruner(model, example_inputs=X, criterion="l1", compensation="none")
    with pytest.raises(tnvp.PruningError, match="NaN or Inf"):
        pruner.prune(sparsity=0.5, bn_recalibrate=[X, X * float("nan")])
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_network_that_changed_since_needs_a_new_pruner():
    model = mlp(widths=(12, 10, 8, 3)).double()
    first, second = (tnvp.Pruner(model, example_inputs=X, criterion="l1", compensation="none") for _ in range(2))
    second.prune(sparsity=0.5)
    with pytest.raises(tnvp.PruningError, match="Make a new Pruner"):
        first.prune(sparsity=0.5)
    model = mlp(widths=(12, 10, 8, 3)).double()
    pruner = tnvp.Pruner(model, example_inputs=X, criterion="l1", compensation="none")
    model[3] = nn.Softmax(1)
    with pytest.raises(tnvp.PruningError, match="this cut can't be made"):
        pruner.prune(sparsity=0.5)


# ==== Masks ====


@pytest.mark.parametrize("how", ["an older state", "unfrozen"])
def test_rebuild_cuts_only_what_is_still_zero(how):
    model = mlp(widths=(12, 10, 8, 3), activation=nn.Sigmoid).double()
    older = copy.deepcopy(model.state_dict())
    model[2].weight.requires_grad_(how != "unfrozen")
    pruner = tnvp.Pruner(model, example_inputs=X, criterion="l1", compensation="none", mode="mask")
    pruner.prune(sparsity=0.5)
    if how == "unfrozen":
        model[2].weight.requires_grad_(True)
        model(X).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    else:
        model.load_state_dict(older)
    with pytest.raises(tnvp.PruningError, match="reads masked neurons again"):
        pruner.rebuild()
    pruner.prune(sparsity=0.5)
    before = model(X)
    pruner.rebuild()
    torch.testing.assert_close(model(X), before)


def test_saving_a_mask_says_that_it_is_one(tmp_path):
    model = mlp(widths=(12, 10, 8, 3)).double()
    pruner = tnvp.Pruner(model, example_inputs=X, criterion="l1", compensation="none", mode="mask")
    pruner.prune(sparsity=0.5)
    with pytest.warns(UserWarning, match=r"rebuild\(\) before saving"):
        tnvp.save(model, tmp_path / "masked.pt")
    pruner.rebuild()
    tnvp.save(model, tmp_path / "rebuilt.pt")


# ==== Groups by hand ====


@pytest.mark.parametrize("known", [True, False])
def test_by_hand_whole_groups_of_a_norm_go(known):
    model = Two(lambda m, h: m.n(h), width=8, n=nn.GroupNorm(4, 8))
    before = copy.deepcopy(model)
    groups = [tnvp.NeuronGroup(producers=["a"], passengers=["n"], consumers=["b"])]
    report = pruned(model, 0.25, groups=groups, example_inputs=X if known else None)
    assert (model.n.num_groups, model.n.num_channels) == (3, 6) and as_masked(before, model, report, "b")


def test_by_hand_what_was_recorded_proves_the_cut():
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    pruner = tnvp.Pruner(model, groups=[tnvp.NeuronGroup(producers=["0"], consumers=["2"])])
    with pruner.record():
        model(X)
    with pytest.raises(tnvp.PruningError, match="fails without it"):
        pruner.prune(sparsity=0.5)
    assert model[0].out_features == 8


def test_by_hand_mixers_are_approximate_too():
    model = Two(lambda m, h: m.n(h), n=nn.LayerNorm(10))
    groups = [tnvp.NeuronGroup(producers=["a"], passengers=["n"], consumers=["b"])]
    with pytest.raises(tnvp.PruningError, match="approximate=True"):
        pruned(model, groups=groups)
    assert pruned(model, groups=groups, approximate=True).neuron_sparsity == 0.5


# ==== Files ====


def test_tied_weights_stay_tied_in_a_class_of_another_type(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.a = nn.Embedding(11, 8), nn.Linear(8, 10)
            self.b, self.o = nn.Linear(10, 8), nn.Linear(8, 11, bias=False)
            self.o.weight = self.e.weight

        def forward(self, i):
            return self.o(self.b(F.relu(self.a(self.e(i)))))

    model = Tied().double()
    pruned(model, x=torch.randint(0, 11, (3, 6)))
    tnvp.save(model, tmp_path / "tied.pt")
    loaded = tnvp.load(tmp_path / "tied.pt", into=Tied())
    assert loaded.o.weight is loaded.e.weight and loaded.a.out_features == 5


def test_extra_state_is_saved_and_averaged_copies_may_have_it(tmp_path):
    class Extra(Two):
        version = 1

        def get_extra_state(self):
            return {"version": self.version}

        def set_extra_state(self, state):
            self.version = state["version"]

    model = Extra(lambda m, h: h)
    model.version = 7
    averaged = copy.deepcopy(model)
    pruned(model, averaged=averaged)
    assert averaged.a.out_features == 5
    tnvp.save(model, tmp_path / "extra.pt")
    assert tnvp.load(tmp_path / "extra.pt", into=Extra(lambda m, h: h)).version == 7


# ==== Messages ====

BAD = {
    "criterion": ["l1"], "compensation": {}, "mode": ["mask"], "coupled": 3, "optimizer": "adam", "averaged": [3],
    "ignore": 3, "seed": "a", "groups": "abc",
}  # fmt: skip
BAD_PRUNE = {
    "normalize": [], "mode": [], "scope": [], "calibration": 3, "bn_recalibrate": {"x": X},
}  # fmt: skip
CALIBRATION = [
    "abc", [None], [{"x": X}], {"x": X}, [X[:, :5]], [X.float()], [X.numpy()], [()], [],
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_a_pruner_are_named(name):
    model = mlp(widths=(12, 10, 8, 3)).double()
    chosen = {"example_inputs": X, "criterion": "l1", "compensation": "none"} | {name: BAD[name]}
    with pytest.raises(tnvp.PruningError, match=name):
        tnvp.Pruner(model, **chosen).prune(sparsity=0.5)


@pytest.mark.parametrize("name", BAD_PRUNE)
def test_bad_arguments_of_an_event_are_named(name):
    pruner = tnvp.Pruner(mlp(widths=(12, 10, 8, 3)).double(), example_inputs=X, criterion="l1")
    with pytest.raises(tnvp.PruningError, match=name):
        pruner.prune(sparsity=0.5, **{name: BAD_PRUNE[name]})


@pytest.mark.parametrize("batches", CALIBRATION, ids=lambda b: type(b).__name__)
def test_bad_calibration_is_told_of(batches):
    pruner = tnvp.Pruner(mlp(widths=(12, 10, 8, 3)).double(), example_inputs=X, criterion="l1")
    with pytest.raises(tnvp.PruningError, match="calibration"):
        pruner.prune(sparsity=0.5, calibration=batches)


def test_a_pruner_and_its_network_can_be_pickled_while_nothing_is_recorded():
    model = mlp(widths=(12, 10, 8, 3)).double()
    pruner = tnvp.Pruner(model, example_inputs=X, criterion="l1", compensation="none")
    again = torch.load(io.BytesIO(_bytes(pruner)), weights_only=False)
    assert again.prune(sparsity=0.5).neuron_sparsity == pruner.prune(sparsity=0.5).neuron_sparsity


def _bytes(thing) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()
