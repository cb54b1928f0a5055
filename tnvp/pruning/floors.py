"""No layer loses all its neurons, also where it writes or reads only a part of its group's.

The layers whose outputs are concatenated and then added to another's share one group, but each holds its own part of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .channels import NeuronGroup
from .compensation import complement
from .selection import Kept, Limits, Scores, top


def with_floors(groups: Iterable[NeuronGroup], kept: Kept, living: Kept, scores: Scores, limits: Limits) -> Kept:
    """``kept`` and, where a layer would fall under ``limits.min_neurons``, its neurons of highest score that are ``living``."""
    whole = dict(kept)
    for group in groups:
        if group.name not in kept:
            continue
        alive, stays, score = living[group.name], kept[group.name], scores[group.name]
        for neurons in group.maps.values():
            part = alive[torch.isin(alive, neurons)]
            lost = part[~torch.isin(part, stays)]
            stays = _with_best(stays, lost, limits.min_neurons - (len(part) - len(lost)), score)
        if len(stays) > len(kept[group.name]):
            others = complement(stays, group.size)
            others = others[torch.isin(others, alive)]
            stays = _with_best(stays, others, -len(stays) % limits.round_to, score)
        whole[group.name] = stays
    return whole


def _with_best(stays: Tensor, others: Tensor, count: int, score: Tensor) -> Tensor:
    """``stays`` and the ``count`` best of ``others``, in order."""
    if count <= 0:
        return stays
    return torch.cat([stays, others[top(score[others], count)]]).sort().values
