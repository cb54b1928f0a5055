"""Greedy optimal brain surgeon on activations: which neuron costs least to remove next, and how much.

Removing position j of what a consumer reads, and letting the other positions take over by least squares, costs
‖w_j‖² / [C⁻¹]_jj of its squared output, C the covariance of what it reads; a neuron with several positions S costs
tr(W_Sᵀ ([C⁻¹]_SS)⁻¹ W_S) (Hassibi and Stork 1992; on a layer's activations OBC, Frantar and Alistarh 2022, and for
structures ZipLM, Kurtic et al. 2023). After each removal the weights and C⁻¹ are those of the smaller layer.

Shapes: N neurons, P positions, O outputs (times kernel), S positions of a neuron, padded to the largest number of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAZY = 64  # columns that gather before the large matrices are updated: many thin updates become one product
DAMPING = 1e-6  # λ, of the mean of C's diagonal


class Reader:
    """One consumer while neurons go, one by one.

    C⁻¹ and W stand as they were at the last `_flush`; what they are now is C⁻¹ − F·Fᵀ and W − F·V, with a column of F and a
    row of V for every position removed since (a pivoted Cholesky step each). Exact at any width: nothing is approximated
    but by rounding. ``blocks`` [N, S, S] and ``grams`` [N, S, S], [C⁻¹]_SS and W_S·W_Sᵀ of every neuron, follow at once.
    """

    def __init__(self, covariance: Tensor, weight: Tensor, neuron: Tensor, size: int):
        """``covariance`` [P, P], ``weight`` [P, O], ``neuron`` [P]: −1 belongs to another group, takes over, and stays."""
        damping = DAMPING * float(covariance.diagonal().mean()) or 1.0
        damped = covariance + damping * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
        self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        if weight.shape[1] > weight.shape[0]:  # losses need W·Wᵀ only: its triangular root [P, P] serves as well
            weight = torch.linalg.qr(weight.T, mode="r").R.T
        self.weight = weight
        self.positions, self.owned = _positions(neuron, size)
        self._start()
        self.blocks = self._own_block(self.inverse[self.positions[:, :, None], self.positions[:, None]])
        mine = self.weight[self.positions] * self.owned[..., None]
        self.grams = mine @ mine.mT

    def losses(self) -> Tensor:
        """What each neuron [N] would cost now."""
        if self.blocks.shape[1] == 1:
            return (self.grams / self.blocks).flatten()
        return torch.linalg.solve(self.blocks, self.grams).diagonal(dim1=1, dim2=2).sum(1)

    def remove(self, k: int) -> None:
        """Take neuron ``k`` away and let the others take over."""
        gone = self.positions[k][self.owned[k]]
        if not len(gone):
            return
        columns = self.inverse[gone].T - self.f @ self.f[gone].T  # [P, s]
        root = torch.linalg.cholesky(columns[gone])
        f = torch.linalg.solve_triangular(root, columns.T, upper=False).T
        v = torch.linalg.solve_triangular(root, self.weight[gone] - self.f[gone] @ self.v, upper=False)
        products = self.weight @ v.T - self.f @ (self.v @ v.T)  # W·vᵀ [P, s], W as it is now
        self.owned[k] = False
        own, cross = f[self.positions] * self.owned[..., None], products[self.positions] * self.owned[..., None]
        self.blocks = self._own_block(self.blocks - own @ own.mT)
        mixed = own @ cross.mT
        self.grams = (self.grams - mixed - mixed.mT + own @ (v @ v.T) @ own.mT) * self._pairs
        self.f, self.v = torch.cat([self.f, f], 1), torch.cat([self.v, v])
        self.alive[gone] = False
        if self.f.shape[1] >= LAZY:
            self._flush()

    @property
    def _pairs(self) -> Tensor:
        """[N, S, S]: whether both positions are the neuron's own, not padding."""
        return self.owned[:, :, None] & self.owned[:, None]

    def _own_block(self, blocks: Tensor) -> Tensor:
        """Padding and removed neurons read as the identity, which costs nothing and can be inverted."""
        identity = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device)
        return torch.where(self._pairs, blocks, identity)

    def _start(self) -> None:
        self.f = self.inverse.new_zeros(len(self.inverse), 0)
        self.v = self.weight.new_zeros(0, self.weight.shape[1])
        self.alive = torch.ones(len(self.inverse), dtype=torch.bool, device=self.inverse.device)

    def _flush(self) -> None:
        """Bring C⁻¹ and W up to date, and drop the positions that are gone."""
        kept = self.alive.nonzero().flatten()
        f = self.f[kept]
        self.inverse = self.inverse[kept][:, kept].addmm_(f, f.T, alpha=-1)
        self.weight = self.weight[kept].addmm_(f, self.v, alpha=-1)
        self.positions = (self.alive.cumsum(0) - 1)[self.positions] * self.owned
        self._start()


def _positions(neuron: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The positions [N, S] that each neuron owns, and which of these entries are no padding."""
    mine = (neuron >= 0).nonzero().flatten()
    order = mine[torch.sort(neuron[mine], stable=True).indices]
    share = torch.bincount(neuron[mine], minlength=size)
    owned = torch.arange(max(int(share.max()), 1), device=neuron.device) < share[:, None]
    positions = torch.zeros_like(owned, dtype=torch.long)
    positions[owned] = order
    return positions, owned


def removal_scores(readers: list[Reader], size: int) -> Tensor:
    """A score [N] that rises in the order of greedy removal: the cost when a neuron's turn came, or a little more than the
    one before it where that was dearer. Costs of several readers add up. Of equal costs the later neuron goes first.
    """
    alive = torch.ones(size, dtype=torch.bool, device=readers[0].inverse.device)
    order, costs = [], []
    for _ in range(size):
        loss = sum(reader.losses() for reader in readers).clamp(min=0)
        loss = torch.where(alive, loss, torch.inf)
        cost = loss.min()
        k = int((loss == cost).nonzero()[-1])
        alive[k] = False
        order.append(k)
        costs.append(float(cost))
        for reader in readers:
            reader.remove(k)
    return _rising(order, costs)


def _rising(order: list[int], costs: list[float]) -> Tensor:
    step, last = 1e-20 * max(costs) or 1e-30, -1.0
    score = torch.zeros(len(order), dtype=torch.double)
    for k, cost in zip(order, costs, strict=True):
        last = max(cost, last + max(1e-12 * last, step)) if last >= 0 else cost
        score[k] = last
    return score
