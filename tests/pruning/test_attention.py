"""Attention: `Attention` is torch's, heads go as one neuron, and every spelling is pruned or refused in words."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tnvp
from tnvp.pruning.attention import Attention, become_explicit

from .law import Net, Net2, difference, prepared, pruned_equals_masked, spy_on_stand_ins, trains

Linear = nn.Linear


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOKENS = noise(3, 5, 12)


def both(**options) -> tuple[nn.MultiheadAttention, Attention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, **options).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = copy.deepcopy(theirs)
    become_explicit(ours)
    assert type(ours) is Attention and type(theirs) is nn.MultiheadAttention
    return theirs, ours


def same(theirs, ours) -> None:
    assert len(theirs) == len(ours) == 2
    for expected, found in zip(theirs, ours, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# ==== The same as torch's ====

causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
MASKS = {
    "none": {},
    "bool": {"attn_mask": causal},
    "float": {"attn_mask": noise(5, 5)},
    "causal": {"attn_mask": causal, "is_causal": True},
    "one a head": {"attn_mask": noise(9, 5, 5)},
    "one a head, bool": {"attn_mask": noise(9, 5, 5) > 1},
    "padding": {"key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3], [1]])},
    "padding, float": {"key_padding_mask": noise(3, 5)},
    "both": {"attn_mask": noise(5, 5) > 1.0, "key_padding_mask": torch.arange(5) >= torch.tensor([[5], [4], [4]])},
    "one a head and padding": {
        "attn_mask": noise(9, 5, 5),
        "key_padding_mask": torch.arange(5) >= torch.tensor([[5], [4], [4]]),
    },
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_it_computes_what_torchs_own_computes(mask, batch_first, bias, training):
    theirs, ours = both(batch_first=batch_first, bias=bias)
    theirs.train(training), ours.train(training)
    x = TOKENS if batch_first else TOKENS.transpose(0, 1)
    for weights, average in itertools.product((True, False), (True, False)):
        options = MASKS[mask] | {"need_weights": weights, "average_attn_weights": average}
        if options.get("is_causal") and weights:
            continue
        same(theirs(x, x, x, **options), ours(x, x, x, **options))


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_alone(mask, batch_first):
    theirs, ours = both(batch_first=batch_first)
    for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        same(theirs(*[TOKENS[0]] * 3, **options, **MASKS[mask]), ours(*[TOKENS[0]] * 3, **options, **MASKS[mask]))
    padding = {"key_padding_mask": torch.arange(5) > 3}
    same(theirs(*[TOKENS[0]] * 3, **padding), ours(*[TOKENS[0]] * 3, **padding))
    mask = {"attn_mask": noise(3, 5, 5)}
    same(theirs(*[TOKENS[0]] * 3, **mask), ours(*[TOKENS[0]] * 3, **mask))


def test_cross_attention_and_gradients():
    theirs, ours = both(batch_first=True)
    memory = noise(3, 7, 12, seed=1)
    for attention in (theirs, ours):
        output, weights = attention(TOKENS, memory, memory.tanh())
        (output.sin().sum() + weights.square().sum()).backward()
    same(theirs(TOKENS, memory, memory.tanh()), ours(TOKENS, memory, memory.tanh()))
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_its_state_is_torchs():
    theirs, ours = both()
    assert list(theirs.state_dict()) == list(ours.state_dict())
    Attention(12, 3).double().load_state_dict(theirs.state_dict())


# ==== Networks ====


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True, **options)
        self.up, self.down = Linear(12, 20), Linear(20, 12)

    def forward(self, x):
        h = self.n1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.n2(x))))


def transformer() -> nn.Module:
    return nn.Sequential(Linear(12, 12), Block(), Block(bias=False), nn.LayerNorm(12), Linear(12, 3))


def sequential_attention() -> nn.Module:
    """Without a residual: the out-projection's neurons and the embedding before it can go too."""

    def forward(m, x):
        h = m.embed(x).relu()
        return m.out(m.attention(h, h, h)[0].relu())

    return Net(forward, embed=Linear(12, 8), attention=nn.MultiheadAttention(8, 4, batch_first=True), out=Linear(8, 3))


def by_hand(spelling: str, product: str = "sdpa", heads: int = 3, width: int = 12) -> nn.Module:
    head_dim = width // heads

    def split(m, h):
        b, t, _ = h.shape
        if spelling == "heads":
            return h.view(b, t, heads, -1).transpose(1, 2)
        if spelling == "features":
            return h.view(b, t, -1, head_dim).transpose(1, 2)
        if spelling == "unflatten":
            return h.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        return h.view(b, t, heads, head_dim).transpose(1, 2)

    def forward(m, x):
        q, k, v = split(m, m.q(x)), split(m, m.k(x)), split(m, m.v(x))
        if product == "sdpa":
            h = F.scaled_dot_product_attention(q, k, v)
        else:
            h = ((q @ k.transpose(-2, -1)) * head_dim**-0.5).softmax(-1) @ v
        h = h.transpose(1, 2)
        h = h.reshape(h.shape[0], h.shape[1], width) if spelling == "fixed" else h.flatten(2)
        return m.out(m.project(h).relu())

    return Net(forward, **{n: Linear(12, width) for n in "qkv"}, project=Linear(width, 9), out=Linear(9, 3))


def fused() -> nn.Module:
    def forward(m, x):
        q, k, v = m.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        return m.out(m.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).relu())

    return Net(forward, qkv=Linear(12, 36), project=Linear(12, 9), out=Linear(9, 3))


def fused_timm() -> nn.Module:
    """As in many vision transformers: reshape to (B, T, 3, heads, features), permute, unbind."""

    def forward(m, x):
        b, t, _ = x.shape
        q, k, v = m.qkv(x).reshape(b, t, 3, -1, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)
        return m.out(m.project(h).relu())

    return Net(forward, qkv=Linear(12, 36), project=Linear(12, 9), out=Linear(9, 3))


def encoder_layer(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, **options)


def cross() -> nn.Module:
    def forward(m, x):
        h, memory = m.a(x), m.b(x).tanh()
        return m.out(m.attention(h, memory, memory)[0])

    return Net(
        forward,
        a=Linear(12, 8),
        b=Linear(12, 8),
        attention=nn.MultiheadAttention(8, 4, batch_first=True),
        out=Linear(8, 3),
    )


# name → (network, prunable: group → neurons, refused: producer → words)
NETWORKS = {
    "transformer": (
        transformer, {"1.attention": 4, "1.up": 20, "2.attention": 4, "2.up": 20}, {"0": "LayerNorm"},
    ),
    "no residual": (sequential_attention, {"embed": 8, "attention": 4, "attention.out_proj": 8}, {}),
    "cross": (cross, {"attention": 4, "attention.out_proj": 8}, {"a": "attends", "b": "attends"}),
    "weights are an output": (
        lambda: Net(lambda m, x: m.attention(x, x, x), attention=nn.MultiheadAttention(12, 4, batch_first=True), a=Linear(3, 3)),
        {}, {"attention": "weights"},
    ),
    "encoder layer": (lambda: nn.Sequential(Linear(12, 12), encoder_layer(), Linear(12, 3)), {"1.self_attn": 3, "1.linear1": 20}, {"0": "."}),
    "encoder layer, norm first": (
        lambda: nn.Sequential(encoder_layer(norm_first=True, activation="gelu"), Linear(12, 3)), {"0.self_attn": 3, "0.linear1": 20}, {},
    ),
    "encoder": (
        lambda: nn.Sequential(nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False), Linear(12, 3)),
        {"0.layers.0.self_attn": 3, "0.layers.0.linear1": 20, "0.layers.1.self_attn": 3, "0.layers.1.linear1": 20}, {},
    ),
    "encoder without bias": (
        lambda: nn.Sequential(encoder_layer(bias=False), Linear(12, 3)), {"0.self_attn": 3, "0.linear1": 20}, {},
    ),
    "encoder-decoder": (
        lambda: Net(lambda m, x: m.out(m.t(x, x)), t=nn.Transformer(12, 3, 1, 1, 20, dropout=0.0, batch_first=True), out=Linear(12, 3)),
        {"t.encoder.layers.0.self_attn": 3, "t.encoder.layers.0.linear1": 20, "t.decoder.layers.0.self_attn": 3,
         "t.decoder.layers.0.multihead_attn": 3, "t.decoder.layers.0.linear1": 20}, {},
    ),
    "view(B, T, heads, -1)": (lambda: by_hand("heads"), {"v": 4, "project": 9}, {"q": ".", "k": "."}),
    "view(B, T, -1, features)": (lambda: by_hand("features"), {"q": 3, "project": 9}, {}),
    "unflatten": (lambda: by_hand("unflatten"), {"q": 3, "project": 9}, {}),
    "all hard-coded": (lambda: by_hand("fixed"), {"project": 9}, {"q": "hard-coded|fixed", "v": "hard-coded|fixed"}),
    "matmul, view(B, T, heads, -1)": (lambda: by_hand("heads", "matmul"), {"v": 4, "project": 9}, {"q": ".", "k": "."}),
    "matmul, view(B, T, -1, features)": (lambda: by_hand("features", "matmul"), {"q": 3, "project": 9}, {}),
    "matmul, all hard-coded": (lambda: by_hand("fixed", "matmul"), {"project": 9}, {"q": "hard-coded|fixed"}),
    "fused": (fused, {"qkv": 3, "project": 9}, {}),
    "fused, reshape to five": (fused_timm, {"qkv": 3, "project": 9}, {}),
}  # fmt: skip


def built(name: str):
    build, prunable, refused = NETWORKS[name]
    return prepared(build, (TOKENS,)), (TOKENS,), prunable, refused


@pytest.mark.parametrize("name", NETWORKS)
def test_the_groups_are_those_it_should_have(name):
    model, inputs, prunable, refused = built(name)
    groups = tnvp.explain(model, inputs)
    assert {g.name: g.size for g in groups if g.prunable} == prunable
    assert all(g.reason for g in groups if not g.prunable)
    by_producer = {p: g for g in groups for p in g.producers}
    for producer, words in refused.items():
        assert not by_producer[producer].prunable
        assert re.search(words, by_producer[producer].reason), by_producer[producer].reason


PRUNABLE = [name for name, case in NETWORKS.items() if case[1]]


@pytest.mark.parametrize("compensation", ["none", "mean", "act_of_mean", "affine"])
@pytest.mark.parametrize("name", PRUNABLE)
def test_pruned_equals_masked_event_after_event_and_training_goes_on(name, compensation, monkeypatch):
    model, inputs, *_ = built(name)
    used = spy_on_stand_ins(monkeypatch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trains(model, optimizer, inputs)
    pruner = tnvp.Pruner(model, example_inputs=inputs, optimizer=optimizer, criterion="l2", compensation=compensation)
    for sparsity, scope in ((0.4, "layer"), (0.6, "global"), (0.7, "layer")):
        pruned_equals_masked(pruner, used, inputs, sparsity=sparsity, scope=scope)
        trains(model, optimizer, inputs)
    assert pruner.reductions()["neuron_sparsity"] > 0.4


@pytest.mark.parametrize("name", PRUNABLE)
def test_what_was_pruned_can_be_saved_and_loaded(name, tmp_path):
    model, inputs, *_ = built(name)
    tnvp.Pruner(model, example_inputs=inputs, criterion="l2").prune(sparsity=0.5, calibration=[(inputs, None)])
    tnvp.save(model, tmp_path / "net.pt")
    loaded = tnvp.load(tmp_path / "net.pt", into=NETWORKS[name][0]())
    with torch.no_grad():
        assert difference(loaded(*inputs), model.eval()(*inputs)) < 1e-12


@pytest.mark.parametrize("name", PRUNABLE)
def test_training_mode_of_the_pruned_network_computes_the_same(name):
    """torch's encoder layers take a fused path in eval mode only; it knows one width of heads and input."""
    model, inputs, *_ = built(name)
    tnvp.Pruner(model, example_inputs=inputs, criterion="l2").prune(sparsity=0.5, calibration=[(inputs, None)])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    with torch.no_grad():
        evaluated = model.eval()(*inputs)
        assert difference(model.train()(*inputs), evaluated) < 1e-10
    assert difference(model.eval()(*inputs).detach(), evaluated) < 1e-10, "with gradients, on the slow path"


@pytest.mark.parametrize("name", ["transformer", "encoder layer", "no residual"])
def test_a_pruned_one_can_be_copied_compiled_and_exported(name):
    model, inputs, *_ = built(name)
    tnvp.Pruner(model, example_inputs=inputs, criterion="l2").prune(sparsity=0.5, calibration=[(inputs, None)])
    with torch.no_grad():
        expected = model(*inputs)
        assert difference(copy.deepcopy(model)(*inputs), expected) == 0
        assert difference(torch.compile(model, backend="eager")(*inputs), expected) < 1e-12
        assert difference(torch.export.export(model, inputs).module()(*inputs), expected) < 1e-12


def test_recording_sees_what_the_heads_give_and_leaves_torchs_own_class():
    model, inputs, *_ = built("transformer")
    before = model(*inputs)
    pruner = tnvp.Pruner(model, example_inputs=inputs)
    with pruner.record(), torch.no_grad():
        assert difference(model(*inputs), before) < 1e-12
    assert {type(m) for m in model.modules() if isinstance(m, nn.MultiheadAttention)} == {nn.MultiheadAttention}
    report = pruner.prune(sparsity=0.5)
    assert {len(g.removed) for g in report.groups if g.name.endswith("attention")} == {2}
    assert model[1].attention.num_heads == 2 and model[1].attention.embed_dim == 12


# ==== Padded tokens, and parts of an attention ====


def padded_encoder(layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 4, 20, dropout=0.0, batch_first=True)
    return Net2(
        lambda m, x, y: m.out(m.encoder(x, src_key_padding_mask=y)),
        encoder=nn.TransformerEncoder(layer, layers), out=Linear(12, 3),
    )  # fmt: skip


PADDING = torch.arange(5) >= torch.tensor([[5], [3], [2]])


@pytest.mark.parametrize("traced_with_padding", [True, False])
def test_padded_tokens_where_torchs_encoder_would_nest_them(traced_with_padding, monkeypatch, tmp_path):
    """In eval mode without gradients it packs them away for its fused layers, which only whole attentions know."""
    model = prepared(padded_encoder, (TOKENS, PADDING))
    before = copy.deepcopy(model)
    example = (TOKENS, PADDING if traced_with_padding else torch.zeros_like(PADDING))
    pruner = tnvp.Pruner(model, example_inputs=example, criterion="variance", compensation="mean")
    with torch.no_grad():
        packed = model(TOKENS, PADDING)
        with pruner.record():
            assert difference(model(TOKENS, PADDING)[~PADDING], packed[~PADDING]) < 1e-12
        assert difference(model(TOKENS, PADDING), packed) == 0, "recording leaves torch's own way"
    report = pruned_equals_masked(pruner, spy_on_stand_ins(monkeypatch), (TOKENS, PADDING), sparsity=0.5)
    assert len([g for g in report.groups if g.removed]) == 4
    with torch.no_grad():
        found = model(TOKENS, PADDING)
        assert difference(found[~PADDING], model.train()(TOKENS, PADDING)[~PADDING]) < 1e-12
        tnvp.save(model, tmp_path / "net.pt")
        loaded = tnvp.load(tmp_path / "net.pt", into=padded_encoder())
        assert difference(loaded(TOKENS, PADDING), found) < 1e-12
        assert difference(before(TOKENS, PADDING), packed) == 0


@pytest.mark.parametrize("stays", list(itertools.combinations(("embed", "attention", "attention.out_proj"), 2)))
def test_one_part_of_an_attention_alone(stays, monkeypatch):
    model = prepared(sequential_attention, (TOKENS,))
    pruner = tnvp.Pruner(model, example_inputs=TOKENS, criterion="l2", compensation="mean", ignore=stays)
    pruned_equals_masked(pruner, spy_on_stand_ins(monkeypatch), (TOKENS,), sparsity=0.5)
    with torch.no_grad():
        found = model(TOKENS)
        assert difference(model.train()(TOKENS), found) < 1e-12
    assert difference(model.eval()(TOKENS), found) < 1e-12


@pytest.mark.parametrize("part", ["linear1", "self_attn"])
def test_one_part_of_an_encoder_layer_alone(part, monkeypatch):
    model = prepared(padded_encoder, (TOKENS, PADDING))
    names = [f"encoder.layers.{i}.{name}" for i in (0, 1) for name in ("linear1", "self_attn") if name != part]
    pruner = tnvp.Pruner(model, example_inputs=(TOKENS, PADDING), criterion="l2", compensation="mean", ignore=names)
    pruned_equals_masked(pruner, spy_on_stand_ins(monkeypatch), (TOKENS, PADDING), sparsity=0.5)
    with torch.no_grad():
        found = model(TOKENS, PADDING)[~PADDING]
        assert difference(model.train()(TOKENS, PADDING)[~PADDING], found) < 1e-12


def test_under_autocast():
    theirs, ours = (module.float() for module in both(batch_first=True))
    x, mask = TOKENS.float(), noise(5, 5).float()
    with torch.autocast("cpu", torch.bfloat16):
        for options in ({}, {"need_weights": False}, {"attn_mask": mask}, {"attn_mask": mask, "need_weights": False}):
            for a, b in zip(theirs(x, x, x, **options), ours(x, x, x, **options), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)
