"""A pruner's state takes a fresh network, its optimizer and its averaged copies to where the old ones were, bit for bit."""

import io

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


def test_a_state_of_another_network_is_refused_and_changes_nothing():
    state = Loop("mlp", "sgd").pruner.state()
    with pytest.raises(PruningError, match="lacks"):
        Loop("convolutions", "sgd").pruner.restore(state)
    wider = tnvp.Pruner(mlp((7, 20, 9, 4), dropout=0.2, norm=True), example_inputs=torch.zeros(2, 7)).state()
    loop = Loop("mlp", "sgd")
    weights = [p.clone() for p in loop.model.parameters()]
    with pytest.raises(PruningError, match=r"group '0' of 11 neurons does not fit"):
        loop.pruner.restore(wider)
    assert all(map(torch.equal, weights, loop.model.parameters()))


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
