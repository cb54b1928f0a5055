"""Small networks of every kind, written by hand: which groups they have, and the law for each."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tnvp
from tnvp.pruning.compensation import replacing

from .law import Net, Net2, difference, doubled, prepared, pruned_equals_masked, spy_on_stand_ins, trains

Linear, Conv, BN = nn.Linear, nn.Conv2d, nn.BatchNorm2d


@dataclass(frozen=True)
class Case:
    """``prunable``: producer that names the group → its neurons. ``refused``: producer → words of the reason."""

    build: Callable[[], nn.Module]
    inputs: object
    prunable: dict[str, int]
    refused: dict[str, str] = field(default_factory=dict)
    saves: bool = True


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


VECTORS, TOKENS, IMAGES, SMALL = noise(6, 7), noise(3, 5, 12), noise(3, 3, 8, 8), noise(2, 4, 6, 6)
IDS = torch.arange(15).reshape(3, 5) % 11


def head(h: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(h, 1).flatten(1)


# ==== Images ====


def unet(up: str):
    def forward(m, x):
        a = m.a(x).relu()
        b = m.b(F.max_pool2d(a, 2)).relu()
        return m.out(m.c(torch.cat([a, m.up(b)], 1)).relu())

    ups = {"transposed": lambda: nn.ConvTranspose2d(8, 5, 2, stride=2),
           "nearest": lambda: nn.Upsample(scale_factor=2), "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear")}  # fmt: skip
    wide = 5 if up == "transposed" else 8
    return Net(forward, a=Conv(3, 6, 3, padding=1), b=Conv(6, 8, 3, padding=1), up=ups[up](),
               c=Conv(6 + wide, 4, 3, padding=1), out=Conv(4, 2, 1))  # fmt: skip


def siamese():
    def trunk(m, x):
        return m.b(m.a(x).relu()).tanh()

    return Net2(
        lambda m, x, y: m.out((trunk(m, x) - trunk(m, y)).abs()), a=Linear(7, 10), b=Linear(10, 6), out=Linear(6, 1)
    )


def squeeze_excite():
    def forward(m, x):
        h = m.bn(m.a(x)).relu()
        scale = m.expand(m.reduce(F.adaptive_avg_pool2d(h, 1)).relu()).sigmoid()
        return m.out(head(m.b(h * scale)))

    return Net(
        forward,
        a=Conv(3, 8, 3),
        bn=BN(8),
        reduce=Conv(8, 4, 1),
        expand=Conv(4, 8, 1),
        b=Conv(8, 6, 3),
        out=Linear(6, 3),
    )


def squeeze_excite_linear():
    """The older spelling: pool, view, two Linears, view, expand_as."""

    def forward(m, x):
        h = m.a(x).relu()
        b, c = h.size(0), h.size(1)
        scale = m.expand(m.reduce(F.adaptive_avg_pool2d(h, 1).view(b, c)).relu()).sigmoid().view(b, c, 1, 1)
        return m.out(head(h * scale.expand_as(h)))

    return Net(forward, a=Conv(3, 8, 3), reduce=Linear(8, 4), expand=Linear(4, 8), out=Linear(8, 3))


def group_normed(groups: int = 4):
    return nn.Sequential(
        Conv(3, 12, 3),
        nn.GroupNorm(groups, 12),
        nn.SiLU(),
        Conv(12, 8, 3),
        nn.GroupNorm(8, 8),
        nn.ReLU(),
        nn.Flatten(),
        Linear(8 * 16, 3),
    )


def instance_normed():
    return nn.Sequential(
        Conv(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), Conv(8, 6, 3),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.PReLU(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Linear(6, 3),
    )  # fmt: skip


def depthwise(multiplier: int):
    return nn.Sequential(
        Conv(3, 6, 3), nn.ReLU(), Conv(6, 6 * multiplier, 3, groups=6), BN(6 * multiplier), nn.ReLU6(),
        Conv(6 * multiplier, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Linear(5, 3),
    )  # fmt: skip


def resnext():
    def forward(m, x):
        h = m.stem(x).relu()
        return m.out(head((h + m.c(m.bn(m.b(m.a(h).relu())).relu())).relu()))

    return Net(
        forward,
        stem=Conv(3, 6, 3),
        a=Conv(6, 12, 1),
        b=Conv(12, 12, 3, padding=1, groups=4),
        bn=BN(12),
        c=Conv(12, 6, 1),
        out=Linear(6, 3),
    )


def dense_block():
    def forward(m, x):
        h = m.stem(x)
        h = torch.cat([h, m.a(m.na(h).relu())], 1)
        h = torch.cat([h, m.b(m.nb(h).relu())], 1)
        return m.out(head(m.nc(h).relu()))

    return Net(
        forward,
        stem=Conv(3, 6, 3),
        na=BN(6),
        a=Conv(6, 4, 3, padding=1),
        nb=BN(10),
        b=Conv(10, 4, 3, padding=1),
        nc=BN(14),
        out=Linear(14, 3),
    )


def shuffled(spelling: str):
    def by_hand(h):
        b, c, height, width = h.size()
        return h.view(b, 2, c // 2, height, width).transpose(1, 2).contiguous().view(b, -1, height, width)

    def flattened(h):
        b, _, height, width = h.shape
        return h.view(b, 2, -1, height, width).transpose(1, 2).flatten(1, 2)

    mix = {
        "by hand": lambda m, h: by_hand(h),
        "flattened": lambda m, h: flattened(h),
        "module": lambda m, h: m.shuffle(h),
    }[spelling]

    def forward(m, x):
        return m.out(head(m.c(m.b(mix(m, m.a(x).relu())).relu())))

    return Net(
        forward,
        a=Conv(3, 8, 1),
        shuffle=nn.ChannelShuffle(2),
        b=Conv(8, 8, 3, groups=2),
        c=Conv(8, 6, 1),
        out=Linear(6, 3),
    )


def upsampler():
    return nn.Sequential(Conv(3, 6, 3), nn.ReLU(), Conv(6, 20, 3), nn.PixelShuffle(2), nn.ReLU(), Conv(5, 3, 3))


def downsampler():
    return nn.Sequential(Conv(3, 6, 3), nn.PixelUnshuffle(2), nn.ReLU(), Conv(24, 5, 1), nn.ReLU(), Conv(5, 2, 1))


def decoder():
    return nn.Sequential(
        Linear(7, 24), nn.ReLU(), nn.Unflatten(1, (-1, 2, 2)), nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1, output_padding=1),
        BN(8), nn.ReLU(), nn.ConvTranspose2d(8, 5, 2, stride=2), nn.LeakyReLU(), nn.ConvTranspose2d(5, 2, 3, padding=1),
    )  # fmt: skip


def convnext():
    def forward(m, x):
        h = m.stem(x)
        inner = m.norm(m.deep(h).permute(0, 2, 3, 1))
        inner = m.down(m.up(inner)) if not hasattr(m, "gelu") else m.down(m.gelu(m.up(inner)))
        h = h + (m.scale * inner).permute(0, 3, 1, 2)
        return m.out(head(h))

    net = Net(forward, stem=Conv(3, 6, 2, stride=2), deep=Conv(6, 6, 3, padding=1, groups=6), norm=nn.LayerNorm(6),
              up=Linear(6, 16), gelu=nn.GELU(), down=Linear(16, 6), out=Linear(6, 3))  # fmt: skip
    net.scale = nn.Parameter(torch.ones(6) * 0.7)
    return net


def scaled_residual(vector: bool):
    def forward(m, x):
        h = m.stem(x).relu()
        return m.out((h + m.alpha * m.b(m.a(h).relu())).relu())

    net = Net(forward, stem=Linear(7, 8), a=Linear(8, 10), b=Linear(10, 8), out=Linear(8, 3))
    net.alpha = nn.Parameter(torch.full((8,) if vector else (), 0.4))
    return net


def stacked():
    def forward(m, x):
        h = m.stem(x).relu()
        return m.out(torch.stack([m.a(h), m.b(h).tanh()], 1).mean(1).relu())

    return Net(forward, stem=Linear(7, 10), a=Linear(10, 6), b=Linear(10, 6), out=Linear(6, 3))


def wide_and_narrow():
    """Pools of several kinds, joined."""

    def forward(m, x):
        h = m.a(x).relu()
        h = torch.cat([h.mean((2, 3)), h.amax(dim=(-1, -2)), F.adaptive_max_pool2d(h, 1)[:, :, 0, 0]], dim=-1)
        return m.out(h)

    return Net(forward, a=Conv(3, 5, 3), out=Linear(15, 3))


def conv_net(dims: int):
    convolution, norm, pool = (
        (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d), None, (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d)
    )[dims - 1]  # fmt: skip
    return nn.Sequential(
        convolution(3, 8, 3),
        norm(8),
        nn.ReLU(),
        pool(2),
        convolution(8, 6, 2),
        nn.ELU(),
        nn.Flatten(),
        Linear(6 * 2**dims, 3),
    )


# ==== Sequences ====


def tied_embedding():
    net = Net(lambda m, x: m.decoder(m.b(m.a(m.embedding(x)).relu())), embedding=nn.Embedding(11, 8), a=Linear(8, 9),
              b=Linear(9, 8), decoder=Linear(8, 11, bias=False))  # fmt: skip
    net.decoder.weight = net.embedding.weight
    return net


def recurrent(layer: type, **options):
    wide = 7 * (2 if options.get("bidirectional") else 1)
    return Net(
        lambda m, x: m.out(m.rnn(m.a(x).relu())[0][:, -1]),
        a=Linear(12, 10),
        rnn=layer(10, 7, batch_first=True, **options),
        out=Linear(wide, 3),
    )


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_without_biases_says_what_it_lacks(layer):
    (group,) = [g for g in tnvp.explain(recurrent(layer, bias=False), torch.randn(2, 5, 12)) if "a" in g.producers]
    assert not group.prunable and f"rnn ({layer.__name__}), which has no bias" in group.reason


def conv_recurrent():
    def forward(m, x):
        h = m.a(x).relu().flatten(1, 2).transpose(1, 2)
        return m.out(m.rnn(h)[1][0].squeeze(0))

    return Net(forward, a=Conv(3, 4, 3), rnn=nn.LSTM(24, 7, batch_first=True), out=Linear(7, 3))


def gated_mlp(spelling: str):
    forwards = {
        "swiglu": lambda m, x: m.out(F.silu(m.gate(x)) * m.up(x)),
        "glu": lambda m, x: m.out(m.glu(m.both(x))),
        "F.glu": lambda m, x: m.out(F.glu(m.both(x), dim=-1)),
        "chunk": lambda m, x: (lambda p: m.out(p[0] * F.gelu(p[1])))(m.both(x).chunk(2, dim=-1)),
        "split": lambda m, x: (lambda h: (lambda p: m.out(p[0] * p[1].sigmoid()))(h.split(h.size(-1) // 2, -1)))(
            m.both(x)
        ),
    }
    layers = (
        dict(gate=Linear(12, 10), up=Linear(12, 10))
        if spelling == "swiglu"
        else dict(both=Linear(12, 20), glu=nn.GLU())
    )
    return Net(forwards[spelling], out=Linear(10, 3), **layers)


def mixer():
    def forward(m, x):
        x = x + m.t2(F.gelu(m.t1(m.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + m.c2(F.gelu(m.c1(m.n2(x))))
        return m.out(x.mean(1))

    return Net(
        forward,
        n1=nn.LayerNorm(12),
        t1=Linear(5, 9),
        t2=Linear(9, 5),
        n2=nn.LayerNorm(12),
        c1=Linear(12, 16),
        c2=Linear(16, 12),
        out=Linear(12, 3),
    )


def shared_layer():
    def forward(m, x):
        h = m.a(x).relu()
        h = m.b(h).relu()
        return m.out(m.b(h).relu())

    return Net(forward, a=Linear(7, 9), b=Linear(9, 9), out=Linear(9, 3))


def two_inputs():
    return Net2(
        lambda m, x, y: m.out(torch.cat([m.a(x).relu(), m.b(y).relu().mean(1)], 1)),
        a=Linear(7, 6),
        b=Linear(12, 8),
        out=Linear(14, 3),
    )


def dictionary():
    def forward(m, x):
        h = m.a(x).relu()
        return {"class": m.b(h), "boxes": [m.c(h).sigmoid(), m.d(h)]}

    return Net(forward, a=Linear(7, 10), b=Linear(10, 3), c=Linear(10, 4), d=Linear(10, 2))


def frozen():
    net = nn.Sequential(Linear(7, 9), nn.ReLU(), Linear(9, 8), nn.ReLU(), Linear(8, 3))
    for parameter in net[:2].parameters():
        parameter.requires_grad_(False)
    return net


CASES = {
    "unet, transposed": Case(lambda: unet("transposed"), IMAGES, {"a": 6, "b": 8, "up": 5, "c": 4}),
    "unet, nearest": Case(lambda: unet("nearest"), IMAGES, {"a": 6, "b": 8, "c": 4}),
    "unet, bilinear": Case(lambda: unet("bilinear"), IMAGES, {"a": 6, "b": 8, "c": 4}),
    "siamese": Case(siamese, (VECTORS, noise(6, 7, seed=1)), {"a": 10, "b": 6}),
    "squeeze and excite": Case(squeeze_excite, IMAGES, {"a": 8, "reduce": 4, "b": 6}),
    "squeeze and excite, linear": Case(squeeze_excite_linear, IMAGES, {"a": 8, "reduce": 4}),
    "group norm": Case(group_normed, IMAGES, {"0": 4, "3": 8}),
    "group norm, two groups": Case(lambda: group_normed(2), IMAGES, {"0": 2, "3": 8}),
    "instance norm and prelu": Case(instance_normed, IMAGES, {"0": 8, "3": 6}),
    "depthwise": Case(lambda: depthwise(1), IMAGES, {"0": 6, "5": 5}),
    "depthwise, multiplier 2": Case(lambda: depthwise(2), IMAGES, {"0": 6, "5": 5}),
    "resnext": Case(resnext, IMAGES, {"stem": 6, "a": 4}),
    "dense block": Case(dense_block, IMAGES, {"stem": 6, "a": 4, "b": 4}),
    "channel shuffle by hand": Case(lambda: shuffled("by hand"), IMAGES, {"a": 2, "c": 6}),
    "channel shuffle, flattened": Case(lambda: shuffled("flattened"), IMAGES, {"a": 2, "c": 6}),
    "channel shuffle, module": Case(lambda: shuffled("module"), IMAGES, {"a": 2, "c": 6}),
    "pixel shuffle": Case(upsampler, IMAGES, {"0": 6, "2": 5}),
    "pixel unshuffle": Case(downsampler, noise(2, 3, 6, 6), {"0": 6, "3": 5}),
    "transposed decoder": Case(decoder, VECTORS, {"0": 6, "3": 8, "6": 5}),
    "convnext": Case(convnext, IMAGES, {"up": 16}, {"stem": "LayerNorm|fixed size"}),
    "residual times a number": Case(lambda: scaled_residual(False), VECTORS, {"stem": 8, "a": 10}),
    "residual times a vector": Case(lambda: scaled_residual(True), VECTORS, {"a": 10}, {"stem": "fixed size"}),
    "stack": Case(stacked, VECTORS, {"stem": 10, "a": 6}),
    "several pools": Case(wide_and_narrow, IMAGES, {"a": 5}),
    "conv1d": Case(lambda: conv_net(1), noise(4, 3, 8), {"0": 8, "4": 6}),
    "conv3d": Case(lambda: conv_net(3), noise(2, 3, 8, 8, 8), {"0": 8, "4": 6}),
    "mean over space": Case(
        lambda: Net(lambda m, x: m.out(m.a(x).relu().mean([2, 3])), a=Conv(3, 8, 3), out=Linear(8, 3)), IMAGES, {"a": 8}
    ),
    "maximum over space, by name": Case(
        lambda: Net(lambda m, x: m.out(m.a(x).flatten(2).max(dim=-1).values), a=Conv(3, 8, 3), out=Linear(8, 3)),
        IMAGES, {"a": 8},
    ),
    "maxout": Case(
        lambda: Net(lambda m, x: (lambda h: m.out(h.view(h.size(0), 2, -1).max(1).values))(m.a(x)), a=Linear(7, 8), out=Linear(4, 3)),
        VECTORS, {"a": 4},
    ),
    "squeeze": Case(
        lambda: Net(lambda m, x: m.out(F.adaptive_avg_pool2d(m.a(x), 1).squeeze()), a=Conv(3, 8, 3), out=Linear(8, 3)),
        IMAGES, {}, {"a": r"squeeze\(dim\)"},
    ),
    "squeeze(dim)": Case(
        lambda: Net(lambda m, x: m.out(F.adaptive_avg_pool2d(m.a(x), 1).squeeze(-1).squeeze(-1)), a=Conv(3, 8, 3), out=Linear(8, 3)),
        IMAGES, {"a": 8},
    ),
    "pad": Case(
        lambda: Net(lambda m, x: m.out(head(m.b(F.pad(m.a(x).relu(), (1, 1, 1, 1))))), a=Conv(3, 8, 3), b=Conv(8, 5, 3), out=Linear(5, 3)),
        IMAGES, {"a": 8, "b": 5},
    ),
    "padded channels": Case(
        lambda: Net(lambda m, x: m.out(head(F.pad(m.a(x), (0, 0, 0, 0, 2, 2)))), a=Conv(3, 8, 3), out=Linear(12, 3)),
        IMAGES, {}, {"a": "pad"},
    ),
    "einsum": Case(
        lambda: Net(lambda m, x: m.out(torch.einsum("bi,ij->bj", m.b(m.a(x)), torch.eye(9, dtype=x.dtype))), a=Linear(7, 8), b=Linear(8, 9), out=Linear(9, 3)),
        VECTORS, {"a": 8}, {"b": "einsum"},
    ),
    "width in arithmetic": Case(
        lambda: Net(lambda m, x: m.out(m.b(m.a(x)) * m.a(x).shape[-1] ** -0.5), a=Linear(7, 8), b=Linear(8, 9), out=Linear(9, 3)),
        VECTORS, {"b": 9}, {"a": "width"},
    ),
    "hard-coded view": Case(
        lambda: Net(lambda m, x: m.out(m.b(x).relu().view(-1, 8 * 36)), b=Conv(3, 8, 3), out=Linear(288, 3)), IMAGES, {}, {"b": "hard-coded"},
    ),
    "two outputs": Case(
        lambda: Net(lambda m, x: (lambda h: (m.b(h), m.c(h.tanh())))(m.a(x)), a=Linear(7, 8), b=Linear(8, 3), c=Linear(8, 2)), VECTORS, {"a": 8},
    ),
    "dictionary": Case(dictionary, VECTORS, {"a": 10}),
    "two inputs": Case(two_inputs, (VECTORS, noise(6, 5, 12)), {"a": 6, "b": 8}),
    "shared layer": Case(shared_layer, VECTORS, {"a": 9}),
    "frozen layers": Case(frozen, VECTORS, {"0": 9, "2": 8}),
    "tied embedding": Case(tied_embedding, IDS, {"a": 9}, {"embedding": "shares"}),
    "embedding": Case(
        lambda: Net(lambda m, x: m.out(m.a(m.e(x)).relu().mean(1)), e=nn.Embedding(11, 8), a=Linear(8, 9), out=Linear(9, 3)), IDS, {"e": 8, "a": 9}
    ),
    "lstm": Case(lambda: recurrent(nn.LSTM), TOKENS, {"a": 10}),
    "gru, bidirectional": Case(lambda: recurrent(nn.GRU, bidirectional=True), TOKENS, {"a": 10}),
    "lstm, bidirectional of two layers": Case(lambda: recurrent(nn.LSTM, bidirectional=True, num_layers=2), TOKENS, {"a": 10}),
    "conv and lstm": Case(conv_recurrent, IMAGES, {"a": 4}),
    "swiglu": Case(lambda: gated_mlp("swiglu"), TOKENS, {"gate": 10}),
    "glu": Case(lambda: gated_mlp("glu"), TOKENS, {"both": 10}),
    "F.glu": Case(lambda: gated_mlp("F.glu"), TOKENS, {"both": 10}),
    "gate by chunk": Case(lambda: gated_mlp("chunk"), TOKENS, {"both": 10}),
    "gate by split": Case(lambda: gated_mlp("split"), TOKENS, {"both": 10}),
    "mixer": Case(mixer, TOKENS, {"t1": 9, "c1": 16}, {"c2": "LayerNorm|fixed"}),
}  # fmt: skip


def built(name: str):
    case = CASES[name]
    inputs = doubled(case.inputs)
    return prepared(case.build, inputs), inputs, case


@pytest.mark.parametrize("name", CASES)
def test_the_groups_are_those_it_should_have(name):
    model, inputs, case = built(name)
    groups = tnvp.explain(model, inputs)
    assert {g.name: g.size for g in groups if g.prunable} == case.prunable
    assert all(g.reason for g in groups if not g.prunable)
    by_producer = {p: g for g in groups for p in g.producers}
    for producer, words in case.refused.items():
        assert re.search(words, by_producer[producer].reason)


PRUNABLE = [name for name, case in CASES.items() if case.prunable]


@pytest.mark.parametrize("compensation", ["none", "mean", "affine"])
@pytest.mark.parametrize("name", PRUNABLE)
def test_pruned_equals_masked_event_after_event_and_training_goes_on(name, compensation, monkeypatch):
    model, inputs, _ = built(name)
    used = spy_on_stand_ins(monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trains(model, optimizer, inputs)
    pruner = tnvp.Pruner(model, example_inputs=inputs, optimizer=optimizer, criterion="l2", compensation=compensation)
    sizes = {g.name: g.size for g in pruner.groups if g.prunable}
    for sparsity, scope in ((0.5, "layer"), (0.6, "global"), (0.7, "layer")):
        report = pruned_equals_masked(pruner, used, inputs, sparsity=sparsity, scope=scope)
        trains(model, optimizer, inputs)
    assert report.neuron_sparsity > 0.4
    assert all(width < sizes[g] for g, width in pruner.widths.items())


@pytest.mark.parametrize("name", PRUNABLE)
def test_what_was_pruned_can_be_saved_and_loaded(name, tmp_path):
    model, inputs, case = built(name)
    tnvp.Pruner(model, example_inputs=inputs, criterion="l2").prune(sparsity=0.5, calibration=[(inputs, None)])
    tnvp.save(model, tmp_path / "net.pt")
    loaded = tnvp.load(tmp_path / "net.pt", into=case.build())
    with torch.no_grad():
        assert difference(loaded(*inputs), model.eval()(*inputs)) == 0


# ==== Layers that hold a part of their group ====


def joined_and_added():
    def forward(m, x):
        return m.out((torch.cat([m.a(x), m.b(x)], 1) + m.c(x)).relu())

    net = Net(forward, a=Linear(7, 4), b=Linear(7, 4), c=Linear(7, 8), out=Linear(8, 3))
    with torch.no_grad():  # all of a's neurons are the weakest of the group
        net.a.weight.mul_(0.01)
        net.c.weight[:4].mul_(0.01)
    return net


@pytest.mark.parametrize("budget", [{"sparsity": 0.7}, {"threshold": 0.9}, {"parameter_reduction": 0.6}])
@pytest.mark.parametrize("limits", [{}, {"min_neurons": 2}, {"min_neurons": 2, "round_to": 2}])
def test_a_layer_that_holds_a_part_of_its_group_does_not_lose_all_of_it(budget, limits):
    model = prepared(joined_and_added, (VECTORS.double(),))
    pruner = tnvp.Pruner(model, example_inputs=VECTORS.double(), criterion="l2", compensation="none")
    pruner.prune(**budget, **limits)
    a, b, c = (layer.out_features for layer in (model.a, model.b, model.c))
    assert a + b == c == model.out.in_features < 8
    assert min(a, b) >= limits.get("min_neurons", 1) and c % limits.get("round_to", 1) == 0
    before = [p.shape for p in model.parameters()]
    pruner.prune(**budget, **limits) if "threshold" not in budget else None
    assert [p.shape for p in model.parameters()] == before, "asking again removes nothing"


# ==== Mixers ====


def layer_normed(norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(10)):
    return nn.Sequential(Linear(7, 10), norm(), nn.GELU(), Linear(10, 8), nn.ReLU(), Linear(8, 3))


# name → (network, inputs, groups that only approximate=True prunes: name → neurons)
MIXED = {
    "layer norm": (layer_normed, VECTORS, {"0": 10}),
    "layer norm without affine": (lambda: layer_normed(lambda: nn.LayerNorm(10, elementwise_affine=False)), VECTORS, {"0": 10}),
    "rms norm": (lambda: layer_normed(lambda: nn.RMSNorm(10)), VECTORS, {"0": 10}),
    "group norm of one group": (
        lambda: nn.Sequential(Conv(3, 8, 3), nn.GroupNorm(1, 8), nn.ReLU(), Conv(8, 4, 3), nn.Flatten(), Linear(64, 3)), IMAGES, {"0": 8},
    ),
    "mixer": (lambda: nn.Sequential(Linear(12, 12), mixer_block(), Linear(12, 3)), TOKENS, {"0": 12}),
}  # fmt: skip


def mixer_block():
    def forward(m, x):
        return x + m.c2(F.gelu(m.c1(m.n(x))))

    return Net(forward, n=nn.LayerNorm(12), c1=Linear(12, 16), c2=Linear(16, 12))


@pytest.mark.parametrize("name", MIXED)
def test_behind_a_mixer_only_approximate_prunes_and_the_certificate_tells_the_error(name, monkeypatch):
    build, inputs, mixed = MIXED[name]
    inputs = doubled(inputs)
    model = prepared(build, inputs)
    exact = {g.name: g for g in tnvp.explain(model, inputs)}
    for group in mixed:
        assert not exact[group].prunable and "approximate=True" in exact[group].reason
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = tnvp.Pruner(model, example_inputs=inputs, optimizer=optimizer, criterion="l2", approximate=True)
    prunable = {g.name: g.size for g in pruner.groups if g.prunable}
    assert mixed.items() <= prunable.items()
    used = spy_on_stand_ins(monkeypatch)
    for sparsity in (0.3, 0.5, 0.6):
        before = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*or a mixer")
            report = pruner.prune(sparsity=sparsity, calibration=[(inputs, None)])
        with torch.no_grad():
            old, found = before(*inputs), model(*inputs)
            with replacing(before, used):
                masked = before(*inputs)
        scale = old.norm()
        certificate = report.certificate
        assert certificate.border_part > 1e-4
        assert certificate.border_part == pytest.approx(float((found - masked).norm() / scale), rel=1e-6)
        assert certificate.predicted == pytest.approx(float((masked - old).norm() / scale), rel=1e-6)
        assert certificate.measured == pytest.approx(float((found - old).norm() / scale), rel=1e-6)
        trains(model, optimizer, inputs)
    assert all(pruner.widths[g] == prunable[g] - round(0.6 * prunable[g]) for g in mixed)


@pytest.mark.parametrize("name", MIXED)
def test_a_network_pruned_behind_a_mixer_can_be_saved_and_loaded(name, tmp_path):
    build, inputs, _ = MIXED[name]
    inputs = doubled(inputs)
    model = prepared(build, inputs)
    tnvp.Pruner(model, example_inputs=inputs, criterion="l2", compensation="none", approximate=True).prune(sparsity=0.5)
    tnvp.save(model, tmp_path / "net.pt")
    with torch.no_grad():
        assert difference(tnvp.load(tmp_path / "net.pt", into=build())(*inputs), model(*inputs)) == 0
