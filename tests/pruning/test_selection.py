"""The laws of selection: budgets and floors hold, more sparsity only removes more, asking twice nothing."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tnvp
from tnvp.pruning.errors import PruningError
from tnvp.pruning.selection import (
    NORMALIZATIONS,
    Limits,
    keep_by_reduction,
    keep_by_sparsity,
    keep_by_threshold,
    normalized,
    top,
)

from .networks import mlp

few = settings(max_examples=60, deadline=None, derandomize=True)
widths = st.lists(st.integers(1, 20), min_size=1, max_size=4)
sparsities = st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 0.7, 0.9, 0.99])
scopes = st.sampled_from(["layer", "global"])
seeds = st.integers(0, 99)


def scored(sizes: list[int], seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Scores with ties, and the groups' sizes."""
    generator = torch.Generator().manual_seed(seed)
    scores = {f"g{i}": torch.randint(0, 9, (n,), generator=generator) / 8 for i, n in enumerate(sizes)}
    return scores, {name: len(score) for name, score in scores.items()}


def counts(kept) -> dict[str, int]:
    return {name: len(index) for name, index in kept.items()}


def survivors(scores, kept) -> dict[str, torch.Tensor]:
    return {name: score[kept[name]] for name, score in scores.items()}


# ==== Budgets ====


@few
@given(sizes=widths, sparsity=sparsities, seed=seeds)
def test_each_layer_loses_the_sparsity_to_the_nearest_neuron(sizes, sparsity, seed):
    scores, original = scored(sizes, seed)
    for name, width in counts(keep_by_sparsity(scores, original, sparsity, Limits())).items():
        n = original[name]
        assert width == 1 or abs((n - width) - sparsity * n) <= 0.5


@few
@given(sizes=widths, sparsity=sparsities, seed=seeds)
def test_the_network_loses_the_sparsity_to_the_nearest_neuron_as_far_as_a_neuron_a_layer_allows(sizes, sparsity, seed):
    scores, original = scored(sizes, seed)
    kept = keep_by_sparsity(scores, original, sparsity, Limits("global"))
    alive, total = sum(counts(kept).values()), sum(sizes)
    assert alive == len(sizes) or abs((total - alive) - sparsity * total) <= 0.5


@few
@given(sizes=widths, sparsity=sparsities, scope=scopes, seed=seeds)
def test_who_is_kept_scores_at_least_as_high_as_who_goes(sizes, sparsity, scope, seed):
    scores, original = scored(sizes, seed)
    kept = keep_by_sparsity(scores, original, sparsity, Limits(scope))
    gone = {n: s[[i for i in range(len(s)) if i not in set(kept[n].tolist())]] for n, s in scores.items()}
    for name, index in kept.items():
        assert index.tolist() == sorted(set(index.tolist())), "ascending, none twice"
        if len(gone[name]):
            assert scores[name][index].min() >= gone[name].max()
    if scope == "global":  # the strongest of each layer stays whatever it scores; the others compete
        others = [s for n in scores for s in scores[n][kept[n]].sort().values[:-1].tolist()]
        everybody_gone = [s for values in gone.values() for s in values.tolist()]
        assert not others or not everybody_gone or min(others) >= max(everybody_gone)


def test_globally_weak_layers_lose_more():
    scores = {"weak": torch.tensor([0.1, 0.2, 0.3, 0.4]), "strong": torch.tensor([5.0, 6.0, 7.0, 8.0])}
    kept = keep_by_sparsity(scores, {"weak": 4, "strong": 4}, 3 / 8, Limits("global"))
    assert {name: index.tolist() for name, index in kept.items()} == {"weak": [3], "strong": [0, 1, 2, 3]}


# ==== Normalisation ====


@few
@given(sizes=widths, sparsity=sparsities, seed=seeds, how=st.sampled_from(sorted(set(NORMALIZATIONS) - {"none"})))
def test_normalised_groups_compete_alike_whatever_the_scale_of_their_scores(sizes, sparsity, seed, how):
    scores, original = scored(sizes, seed)
    larger = scores | {"g0": scores["g0"] * 1024}  # a power of two: no rounding
    limits = Limits("global", normalize=how)
    one, two = (keep_by_sparsity(s, original, sparsity, limits) for s in (scores, larger))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_scale_decides_who_goes_without_normalisation():
    scores = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.1, 1.9])}
    larger = scores | {"a": 1000 * scores["a"]}
    kept = [counts(keep_by_sparsity(s, {"a": 2, "b": 2}, 0.5, Limits("global", 1))) for s in (scores, larger)]
    assert kept == [{"a": 1, "b": 1}, {"a": 1, "b": 1}], "a neuron a layer stays"
    kept = [counts(keep_by_sparsity(s, {"a": 2, "b": 2}, 0.25, Limits("global"))) for s in (scores, larger)]
    assert kept == [{"a": 1, "b": 2}, {"a": 2, "b": 1}]


def test_scores_are_divided_by_their_mean_maximum_or_norm():
    scores = {"a": torch.tensor([3.0, 4.0]), "dead": torch.zeros(3)}
    expected = {"none": [3, 4], "mean": [6 / 7, 8 / 7], "max": [3 / 4, 1], "l2": [3 / 5, 4 / 5]}
    assert set(expected) == set(NORMALIZATIONS)
    for how, values in expected.items():
        found = normalized(scores, how)
        torch.testing.assert_close(found["a"], torch.tensor(values, dtype=torch.double))
        assert found["dead"].tolist() == [0, 0, 0]


@few
@given(sizes=widths, sparsity=sparsities, seed=seeds, how=st.sampled_from(sorted(NORMALIZATIONS)))
def test_within_a_layer_normalisation_changes_nothing(sizes, sparsity, seed, how):
    scores, original = scored(sizes, seed)
    one, two = (keep_by_sparsity(scores, original, sparsity, Limits(normalize=n)) for n in ("none", how))
    assert all(torch.equal(one[name], two[name]) for name in one)


# ==== Limits ====


@few
@given(
    sizes=widths,
    sparsity=sparsities,
    scope=scopes,
    seed=seeds,
    floor=st.integers(1, 6),
    multiple=st.integers(1, 6),
)
def test_no_layer_falls_under_its_floor_and_widths_keep_to_multiples(sizes, sparsity, scope, seed, floor, multiple):
    scores, original = scored(sizes, seed)
    free = counts(keep_by_sparsity(scores, original, sparsity, Limits(scope)))
    for name, width in counts(keep_by_sparsity(scores, original, sparsity, Limits(scope, floor, multiple))).items():
        assert width >= min(floor, original[name])
        assert width % multiple == 0 or width == original[name]
        if scope == "layer":
            wanted = max(free[name], floor)
            assert wanted <= width < wanted + multiple or width == original[name]


@pytest.mark.parametrize(
    "options", [{"scope": "network"}, {"normalize": "std"}, {"min_neurons": 0}, {"round_to": 0}, {"round_to": 1.5}]
)
def test_bad_limits_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(PruningError, match=rf"{name}.*{value}"):
        Limits(**options)


# ==== Order ====


@few
@given(sizes=widths, scope=scopes, seed=seeds, floor=st.integers(1, 4), multiple=st.integers(1, 4))
def test_more_sparsity_only_removes_more(sizes, scope, seed, floor, multiple):
    scores, original = scored(sizes, seed)
    before = {name: set(range(n)) for name, n in original.items()}
    for sparsity in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95):
        kept = keep_by_sparsity(scores, original, sparsity, Limits(scope, floor, multiple))
        now = {name: set(index.tolist()) for name, index in kept.items()}
        assert all(now[name] <= before[name] for name in now)
        before = now


@few
@given(
    sizes=widths,
    sparsity=sparsities,
    scope=scopes,
    seeds=st.tuples(seeds, seeds),
    multiple=st.sampled_from([1, 4]),
)
def test_asking_twice_removes_nothing_the_second_time_whatever_the_scores_are_then(
    sizes, sparsity, scope, seeds, multiple
):
    scores, original = scored(sizes, seeds[0])
    limits = Limits(scope, round_to=multiple)
    once = survivors(scores, keep_by_sparsity(scores, original, sparsity, limits))
    other = {name: score[: len(once[name])] for name, score in scored(sizes, seeds[1])[0].items()}
    for again in (once, other):
        assert counts(keep_by_sparsity(again, original, sparsity, limits)) == {n: len(s) for n, s in once.items()}


def test_asking_twice_removes_nothing_where_rounding_left_more_than_the_budget():
    descending, original = torch.arange(8, 0, -1.0), {"a": 8, "b": 8}
    limits = Limits("global", round_to=4)
    once = keep_by_sparsity({"a": descending, "b": descending - 2.5}, original, 0.4, limits)
    assert counts(once) == {"a": 8, "b": 4}, "a second block of 4 would leave fewer than 10 of 16"
    later = {"a": descending - 4.5, "b": descending[:4]}
    assert counts(keep_by_sparsity(later, original, 0.4, limits)) == {"a": 8, "b": 4}


def test_ties_go_to_the_lower_index():
    assert top(torch.tensor([1.0, 2.0, 1.0, 1.0]), 3).tolist() == [0, 1, 2]
    flat = {"a": torch.ones(4), "b": torch.ones(4)}
    kept = keep_by_sparsity(flat, {"a": 4, "b": 4}, 0.25, Limits("global"))
    assert {name: index.tolist() for name, index in kept.items()} == {"a": [0, 1, 2, 3], "b": [0, 1]}


# ==== Threshold ====


@few
@given(sizes=widths, seed=seeds, threshold=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.3]))
def test_threshold_removes_exactly_who_scores_under_its_share_of_the_mean(sizes, seed, threshold):
    scores, _ = scored(sizes, seed)
    for name, index in keep_by_threshold(scores, threshold, Limits()).items():
        score = scores[name].double()
        strong = [i for i, s in enumerate(score.tolist()) if s >= threshold * float(score.mean()) - 1e-7]
        assert index.tolist() == strong or (len(index) == 1 and not strong)


@pytest.mark.parametrize("value", [0.1, 0.3, 1e-6])
def test_threshold_of_equal_scores_removes_nobody(value):
    for n in range(1, 40):
        assert len(keep_by_threshold({"a": torch.full((n,), value)}, 1.0, Limits())["a"]) == n


def test_threshold_respects_the_limits():
    scores = {"a": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 10.0])}
    assert keep_by_threshold(scores, 0.6, Limits(min_neurons=2))["a"].tolist() == [0, 5]
    assert keep_by_threshold(scores, 0.6, Limits(round_to=4))["a"].tolist() == [0, 1, 2, 5]


# ==== Reductions of parameters or FLOPs ====


def chain_cost(sizes: list[int]) -> int:
    """Weights of an MLP with inputs 5, the hidden ``sizes``, and outputs 3."""
    line = [5, *sizes, 3]
    return sum(a * b for a, b in itertools.pairwise(line))


def chain_reduction(sizes: list[int]):
    return lambda alive: 1 - chain_cost(list(alive.values())) / chain_cost(sizes)


@few
@given(
    sizes=widths,
    target=st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.8, 0.999]),
    scope=scopes,
    seed=seeds,
    multiple=st.sampled_from([1, 4]),
)
def test_a_reduction_is_reached_and_one_block_less_in_some_layer_would_miss_it(sizes, target, scope, seed, multiple):
    scores, original = scored(sizes, seed)
    reduction, limits = chain_reduction(sizes), Limits(scope, round_to=multiple)
    kept = counts(keep_by_reduction(scores, original, target, limits, lambda k: reduction(counts(k))))
    assert all(width % multiple == 0 or width == original[name] for name, width in kept.items())
    if reduction(kept) < target:
        assert all(limits.next_width(width) is None for width in kept.values()), (
            "short only where nothing is left to go"
        )
    elif kept != original:
        wider = [
            kept | {n: min((w // multiple + 1) * multiple, original[n])} for n, w in kept.items() if w < original[n]
        ]
        assert any(reduction(other) < target for other in wider)


@few
@given(sizes=widths, target=st.sampled_from([0.05, 0.3, 0.5, 0.8]), scope=scopes, seed=seeds)
def test_a_reduction_takes_no_more_neurons_than_the_least_sparsity_that_reaches_it(sizes, target, scope, seed):
    scores, original = scored(sizes, seed)
    reduction, total = chain_reduction(sizes), sum(sizes)
    kept = counts(keep_by_reduction(scores, original, target, Limits(scope), lambda k: reduction(counts(k))))
    even = [counts(keep_by_sparsity(scores, original, m / total, Limits(scope))) for m in range(total + 1)]
    enough = [sum(widths.values()) for widths in even if reduction(widths) >= target]
    assert sum(kept.values()) >= max(enough, default=len(sizes))


def test_layers_of_one_width_give_one_neuron_and_not_one_each():
    scores = {name: torch.arange(1.0, 101) for name in "abcd"}
    original = dict.fromkeys("abcd", 100)
    removed = []
    for gone in range(1, 9):
        target = gone / 400
        kept = keep_by_reduction(scores, original, target, Limits(), lambda k: (400 - sum(map(len, k.values()))) / 400)
        removed.append(400 - sum(map(len, kept.values())))
    assert removed == [1, 2, 3, 4, 5, 6, 7, 8]


@few
@given(sizes=widths, target=st.sampled_from([0.05, 0.3, 0.5, 0.8]), scope=scopes, seeds=st.tuples(seeds, seeds))
def test_asking_twice_for_a_reduction_removes_nothing_the_second_time(sizes, target, scope, seeds):
    scores, original = scored(sizes, seeds[0])
    reduction = chain_reduction(sizes)

    def keep(alive):
        return keep_by_reduction(alive, original, target, Limits(scope), lambda k: reduction(counts(k)))

    once = survivors(scores, keep(scores))
    other = {name: score[: len(once[name])] for name, score in scored(sizes, seeds[1])[0].items()}
    assert counts(keep(other)) == {name: len(score) for name, score in once.items()}


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_parameter_reduction_counts_the_biases_that_consumers_get(scope):
    x = torch.randn(20, 7, generator=torch.Generator().manual_seed(0))
    for target in [i / 20 for i in range(1, 15)]:
        pruner = tnvp.Pruner(mlp(bias=False), example_inputs=x, criterion="l1", compensation="mean")
        report = pruner.prune(parameter_reduction=target, scope=scope, calibration=[x])
        assert target <= report.parameter_sparsity < target + 0.15
