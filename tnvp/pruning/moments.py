"""Streaming mean, variance and covariance of a signal, and the merge of two streams.

Shapes: B samples (batch, and whatever else is averaged over), N neurons or positions, L locations of a feature, U = N/L.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import PruningError, damaged


def as_samples(x: Tensor, dim: int = -1) -> Tensor:
    """Reshape any signal to [B, N] with the neurons of dimension ``dim`` last; every other dimension is a sample."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def _accumulator(x: Tensor) -> torch.dtype:
    """float64 where the device has it: over 10^6 samples a float32 mean stops moving."""
    return torch.float32 if x.device.type == "mps" else torch.float64


class Moments:
    """Count, mean [N], variance [N] and, on request, covariance [U, U] of a stream of samples.

    Batches are merged pairwise (Chan, Golub and LeVeque 1979): with batch size b, mean m and sum of squared
    deviations s against n, µ, S: δ = m − µ; µ += δ·b/(n+b); S += s + δ²·n·b/(n+b). ``count`` is a Python integer.
    Nothing synchronises the device; a NaN or Inf stays in the moments and `require_finite` reports it.

    ``locations`` L > 1: the neurons are features in runs of L locations, as in a flattened [C, H, W], and the covariance is
    that of features within locations: every location is a sample, centred by its own mean. With L = 1, U = N.
    """

    def __init__(self, covariance: bool = False, locations: int = 1):
        self.count = 0
        self.mean: Tensor | None = None
        self._m2: Tensor | None = None
        self._comoment: Tensor | None = None
        self.tracks_covariance = covariance
        self.locations = locations

    @torch.no_grad()
    def update(self, x: Tensor, dim: int = -1) -> None:
        """Add the samples of ``x`` (any shape; neurons along ``dim``, the last by default)."""
        if x.numel():
            self.merge(Moments.of(x.detach(), dim, self.tracks_covariance, self.locations))

    @classmethod
    def of(cls, x: Tensor, dim: int = -1, covariance: bool = False, locations: int = 1) -> Moments:
        """Two-pass moments of one batch of any shape, neurons along ``dim``.

        The deviations' own mean r is what rounding left of the first pass (Chan, Golub and LeVeque 1983, "corrected
        two-pass"). Plain sums are 5 to 17 times as fast on a CPU as torch.var_mean, which updates sample by sample.
        """
        new = cls(covariance, locations)
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        x, dim = (x, dim % x.dim()) if x.dim() > 1 else (x[None], 1)
        others = [d for d in range(x.dim()) if d != dim]
        new.count = x.numel() // x.shape[dim]
        mean = x.mean(others, keepdim=True)
        deviations = x - mean
        accumulator = _accumulator(x)
        rest = deviations.mean(others).to(accumulator)
        new.mean = mean.flatten().to(accumulator) + rest
        new._m2 = (deviations.square().mean(others).to(accumulator) - rest.square()) * new.count
        if covariance:  # float64 also keeps autocast and TF32 out of the product
            centred = as_samples(deviations, dim).to(accumulator) - rest
            centred = centred.unflatten(1, (-1, locations)).movedim(1, -1).flatten(0, 1)  # [B·L, U]
            new._comoment = centred.T @ centred
        return new

    @torch.inference_mode(False)  # an inference tensor could not be added to later
    @torch.no_grad()
    def merge(self, other: Moments) -> None:
        """Add another stream's samples to this one: as if all had been seen here."""
        if other.count == 0:
            return
        self._require_fit(other)
        if self.count == 0:
            self.count, self.mean, self._m2 = other.count, other.mean.clone(), other._m2.clone()
            self._comoment = other._comoment.clone() if self.tracks_covariance else None
            return
        total = self.count + other.count
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / total)
        weight = self.count * other.count / total
        self._m2 = self._m2 + other._m2 + delta.square() * weight
        if self.tracks_covariance:
            self._merge_comoment(other, delta, between=weight)
        self.count = total

    def _require_fit(self, other: Moments) -> None:
        if self.tracks_covariance and (other._comoment is None or other.locations != self.locations):
            raise PruningError("cannot merge: this stream tracks a covariance and the other does not, or another one")
        if self.count and self.mean.shape != other.mean.shape:
            raise PruningError(f"cannot merge moments of {len(self.mean)} and of {len(other.mean)} neurons")

    def _merge_comoment(
        self, other: Moments, delta: Tensor, between: float, mine: float = 1.0, its: float = 1.0
    ) -> None:
        """In place, as [U, U] may be large: S ← mine·S + its·S' + between·δδᵀ, where δδᵀ is summed over locations."""
        shift = delta.unflatten(0, (-1, self.locations))
        self._comoment.addmm_(shift, shift.T, beta=mine, alpha=between).add_(other._comoment, alpha=its)

    @classmethod
    def restored(cls, values: dict, size: int, device: torch.device) -> Moments:
        """A copy, on ``device``, of the moments [N = ``size``] whose ``vars`` are ``values``. Raises where these are none."""
        new = cls()
        if values.keys() != vars(new).keys():
            raise damaged(f"{sorted(values)} were recorded where {sorted(vars(new))} should be")
        for name, usual in vars(new).items():
            value = values[name]
            if not isinstance(value, Tensor | None if usual is None else type(usual)):
                raise damaged(f"{name} of what was recorded is {value!r}")
        vars(new).update({k: v.to(device, copy=True) if isinstance(v, Tensor) else v for k, v in values.items()})
        new._require_shapes(size)
        return new

    def _require_shapes(self, size: int) -> None:
        if self.count < 0 or self.locations < 1 or size % self.locations:
            raise damaged(f"{self.count} samples at {self.locations} locations of {size} neurons were recorded")
        features = size // self.locations
        shapes = {"mean": (size,), "_m2": (size,)}
        if self.tracks_covariance:
            shapes["_comoment"] = (features, features)
        for name, shape in shapes.items() if self.count else ():
            found = getattr(self, name)
            if found is None or found.shape != shape or not found.is_floating_point():
                its = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise damaged(f"{name.strip('_')} of what was recorded is {its} and should be floats {list(shape)}")

    @property
    def variance(self) -> Tensor | None:
        """Unbiased (n − 1) variance [N]; None while there are fewer than two samples."""
        return self._m2 / (self.count - 1) if self.count > 1 else None

    @property
    def covariance(self) -> Tensor | None:
        """Unbiased covariance [U, U]; None while there are fewer than two samples."""
        if not self.tracks_covariance:
            raise PruningError("this stream was made without covariance=True")
        return self._comoment / (self.locations * (self.count - 1)) if self.count > 1 else None

    def select(self, index: Tensor) -> Moments:
        """The moments of the neurons ``index`` alone, in that order; with locations, whole features only."""
        new = copy.copy(self)
        if self.count:
            index = index.to(self.mean.device)
            new.mean, new._m2 = self.mean[index], self._m2[index]
            if self._comoment is not None:
                features = index[:: self.locations] // self.locations
                new._comoment = self._comoment[features][:, features]
        return new

    def pool(self, neuron: Tensor, size: int) -> Moments:
        """Merge positions into neurons: position p's samples belong to neuron ``neuron[p]`` (−1: to none)."""
        return Moments.pooled([(self, neuron)], size)

    @classmethod
    def pooled(cls, parts: Iterable[tuple[Moments, Tensor]], size: int) -> Moments:
        """Moments of ``size`` neurons from those of positions, part by part with the neuron (or −1) at each position.

        Neurons may own different numbers of samples: mean and variance are those of each neuron's own, and ``count`` is
        that of the neuron that has fewest. A neuron without any reads as a constant 0.
        """
        new, parts = cls(), [(moments, neuron) for moments, neuron in parts if moments.count]
        if not parts:
            return new
        owner, counts, mean, m2 = (torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True))
        zeros = mean.new_zeros(size)
        owned = zeros.index_add(0, owner, counts)
        new.mean = zeros.index_add(0, owner, counts * mean) / owned.clamp(min=1)
        spread = counts * (mean - new.mean[owner]).square()
        squares = zeros.index_add(0, owner, m2 + spread)
        fewest = torch.where(owned > 0, owned, torch.inf).amin()
        new.count = int(fewest) if bool(fewest.isfinite()) else 0
        new._m2 = torch.where(owned > new.count, squares * ((new.count - 1) / (owned - 1).clamp(min=1)), squares)
        return new

    def require_finite(self, where: str) -> None:
        """Raise if the stream ever held a NaN or an Inf: sorting would keep such a neuron for ever."""
        if self.count and not bool(torch.isfinite(self.mean).all() & torch.isfinite(self._m2).all()):
            bad = (~(torch.isfinite(self.mean) & torch.isfinite(self._m2))).nonzero().flatten().tolist()
            raise PruningError(
                f"NaN or Inf in the output recorded at {where} (neurons {bad[:8]}{'…' if len(bad) > 8 else ''}): "
                "lower the learning rate or find the step that diverged; nothing was pruned"
            )


def _columns(part: tuple[Moments, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Owner, sample count, mean and sum of squared deviations of each position that has an owner."""
    moments, neuron = part
    neuron = neuron.to(moments.mean.device)
    mine = neuron >= 0
    counts = torch.full_like(moments.mean[mine], moments.count)
    return neuron[mine], counts, moments.mean[mine], moments._m2[mine]


class DecayingMoments(Moments):
    """Exponentially weighted moments: each batch counts 1 − ``decay`` against the past (Finch 2009, section 9).

    Weights are normalised, so that the first batch alone gives its own moments. ``count`` is the number of samples seen.
    """

    def __init__(self, decay: float = 0.99, covariance: bool = False, locations: int = 1):
        super().__init__(covariance, locations)
        self.decay = decay
        self._weight = 0.0

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self, other: Moments) -> None:
        if other.count == 0:
            return
        self._weight = self.decay * self._weight + (1 - self.decay)
        if self.count == 0:
            return super().merge(other)
        self._require_fit(other)
        alpha = (1 - self.decay) / self._weight
        total = self.count + other.count
        mine, its = (1 - alpha) * total / self.count, alpha * total / other.count
        delta = other.mean - self.mean
        between = alpha * (1 - alpha) * total
        self.mean = self.mean + alpha * delta
        self._m2 = mine * self._m2 + its * other._m2 + between * delta.square()
        if self.tracks_covariance:
            self._merge_comoment(other, delta, between, mine, its)
        self.count = total
