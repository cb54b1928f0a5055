"""The laws of streaming moments: a stream equals two passes over its samples, however split or merged."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tnvp.pruning.errors import PruningError
from tnvp.pruning.moments import DecayingMoments, Moments

few = settings(max_examples=40, deadline=None, derandomize=True)
batch_sizes = st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1)


def samples(count: int, neurons: int = 3, seed: int = 0, mean: float = 5.0) -> torch.Tensor:
    """[B, N] float64; every neuron has a mean and a spread of its own, and neurons are correlated."""
    x = torch.randn(count, neurons, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x + x[:, :1]) * torch.arange(1, neurons + 1) + mean * torch.arange(neurons)


def streamed(x: torch.Tensor, sizes: list[int], covariance: bool = False) -> Moments:
    moments = Moments(covariance)
    for batch in x.split(sizes):
        moments.update(batch)
    return moments


def assert_are_moments_of(moments: Moments, x: torch.Tensor, rtol: float = 1e-10) -> None:
    assert moments.count == len(x) and type(moments.count) is int
    torch.testing.assert_close(moments.mean, x.double().mean(0), rtol=rtol, atol=rtol)
    torch.testing.assert_close(moments.variance, x.double().var(0), rtol=rtol, atol=rtol)


# ==== Streaming equals two-pass ====


@few
@given(sizes=batch_sizes, seed=st.integers(0, 99))
def test_a_stream_equals_two_passes_however_it_is_split(sizes, seed):
    x = samples(sum(sizes), seed=seed)
    moments = streamed(x, sizes, covariance=True)
    assert_are_moments_of(moments, x)
    torch.testing.assert_close(moments.covariance, torch.cov(x.T), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moments.covariance.diagonal(), moments.variance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("shape", "dim"), [((4, 5, 3), -1), ((4, 3, 5), 1), ((4, 3, 5, 2), 1), ((3,), 0)])
def test_every_dimension_but_the_neurons_is_a_sample(shape, dim):
    x = torch.randn(2, *shape, dtype=torch.float64)
    moments = Moments()
    for batch in x:
        moments.update(batch, dim=dim)
    flat = torch.cat([batch.transpose(dim, -1).reshape(-1, 3) for batch in x])
    assert_are_moments_of(moments, flat)


def a_million(mean: float = 1000.0) -> torch.Tensor:
    return torch.randn(10**6, 1, generator=torch.Generator().manual_seed(1)) + mean


def relative_error(variance: torch.Tensor, x: torch.Tensor) -> float:
    true = x.double().var(0)
    return float(((variance.double() - true) / true).abs().max())


@pytest.mark.parametrize("size", [1000, 10**6])
def test_float32_keeps_five_digits_of_the_variance_where_the_mean_is_a_thousand_times_the_std(size):
    x = a_million()
    assert x.dtype == torch.float32
    assert relative_error(streamed(x, [size] * (10**6 // size)).variance, x) < 1e-5


def test_the_naive_formula_fails_that_test():
    x = a_million()
    total, squares = torch.zeros(1), torch.zeros(1)
    for batch in x.split(1000):
        total, squares = total + batch.sum(0), squares + batch.square().sum(0)
    assert relative_error(squares / len(x) - (total / len(x)).square(), x) > 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_signals_accumulate_in_float32_or_better(dtype):
    x = (samples(20_000, mean=100.0) * 0.5).to(dtype)
    moments = streamed(x, [500] * 40, covariance=True)
    assert_are_moments_of(moments, x, rtol=1e-5)
    torch.testing.assert_close(moments.covariance, torch.cov(x.double().T), rtol=1e-4, atol=1e-4)
    for tensor in (moments.mean, moments.variance, moments.covariance):
        assert tensor.dtype in (torch.float32, torch.float64)


def test_counts_are_integers_beyond_two_to_the_24():
    x = samples(2)
    moments = streamed(x, [2])
    for _ in range(25):
        moments.merge(copy.deepcopy(moments))
    moments.update(x[:1])
    assert moments.count == 2**26 + 1 and type(moments.count) is int
    torch.testing.assert_close(moments.variance, x.var(0, correction=0), rtol=1e-6, atol=0)


# ==== Too few samples, and bad ones ====


def test_a_single_sample_has_no_variance_yet():
    moments = Moments(covariance=True)
    assert (moments.count, moments.mean, moments.variance, moments.covariance) == (0, None, None, None)
    moments.update(samples(1))
    assert moments.count == 1 and moments.variance is None and moments.covariance is None
    moments.update(samples(1, seed=1))
    assert bool((moments.variance > 0).all())


def test_an_empty_batch_changes_nothing():
    moments = streamed(samples(4), [0, 4, 0])
    assert_are_moments_of(moments, samples(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("before", [0, 3])
def test_nan_or_inf_is_an_error_that_names_the_layer_and_the_neuron_however_long_ago(bad, before):
    x = samples(9)
    x[before, 1] = bad
    moments = streamed(x, [3, 3, 3])
    with pytest.raises(PruningError, match=r"NaN or Inf.*features\.0.*\[1\]"):
        moments.require_finite("features.0")
    streamed(samples(9), [3, 3, 3]).require_finite("features.0")


def test_covariance_only_on_request():
    moments = streamed(samples(4), [4])
    with pytest.raises(PruningError, match="covariance=True"):
        _ = moments.covariance
    with pytest.raises(PruningError, match="covariance"):
        streamed(samples(4), [4], covariance=True).merge(moments)


def covariance_within_locations(x: torch.Tensor, locations: int) -> torch.Tensor:
    """The mean of the covariances [U, U] at each of ``locations`` places of [B, U·L], written out."""
    return sum(torch.cov(x[:, place::locations].T) for place in range(locations)) / locations


@few
@given(sizes=batch_sizes, locations=st.integers(1, 4), seed=st.integers(0, 99))
def test_covariance_within_locations_centres_each_feature_by_its_own_mean(sizes, locations, seed):
    x = samples(sum(sizes), neurons=2 * locations, seed=seed)
    moments = Moments(covariance=True, locations=locations)
    for batch in x.split(sizes):
        moments.update(batch)
    torch.testing.assert_close(moments.covariance, covariance_within_locations(x, locations), rtol=1e-9, atol=1e-9)
    assert_are_moments_of(moments, x)


def test_a_covariance_is_added_to_in_place_in_and_out_of_inference_mode():
    x = samples(9)
    moments = Moments(covariance=True)
    with torch.inference_mode():
        moments.update(x[:3])
    where = moments._comoment.data_ptr()
    moments.update(x[3:6])
    with torch.inference_mode():
        moments.update(x[6:])
    assert moments._comoment.data_ptr() == where
    torch.testing.assert_close(moments.covariance, torch.cov(x.T))


def test_merging_leaves_the_others_covariance_alone():
    one, other = (streamed(samples(5, seed=seed), [5], covariance=True) for seed in (0, 1))
    before = other.covariance
    one.merge(other)
    one.merge(other)
    fresh = Moments(covariance=True)
    fresh.merge(other)
    fresh.merge(one)
    assert torch.equal(other.covariance, before)


def test_streams_of_different_covariances_do_not_merge():
    one, other = Moments(True, locations=1), Moments(True, locations=2)
    for moments in (one, other):
        moments.update(samples(4, neurons=4))
    with pytest.raises(PruningError, match="another one"):
        one.merge(other)


def test_keeps_no_graph():
    x = samples(4).requires_grad_()
    moments = streamed(x, [2, 2], covariance=True)
    assert not any(t.requires_grad for t in (moments.mean, moments.variance, moments.covariance))


# ==== Merging ====


@few
@given(sizes=st.lists(st.integers(1, 6), min_size=3, max_size=3), seed=st.integers(0, 99))
def test_merging_is_concatenating_in_any_order_and_grouping(sizes, seed):
    x = samples(sum(sizes), seed=seed)
    if len(x) < 2:
        return

    def merged(order, left: bool) -> Moments:
        a, b, c = (streamed(x.split(sizes)[i], [sizes[i]], covariance=True) for i in order)
        if left:
            a.merge(b)
            a.merge(c)
            return a
        b.merge(c)
        a.merge(b)
        return a

    for order, left in (((0, 1, 2), True), ((0, 1, 2), False), ((2, 0, 1), True)):
        moments = merged(order, left)
        assert_are_moments_of(moments, x)
        torch.testing.assert_close(moments.covariance, torch.cov(x.T), rtol=1e-9, atol=1e-9)


def test_merging_with_nothing_is_the_identity_and_never_touches_the_other():
    x = samples(6)
    full, empty = streamed(x, [6]), Moments()
    full.merge(Moments())
    assert_are_moments_of(full, x)
    empty.merge(full)
    assert_are_moments_of(empty, x)
    empty.update(x)
    assert_are_moments_of(full, x)


def test_streams_of_different_widths_do_not_merge():
    with pytest.raises(PruningError, match="3 and of 2 neurons"):
        streamed(samples(4), [4]).merge(streamed(samples(4, neurons=2), [4]))


# ==== Choosing and pooling neurons ====


def test_selected_moments_are_those_of_the_selected_neurons():
    x = samples(8, neurons=5)
    moments = streamed(x, [8], covariance=True)
    chosen = moments.select(torch.tensor([3, 0]))
    assert_are_moments_of(chosen, x[:, [3, 0]])
    torch.testing.assert_close(chosen.covariance, torch.cov(x[:, [3, 0]].T))
    chosen.update(x[:, [3, 0]])
    assert_are_moments_of(moments, x)
    assert Moments().select(torch.tensor([1])).count == 0


def test_selected_features_keep_their_covariance_within_locations():
    x = samples(8, neurons=6)
    moments = Moments(covariance=True, locations=2)
    moments.update(x[:5])
    chosen = moments.select(torch.tensor([0, 1, 4, 5]))
    for stream, rows in ((chosen, x[5:, [0, 1, 4, 5]]), (moments, x[5:])):
        stream.update(rows)
    torch.testing.assert_close(chosen.covariance, covariance_within_locations(x[:, [0, 1, 4, 5]], 2))
    torch.testing.assert_close(moments.covariance, covariance_within_locations(x, 2))


def test_pooling_the_positions_of_a_flattened_channel_makes_every_position_a_sample():
    x = torch.randn(6, 3, 4, dtype=torch.float64) + torch.arange(12).reshape(3, 4)  # [B, channels, space]
    position = torch.arange(3).repeat_interleave(4)
    pooled = streamed(x.flatten(1), [2, 4]).pool(position, 3)
    assert_are_moments_of(pooled, x.movedim(1, -1).reshape(-1, 3))
    backwards = streamed(x.flatten(1).flip(1), [6]).pool(position.flip(0), 3)
    assert_are_moments_of(backwards, x.movedim(1, -1).reshape(-1, 3))


def test_pooling_leaves_out_positions_of_other_groups():
    x = samples(6, neurons=5)
    pooled = streamed(x, [6]).pool(torch.tensor([1, -1, 0, -1, 2]), 3)
    assert_are_moments_of(pooled, x[:, [2, 0, 4]])
    assert Moments().pool(torch.tensor([0]), 1).count == 0


@few
@given(owners=st.lists(st.integers(-1, 3), min_size=4, max_size=9), count=st.integers(2, 5))
def test_neurons_may_own_different_numbers_of_positions(owners, count):
    x = samples(count, neurons=len(owners))
    pooled = streamed(x, [count]).pool(torch.tensor(owners), 4)
    shares = [owners.count(neuron) for neuron in range(4)]
    assert pooled.count == count * min((share for share in shares if share), default=0)
    for neuron in range(4) if any(shares) else ():
        mine = x[:, [position for position, owner in enumerate(owners) if owner == neuron]].flatten()
        if len(mine):
            torch.testing.assert_close(pooled.mean[neuron], mine.mean())
            torch.testing.assert_close(pooled.variance[neuron], mine.var())
        else:
            assert pooled.mean[neuron] == pooled.variance[neuron] == 0


def test_pooling_streams_of_different_counts_counts_each_sample_once():
    one, two = samples(4), samples(7, seed=1)
    parts = [(streamed(one, [4]), torch.tensor([0, 1, -1])), (streamed(two, [7]), torch.tensor([1, -1, 2]))]
    pooled = Moments.pooled(parts, 3)
    assert pooled.count == 4
    for neuron, mine in enumerate((one[:, 0], torch.cat([one[:, 1], two[:, 0]]), two[:, 2])):
        torch.testing.assert_close(pooled.mean[neuron], mine.mean())
        torch.testing.assert_close(pooled.variance[neuron], mine.var())


# ==== Exponentially weighted ====


@few
@given(sizes=st.lists(st.integers(2, 6), min_size=1, max_size=6), decay=st.sampled_from([0.5, 0.9, 0.99]))
def test_ema_equals_the_weighted_sums_written_out(sizes, decay):
    x = samples(sum(sizes))
    moments = DecayingMoments(decay, covariance=True)
    for batch in x.split(sizes):
        moments.update(batch)
    weight = torch.tensor([decay ** (len(sizes) - 1 - i) for i in range(len(sizes))], dtype=torch.float64)
    per_sample = torch.cat([(w / weight.sum() / n).expand(n) for w, n in zip(weight, sizes, strict=True)])[:, None]
    mean = (per_sample * x).sum(0)
    population = (per_sample * (x - mean).square()).sum(0)
    assert moments.count == len(x)
    torch.testing.assert_close(moments.mean, mean)
    torch.testing.assert_close(moments.variance, population * len(x) / (len(x) - 1))
    covariance = (per_sample * (x - mean)).T @ (x - mean)
    torch.testing.assert_close(moments.covariance, covariance * len(x) / (len(x) - 1))


def test_ema_of_one_batch_is_the_batch_and_of_one_sample_has_no_variance():
    x = samples(5)
    moments = DecayingMoments()
    moments.update(x[:1])
    assert moments.variance is None
    moments = DecayingMoments()
    moments.update(x)
    assert_are_moments_of(moments, x)


def test_ema_forgets():
    moments = DecayingMoments(0.5)
    for batch in samples(40).split(4):
        moments.update(batch + 1000)
    for batch in samples(160).split(4):
        moments.update(batch)
    assert bool((moments.mean < 100).all()) and bool((moments.variance < 100).all())
