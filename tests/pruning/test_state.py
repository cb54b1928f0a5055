"""A pruner's state takes a fresh network, its optimizer and its averaged copies to where the old ones were, bit for bit."""

import copy
import io
import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tnvp
from tnvp.models import build
from tnvp.pruning.errors import PruningError

from .networks import convnet, mlp

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}
NETWORKS = {
    "mlp": (lambda: mlp(dropout=0.2, norm=True), (7,)),
    "without biases": (lambda: mlp(bias=False), (7,)),
    "convolutions": (convnet, (3, 16, 16)),
    "attention": (
        lambda: build("vit_tiny", shape=(3, 8, 8), classes=4, patch_size=4, dim=8, depth=2, heads=2, mlp_ratio=2, dropout=0.0),
        (3, 8, 8),
    ),
}  # fmt: skip
INPUT = torch.zeros(2, 7, dtype=torch.float64)


class Loop:
    """Someone's own training loop: two parameter groups, a schedule, an averaged copy, one event every four steps."""

    def __init__(self, network: str, optimizer: str, **options):
        torch.manual_seed(0)
        build_network, self.shape = NETWORKS[network]
        self.model = build_network()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices}] + [{"params": others, "weight_decay": 0.0}] * bool(others)
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        options = {"approximate": network == "attention", "compensation": "mean", **options}
        self.pruner = tnvp.Pruner(
            self.model,
            optimizer=self.optimizer,
            averaged=[self.ema],
            example_inputs=self.batch(0),
            **options,
        )
        self.scheduler = self.schedule()

    def schedule(self):
        return torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(6, *self.shape, generator=torch.Generator().manual_seed(number))

    def train(self, steps: range, modes: dict[int, str]) -> None:
        self.model.train()
        with self.pruner.record():
            for step in steps:
                self.optimizer.zero_grad()
                self.model(self.batch(step)).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                self.ema.update_parameters(self.model)
                self.pruner.close_window(step)
                if step in modes:
                    self.pruner.prune(sparsity=step / 24, mode=modes[step])

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        parts = {"random": torch.get_rng_state(), "pruner": self.pruner.state()}
        for name in ("model", "ema", "scheduler", "optimizer"):
            parts[name] = getattr(self, name).state_dict()
        torch.save(parts, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        parts = torch.load(file, weights_only=True)
        self.pruner.restore(parts["pruner"])
        self.scheduler = self.schedule()
        for name in ("model", "ema", "scheduler", "optimizer"):
            getattr(self, name).load_state_dict(parts[name])
        torch.set_rng_state(parts["random"])


def assert_equal(one, other) -> None:
    """Two nests of plain data and tensors agree, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


CASES = [
    ("mlp", "sgd", {4: "rebuild", 8: "rebuild", 12: "rebuild"}, {"window": "ema"}),
    ("mlp", "adam", {4: "mask", 8: "mask", 12: "rebuild"}, {"criterion": "random"}),
    ("without biases", "adamw", {4: "rebuild", 8: "mask", 12: "mask"}, {"criterion": "taylor"}),
    ("without biases", "adagrad", {4: "mask", 8: "rebuild", 12: "mask"}, {"window": "since_prune"}),
    ("convolutions", "adamw", {4: "rebuild", 8: "mask", 12: "rebuild"}, {"criterion": "obs", "compensation": "affine"}),
    ("attention", "adam", {4: "rebuild", 8: "rebuild"}, {"criterion": "apoz"}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("network", "optimizer", "modes", "options"), CASES)
def test_a_loop_goes_on_bit_for_bit_wherever_it_was_stopped(network, optimizer, modes, options):
    whole = Loop(network, optimizer, **options)
    whole.train(range(15), modes)
    end = torch.load(whole.save(), weights_only=True)
    for stop in (3, 5, 9, 14):
        before, after = Loop(network, optimizer, **options), Loop(network, optimizer, **options)
        before.train(range(stop), modes)
        after.load(before.save())
        after.train(range(stop, 15), modes)
        assert_equal(torch.load(after.save(), weights_only=True), end)
        assert after.pruner.reductions() == whole.pruner.reductions()


def prunable(model=None, **options) -> tnvp.Pruner:
    """A pruner of the network [7, 11, 9, 4] in double precision: prunable groups of 11 and 9 neurons."""
    torch.manual_seed(0)
    return tnvp.Pruner(model or mlp().double(), example_inputs=INPUT, **options)


def watch(pruner: tnvp.Pruner, seeds: range, scale: float = 1.0) -> None:
    with pruner.record():
        for seed in seeds:
            pruner.model(scale * torch.randn(6, 7, generator=torch.Generator().manual_seed(seed)).double())


def pruned(**options) -> tnvp.Pruner:
    """One that cut, masked, closed a window and recorded on."""
    pruner = prunable(**options)
    watch(pruner, range(3))
    pruner.close_window(3)
    pruner.prune(sparsity=0.3)
    pruner.prune(sparsity=0.5, mode="mask")
    watch(pruner, range(3, 5))
    return pruner


def assert_refused(pruner: tnvp.Pruner, state, match: str) -> None:
    """By one PruningError; the network and its pruner are as before."""
    weights, before = copy.deepcopy(pruner.model.state_dict()), copy.deepcopy(pruner.state())
    with pytest.raises(PruningError, match=match):
        pruner.restore(state)
    assert_equal(pruner.model.state_dict(), weights)
    assert_equal(pruner.state(), before)


OTHERS = {
    "another architecture": lambda: tnvp.Pruner(convnet(), example_inputs=torch.zeros(2, 3, 16, 16)),
    "wider": lambda: prunable(mlp((7, 20, 9, 4)).double()),
    "narrower": lambda: prunable(mlp((7, 10, 9, 4)).double()),
    "deeper": lambda: prunable(mlp((7, 11, 9, 5, 4)).double()),
    "fewer groups": lambda: prunable(ignore=["0"]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_other_groups_is_refused_either_way_and_changes_nothing(other):
    one, another = prunable(), OTHERS[other]()
    assert_refused(one, another.state(), r"another network, or its pruner had other groups or ignore: group '\w+'")
    assert_refused(
        another, prunable().state(), r"another network, or its pruner had other groups or ignore: group '\w+'"
    )


def test_a_pruned_wider_network_is_not_taken_for_this_one():
    """Its indices alone would fit."""
    wider = prunable(mlp((7, 20, 18, 4)).double())
    wider.model[0].weight.data[6:] = 0
    watch(wider, range(3))
    wider.prune(sparsity=0.8)
    assert_refused(prunable(), wider.state(), "has 20 neurons there and has 11 neurons here")


def _set(*path):
    """A damage: what stands at ``path`` but its last element becomes that."""
    *keys, last, value = path

    def damage(state: dict) -> None:
        for key in keys:
            state = state[key]
        state[last] = value

    return damage


INDICES = {
    "empty": torch.arange(0),
    "negative": torch.tensor([-1, 2, 3]),
    "duplicate": torch.tensor([1, 1, 2]),
    "unsorted": torch.tensor([3, 1]),
    "out of range": torch.tensor([1, 99]),
    "float": torch.tensor([0.0, 1.0]),
    "boolean": torch.ones(11, dtype=torch.bool),
    "of two dimensions": torch.tensor([[1, 2]]),
    "a list": [1, 2],
}
GROUP, STREAM = "0", ("2", "in", "value")
DAMAGES = {
    **{f"kept {what}": _set("kept", GROUP, index) for what, index in INDICES.items()},
    **{f"masked {what}": _set("masked", GROUP, index) for what, index in INDICES.items()},
    **{f"without {part}": lambda state, part=part: state.pop(part) for part in prunable().state()} ,
    **{f"{part} of another type": _set(part, 3.0) for part in prunable().state()},
    "kept of an unknown group": _set("kept", "nope", torch.arange(3)),
    "masked of an unknown group": _set("masked", {"nope": torch.arange(3)}),
    "masked of one group only": lambda state: state["masked"].pop(GROUP),
    "kept others than were recorded": _set("kept", GROUP, torch.arange(8)),
    "added to an unknown layer": _set("added", ["nope.bias"]),
    "added without a name": _set("added", [3]),
    "random of another length": _set("random", torch.zeros(3, dtype=torch.uint8)),
    "random of floats": _set("random", torch.zeros(5056)),
    "moments of fewer neurons": _set("recorded", "current", STREAM, "mean", torch.zeros(3)),
    "moments without deviations": _set("recorded", "current", STREAM, "_m2", None),
    "moments of integers": _set("recorded", "current", STREAM, "mean", torch.zeros(8, dtype=torch.int64)),
    "moments of a negative count": _set("recorded", "totals", "cumulative", STREAM, "count", -1),
    "moments of no count": _set("recorded", "current", STREAM, "count", None),
    "moments of two names": _set("recorded", "current", STREAM, {"count": 0, "mean": None}),
    "moments of nothing": _set("recorded", "current", STREAM, None),
    "covariance of fewer neurons": _set("recorded", "covariances", STREAM[:2], "_comoment", torch.zeros(3, 3)),
    "covariance at no locations": _set("recorded", "covariances", STREAM[:2], "locations", 0),
    "windows of another type": _set("recorded", "totals", "cumulative", []),
    "batches of another type": _set("recorded", "batches", "many"),
    "a short row of the trace": _set("recorded", "traces", "activation", [(1, "0")]),
    "a row of two lengths": _set(
        "recorded", "traces", "activation", [(1, "0", torch.arange(2), torch.zeros(3), torch.zeros(3), 6)]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_state() -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pruned(criterion="obs").state()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, whole_state):
    state = copy.deepcopy(whole_state)
    DAMAGES[damage](state)
    assert_refused(prunable(criterion="obs"), state, "the state is damaged or of another network: .* give restore")


@pytest.mark.parametrize("part", ["traces", "current", "totals", "covariances", "ids", "batches"])
def test_a_record_that_lacks_a_part_is_refused_and_changes_nothing(part, whole_state):
    state = copy.deepcopy(whole_state)
    del state["recorded"][part]
    assert_refused(prunable(criterion="obs"), state, f"lacks '{part}'")


def test_what_is_no_state_is_refused():
    assert_refused(prunable(), ["kept"], "it is list, not a dictionary")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"criterion": "obs"}, {"criterion": "obs", "window": "ema"}, {}])
def test_a_state_stays_as_it_was_restored_whatever_is_recorded_after(options):
    giver, first, second = pruned(**options), prunable(**options), prunable(**options)
    state = giver.state()
    before = copy.deepcopy(state)
    first.restore(state)
    watch(first, range(5, 9), scale=9.0)
    assert_equal(state, before)
    second.restore(state)
    watch(giver, range(5, 9), scale=9.0)
    assert_equal(second.state(), before)


@pytest.mark.parametrize("what", [lambda p, state: p.restore(state), lambda p, state: p.watch_everything()])
def test_a_recording_is_not_replaced_while_it_goes_on(what):
    giver, pruner = prunable(), prunable()
    watch(giver, range(3))
    with pruner.record():
        with pytest.raises(PruningError, match="leave the record"):
            what(pruner, giver.state())
        pruner.model(INPUT)
    assert pruner.state()["recorded"]["batches"] == 1
    what(pruner, giver.state())
    with pruner.record():
        pruner.model(INPUT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"criterion": "obs"}, {"compensation": "affine"}])
def test_a_covariance_of_some_batches_only_is_not_taken_for_that_of_all(options):
    giver, pruner = prunable(), prunable(**options)
    watch(giver, range(3))
    pruner.restore(giver.state())
    watch(pruner, range(3, 6))
    with pytest.raises(PruningError, match=r"covariance at '2' was recorded of 18 of 36 samples.*calibration"):
        pruner.prune(sparsity=0.5)
    pruner.prune(sparsity=0.5, calibration=[torch.randn(30, 7).double()])


def test_only_a_fresh_pruner_can_be_restored():
    loop = Loop("mlp", "sgd")
    loop.train(range(3), {})
    state = loop.pruner.state()
    loop.pruner.prune(sparsity=0.5)
    with pytest.raises(PruningError, match="anew"):
        loop.pruner.restore(state)


def test_a_trace_that_was_taken_is_not_held_any_more():
    pruner = tnvp.Pruner(mlp(), example_inputs=torch.zeros(2, 7))
    with pruner.record():
        for step in range(4):
            pruner.model(torch.randn(6, 7))
            pruner.close_window(step)
            if step == 1:
                taken = pruner.take_trace()
    assert {row.step for row in taken} == {0, 1} and {row.step for row in pruner.trace} == {2, 3}
