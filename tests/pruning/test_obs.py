"""Greedy removal against least squares from scratch: after every removal, the cost of every candidate is solved anew."""

from __future__ import annotations

import pytest
import torch

from tnvp.pruning import obs
from tnvp.pruning.obs import DAMPING, Reader, removal_scores

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # activations [B, P], weight [P, O], neuron [P]


def layer(neuron: list[int], outputs: int, seed: int = 0, samples: int = 40) -> Layer:
    """Correlated activations of different spread."""
    generator = torch.Generator().manual_seed(seed)
    positions = len(neuron)
    x = torch.randn(samples, positions, generator=generator, dtype=torch.double)
    x = x @ torch.randn(positions, positions, generator=generator, dtype=torch.double) + 3
    return x, torch.randn(positions, outputs, generator=generator, dtype=torch.double), torch.tensor(neuron)


def readers(layers: list[Layer], size: int) -> list[Reader]:
    return [Reader(torch.cov(x.T), weight, neuron, size) for x, weight, neuron in layers]


def loss_without(removed: list[int], layers: list[Layer]) -> float:
    """Squared error of the outputs, when the positions of all but ``removed`` are fitted to them by ridge regression."""
    total = 0.0
    for x, weight, neuron in layers:
        damping = DAMPING * float(x.var(0).mean())
        rows = torch.cat([(x - x.mean(0)) / (len(x) - 1) ** 0.5, damping**0.5 * torch.eye(x.shape[1], dtype=x.dtype)])
        kept = ~torch.isin(neuron, torch.tensor(removed))
        wanted = rows @ weight
        fitted = rows[:, kept] @ torch.linalg.lstsq(rows[:, kept], wanted).solution if kept.any() else 0
        total += float((wanted - fitted).square().sum())
    return total


def greedy(layers: list[Layer], size: int) -> tuple[list[int], list[float]]:
    """Order of removal and the cost of each, by brute force."""
    removed, costs, before = [], [], 0.0
    while len(removed) < size:
        after = {k: loss_without([*removed, k], layers) for k in range(size) if k not in removed}
        best = min(after, key=after.get)
        costs.append(after[best] - before)
        before = after[best]
        removed.append(best)
    return removed, costs


CASES = {
    "single": [layer(list(range(9)), 4)],
    "wide_output": [layer(list(range(9)), 30)],
    "blocks": [layer([k // 3 for k in range(18)], 5)],
    "unequal_blocks_of_any_order": [layer([3, 0, 0, 1, 2, 0, 1, 4, 2, 0], 6)],
    "others_take_over": [layer([0, -1, 1, 2, -1, 3, 4], 3)],
    "two_consumers": [layer(list(range(6)), 4), layer([k // 2 for k in range(12)], 3, seed=1)],
    "consumers_of_a_part": [layer([0, 1, 2, -1], 4), layer([2, 3, 4, -1, 5], 7, seed=2)],
}


@pytest.mark.parametrize("lazy", [1, 4, 64])
@pytest.mark.parametrize("case", CASES)
def test_order_and_costs_are_those_of_least_squares_from_scratch(case, lazy, monkeypatch):
    monkeypatch.setattr(obs, "LAZY", lazy)
    layers = CASES[case]
    size = 1 + max(int(neuron.max()) for _, _, neuron in layers)
    order, costs = greedy(layers, size)
    scores = removal_scores(readers(layers, size), size)
    assert scores.argsort().tolist() == order
    rising = torch.tensor(costs, dtype=torch.double).cummax(0).values
    torch.testing.assert_close(scores[order], rising, rtol=1e-6, atol=1e-9)


def test_first_losses_are_the_closed_formula():
    x, weight, _ = CASES["single"][0]
    covariance = torch.cov(x.T)
    damped = covariance + DAMPING * covariance.diagonal().mean() * torch.eye(9, dtype=torch.double)
    expected = weight.square().sum(1) / torch.linalg.inv(damped).diagonal()
    torch.testing.assert_close(readers(CASES["single"], 9)[0].losses(), expected)


def test_one_of_each_twin_goes_for_nothing_and_the_other_is_dear():
    x, weight, _ = layer(list(range(40)), 8, samples=200)
    twins = [(torch.cat([x, x], 1), torch.cat([weight, weight.flip(0)]), torch.arange(80))]
    scores = removal_scores(readers(twins, 80), 80)
    pairs = torch.stack([scores[:40], scores[40:]])
    assert pairs.amax(0).min() > 100 * pairs.amin(0).max()


def test_what_costs_nothing_goes_first_and_scores_rise_strictly_to_the_last():
    x, weight, neuron = layer(list(range(12)), 4)
    weight[[2, 5, 7]] = 0
    scores = removal_scores(readers([(x, weight, neuron)], 12), 12)
    order = scores.argsort()
    assert order[:3].tolist() == [7, 5, 2], "of equal costs the later neuron goes first"
    assert bool((scores[order].diff() > 0).all()) and float(scores[7]) == 0
    assert float(scores[2]) < 1e-15 * float(scores[order[3]])


def test_the_scale_of_activations_and_weights_scales_the_costs():
    x, weight, neuron = layer(list(range(7)), 4)
    one, two = (removal_scores(readers([(a * x, b * weight, neuron)], 7), 7) for a, b in ((1, 1), (1e-3, 1e5)))
    torch.testing.assert_close(two, 1e4 * one, rtol=1e-6, atol=0)


def test_without_any_variance_every_neuron_still_gets_a_score_of_its_own():
    scores = removal_scores([Reader(torch.zeros(5, 5), torch.zeros(5, 3), torch.arange(5), 5)], 5)
    assert bool(torch.isfinite(scores).all()) and len(set(scores.tolist())) == 5
