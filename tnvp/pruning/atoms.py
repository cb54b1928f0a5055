"""Atoms: a number for every neuron that a layer writes, and which of them are one neuron after all.

A field holds the atoms of a tensor: a tensor of as many dimensions, of the same size where the atoms vary and of size 1 where they
don't; −1 stands where no neuron is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

NO_NEURON = -1


class Atoms:
    """A union-find over atoms, and the reasons why some can't be pruned."""

    def __init__(self):
        self.parent: list[int] = []
        self.reasons: dict[int, str] = {}

    def new(self, size: int) -> Tensor:
        """``size`` atoms [size] that nobody has yet."""
        start = len(self.parent)
        self.parent.extend(range(start, start + size))
        return torch.arange(start, start + size)

    def root(self, atom: int) -> int:
        """The number that all atoms of one neuron share; −1 stays −1."""
        if atom == NO_NEURON:
            return NO_NEURON
        while self.parent[atom] != atom:
            self.parent[atom] = self.parent[self.parent[atom]]
            atom = self.parent[atom]
        return atom

    def roots(self, field: Tensor) -> Tensor:
        atoms, where = field.unique(return_inverse=True)
        return torch.tensor([self.root(atom) for atom in atoms.tolist()], dtype=torch.long)[where]

    def unite(self, a: Tensor, b: Tensor, reason: str) -> Tensor:
        """Make one neuron of each pair; an atom that meets no neuron can't be pruned, for ``reason``. Returns the roots."""
        a, b = torch.broadcast_tensors(a, b)
        pairs = torch.stack([a.flatten(), b.flatten()]).unique(dim=1)
        for x, y in pairs.T.tolist():
            if x == NO_NEURON or y == NO_NEURON:
                self._block(max(x, y), reason)
            else:
                x, y = sorted((self.root(x), self.root(y)))
                self.parent[y] = x
        return self.roots(torch.maximum(a, b))

    def tie(self, field: Tensor, dim: int, reason: str) -> Tensor:
        """Make one neuron of all that stand along ``dim``; the field is of size 1 there afterwards."""
        first = field.narrow(dim, 0, 1)
        for i in range(1, field.shape[dim]):
            first = self.unite(first, field.narrow(dim, i, 1), reason)
        return first

    def tie_all_but(self, field: Tensor, dim: int, reason: str) -> Tensor:
        """Tie along every dimension but ``dim``: each position along it is one neuron then. Returns the field [P]."""
        rows = field.movedim(dim, 0).flatten(1) if field.dim() > 1 else field[:, None]
        return self.tie(rows, 1, reason).flatten() if rows.shape[1] > 1 else self.roots(rows[:, 0])

    def compact(self, field: Tensor) -> Tensor:
        """The field with size 1 wherever its neurons don't vary."""
        field = self.roots(field) if field.is_contiguous() else field
        for dim in range(field.dim()):
            first = field.narrow(dim, 0, 1)
            if field.shape[dim] > 1 and (field.stride(dim) == 0 or bool((field == first).all())):
                field = first
        return self.roots(field)

    def block(self, fields: Iterable[Tensor], reason: str) -> None:
        for field in fields:
            for atom in field.unique().tolist():
                self._block(atom, reason)

    def _block(self, atom: int, reason: str) -> None:
        if atom != NO_NEURON:
            self.reasons.setdefault(atom, reason)


def varying(field: Tensor) -> set[int]:
    """The dimensions along which the neurons of a field vary."""
    return {dim for dim, size in enumerate(field.shape) if size > 1}


def along(atoms: Tensor, dim: int, dims: int) -> Tensor:
    """Values [P] shaped to lie along dimension ``dim`` of ``dims``."""
    return atoms.reshape([-1 if d == dim else 1 for d in range(dims)])
