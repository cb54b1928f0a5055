"""Streaming mean, variance and covariance of a signal, and the merge of two streams.

Shapes: B samples (batch, and whatever else is averaged over), N neurons.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from .errors import PruningError


def as_samples(x: Tensor, dim: int = -1) -> Tensor:
    """Reshape any signal to [B, N] with the neurons of dimension ``dim`` last; every other dimension is a sample."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def _accumulator(x: Tensor) -> torch.dtype:
    """float64 where the device has it: over 10^6 samples a float32 mean stops moving."""
    return torch.float32 if x.device.type == "mps" else torch.float64


class Moments:
    """Count, mean [N], variance [N] and, on request, covariance [N, N] of a stream of samples.

    Batches are merged pairwise (Chan, Golub and LeVeque 1979): with batch size b, mean m and sum of squared
    deviations s against n, µ, S: δ = m − µ; µ += δ·b/(n+b); S += s + δ²·n·b/(n+b). ``count`` is a Python integer.
    Nothing synchronises the device; a NaN or Inf stays in the moments and `require_finite` reports it.
    """

    def __init__(self, covariance: bool = False):
        self.count = 0
        self.mean: Tensor | None = None
        self._m2: Tensor | None = None
        self._comoment: Tensor | None = None
        self.tracks_covariance = covariance

    @torch.no_grad()
    def update(self, x: Tensor, dim: int = -1) -> None:
        """Add the samples of ``x`` (any shape; neurons along ``dim``, the last by default)."""
        samples = as_samples(x.detach(), dim)
        if samples.shape[0]:
            self.merge(Moments.of(samples, covariance=self.tracks_covariance))

    @classmethod
    def of(cls, samples: Tensor, covariance: bool = False) -> Moments:
        """Two-pass moments of one batch [B, N]."""
        new = cls(covariance)
        samples = samples if samples.dtype in (torch.float32, torch.float64) else samples.float()
        variance, mean = torch.var_mean(samples, dim=0, correction=0)
        accumulator = _accumulator(samples)
        new.count = samples.shape[0]
        new.mean = mean.to(accumulator)
        new._m2 = variance.to(accumulator) * new.count
        if covariance:
            deviations = samples - mean
            new._comoment = (deviations.T @ deviations).to(accumulator)
        return new

    @torch.no_grad()
    def merge(self, other: Moments) -> None:
        """Add another stream's samples to this one: as if all had been seen here."""
        if other.count == 0:
            return
        if self.tracks_covariance and other._comoment is None:
            raise PruningError("cannot merge: this stream tracks the covariance and the other does not")
        if self.count == 0:
            self.count, self.mean, self._m2 = other.count, other.mean.clone(), other._m2.clone()
            self._comoment = other._comoment.clone() if self.tracks_covariance else None
            return
        if self.mean.shape != other.mean.shape:
            raise PruningError(f"cannot merge moments of {len(self.mean)} and of {len(other.mean)} neurons")
        total = self.count + other.count
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / total)
        weight = self.count * other.count / total
        self._m2 = self._m2 + other._m2 + delta.square() * weight
        if self.tracks_covariance:
            self._comoment = self._comoment + other._comoment + torch.outer(delta, delta) * weight
        self.count = total

    @property
    def variance(self) -> Tensor | None:
        """Unbiased (n − 1) variance [N]; None while there are fewer than two samples."""
        return self._m2 / (self.count - 1) if self.count > 1 else None

    @property
    def covariance(self) -> Tensor | None:
        """Unbiased covariance [N, N]; None while there are fewer than two samples."""
        if not self.tracks_covariance:
            raise PruningError("this stream was made without covariance=True")
        return self._comoment / (self.count - 1) if self.count > 1 else None

    def select(self, index: Tensor) -> Moments:
        """The moments of the neurons ``index`` alone, in that order."""
        new = copy.copy(self)
        if self.count:
            index = index.to(self.mean.device)
            new.mean, new._m2 = self.mean[index], self._m2[index]
            if self._comoment is not None:
                new._comoment = self._comoment[index][:, index]
        return new

    def pool(self, neuron: Tensor, size: int) -> Moments:
        """Merge positions into neurons: position p's samples belong to neuron ``neuron[p]`` (−1: to none).

        Every neuron must own the same number of positions, as the H·W features of a flattened channel do.
        """
        new = Moments()
        if self.count == 0:
            return new
        neuron = neuron.to(self.mean.device)
        mine = neuron >= 0
        owners, mean, m2 = neuron[mine], self.mean[mine], self._m2[mine]
        share = len(owners) // size
        zeros = mean.new_zeros(size)
        new.mean = zeros.index_add(0, owners, mean) / share
        spread = (mean - new.mean[owners]).square() * self.count
        new._m2 = zeros.index_add(0, owners, m2 + spread)
        new.count = self.count * share
        return new

    def require_finite(self, where: str) -> None:
        """Raise if the stream ever held a NaN or an Inf: sorting would keep such a neuron for ever."""
        if self.count and not bool(torch.isfinite(self.mean).all() & torch.isfinite(self._m2).all()):
            bad = (~(torch.isfinite(self.mean) & torch.isfinite(self._m2))).nonzero().flatten().tolist()
            raise PruningError(
                f"NaN or Inf in the output recorded at {where} (neurons {bad[:8]}{'…' if len(bad) > 8 else ''}): "
                "lower the learning rate or find the step that diverged; nothing was pruned"
            )


class DecayingMoments(Moments):
    """Exponentially weighted moments: each batch counts 1 − ``decay`` against the past (Finch 2009, section 9).

    Weights are normalised, so that the first batch alone gives its own moments. ``count`` is the number of samples seen.
    """

    def __init__(self, decay: float = 0.99):
        super().__init__()
        self.decay = decay
        self._weight = 0.0

    @torch.no_grad()
    def merge(self, other: Moments) -> None:
        if other.count == 0:
            return
        self._weight = self.decay * self._weight + (1 - self.decay)
        alpha = (1 - self.decay) / self._weight
        total = self.count + other.count
        if self.count == 0:
            self.mean, population = other.mean.clone(), other._m2 / other.count
        else:
            delta = other.mean - self.mean
            population = (1 - alpha) * self._m2 / self.count + alpha * other._m2 / other.count
            population = population + alpha * (1 - alpha) * delta.square()
            self.mean = self.mean + alpha * delta
        self.count, self._m2 = total, population * total
