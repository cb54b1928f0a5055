"""Pruner: record while the network trains, then score, select, compensate, shrink and migrate the optimizer."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from numbers import Real

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from .calibration import calibration_batches, on_device_of, outputs, relative_error
from .channels import NeuronGroup, NeuronGroups, as_arguments, complete_groups, copy_of, layer_names
from .compensation import COMPENSATIONS, constants
from .cost import flop_count, parameter_count
from .criteria import COUPLINGS, CRITERIA, Evidence, Side
from .errors import PruningError
from .graph import find_groups
from .layers import kind_of
from .optimizer_state import check_kind, check_membership, execute_migration, known_names, plan_migration
from .recorder import Recorder, TraceRow
from .report import PruneReport, group_report
from .selection import Kept, Limits, Scores, keep_by_reduction, keep_by_sparsity, keep_by_threshold
from .surgery import Cuts, ParameterChange, cuts_for, execute, plan
from .trial import failing


class Pruner:
    """Watches a network's neurons while it trains and removes those that hardly vary.

    Args:
        model: any network torch.fx can trace, changed in place by `prune`.
        optimizer: its optimizer, or several in a list, which follow every event; None if there is none yet.
        example_inputs: what one forward pass takes, a tensor or a tuple; traces the network and counts FLOPs.
        criterion: a name in `CRITERIA`. compensation: a name in `COMPENSATIONS`.
        window: what scores look at: "cumulative", "since_prune" or "ema".
        ignore: names of layers whose neurons stay.
        groups: neuron groups by hand, for networks that can't be traced.
        averaged: averaged copies of the model (EMA, SWA), cut alike; may be set later.
        coupled: how the scores of several layers that write or read one group are combined: "mean", "sum" or "max".
        seed: of the criterion "random".

    Raises:
        PruningError: bad arguments, an unknown name, nothing prunable.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        example_inputs: Tensor | tuple | None = None,
        criterion: str = "variance",
        compensation: str = "mean",
        window: str = "cumulative",
        ignore: Iterable[str] = (),
        groups: Sequence[NeuronGroup] | None = None,
        averaged: Iterable[nn.Module] = (),
        coupled: str = "mean",
        seed: int = 0,
    ):
        _choose("criterion", criterion, CRITERIA)
        _choose("compensation", compensation, COMPENSATIONS)
        _choose("coupled", coupled, COUPLINGS)
        if example_inputs is None and groups is None:
            raise PruningError("give example_inputs (to trace the network) or groups (by hand)")
        self.model, self.optimizer, self.averaged = model, optimizer, list(averaged)
        self.criterion, self.compensation, self.coupled = criterion, compensation, coupled
        self._inputs = None if example_inputs is None else as_arguments(example_inputs)
        self._generator = torch.Generator().manual_seed(seed)
        self.groups = explain(model, example_inputs) if groups is None else complete_groups(model, groups)
        self._ignore(ignore)
        self._proven = groups is None
        self._prove(self._inputs)
        self._require_something_prunable()
        self._check_optimizers()
        self._original = {group.name: group.size for group in self.groups if group.prunable}
        self._parameters, self._flops = parameter_count(model), self._count_flops(model)
        signals = (CRITERIA[criterion].signal, COMPENSATIONS[compensation])
        self._recorder = Recorder(model, self.groups, dict.fromkeys(s for s in signals if s) or ("activation",), window)

    # Recording.

    def record(self, covariance: bool = True) -> AbstractContextManager[None]:
        """Watch every forward pass inside the block; the result of the forward never changes.

        The covariance that "obs" needs costs most of the recording. Where `prune` will get calibration batches, it is
        measured on these: ``covariance=False`` then leaves it out here.
        """
        return self._recorder.record(covariance)

    def paused(self) -> AbstractContextManager[None]:
        """Inside, nothing is recorded: for validation within a `record` block."""
        return self._recorder.paused()

    def close_window(self, step: int | None = None) -> None:
        """End a recording window: its moments become rows of `trace`. ``step`` defaults to the batches seen."""
        self._recorder.close_window(self._recorder.batches if step is None else step)

    @property
    def trace(self) -> list[TraceRow]:
        """One row per group and closed window."""
        return self._recorder.trace

    @property
    def widths(self) -> dict[str, int]:
        """Prunable group → neurons alive."""
        return {group.name: group.size for group in self.groups if group.prunable}

    def reductions(self) -> dict[str, float | None]:
        """How far the network is from the original, as fractions removed: neurons (of prunable groups), parameters, FLOPs."""
        return {
            "neuron_sparsity": 1 - sum(self.widths.values()) / sum(self._original.values()),
            "parameter_sparsity": self._parameter_reduction(self.model),
            "flops_reduction": self._flops_reduction(self.model),
        }

    # Pruning.

    def prune(
        self,
        *,
        sparsity: float | None = None,
        threshold: float | None = None,
        flops_reduction: float | None = None,
        parameter_reduction: float | None = None,
        scope: str = "layer",
        min_neurons: int = 1,
        round_to: int = 1,
        normalize: str = "none",
        calibration: Iterable | None = None,
    ) -> PruneReport:
        """Remove the neurons of lowest score, and let their consumers' biases take over what they were.

        Exactly one budget: ``sparsity`` (fraction of the original neurons), ``threshold`` (remove what scores under this
        times its layer's mean; on standard deviations for the variance criteria), ``flops_reduction`` or
        ``parameter_reduction`` (fractions of the original network). ``scope`` "layer" or "global" says where neurons
        compete; with "global", ``normalize`` "mean", "max" or "l2" divides the scores of each group by that of its own
        first. ``calibration``: a loader or batches, each a tensor or an (x, y) pair, held in memory: their eval-mode
        moments serve the compensation (and the scores, if nothing was recorded or the criterion is "obs") and measure
        ``output_error``.

        All or nothing: on any error the model, the optimizer and the averaged copies are as before.
        """
        requested = _one_budget(
            sparsity=sparsity,
            threshold=threshold,
            flops_reduction=flops_reduction,
            parameter_reduction=parameter_reduction,
        )
        if torch.is_inference_mode_enabled():
            raise PruningError(
                "prune() under torch.inference_mode() would make parameters that can't be trained: leave it"
            )
        limits = Limits(scope, min_neurons, round_to, normalize)
        batches = None if calibration is None else calibration_batches(calibration)
        with self.paused():
            self._prove(batches[0] if batches else None)
            return self._event(requested, limits, batches)

    def _event(self, requested: dict[str, float], limits: Limits, batches: list[tuple] | None) -> PruneReport:
        started = time.perf_counter()
        before, calibrated = self._calibrate(batches)
        scores = self._scores(calibrated)
        kept = self._select(requested, scores, limits)
        cuts = cuts_for(self.groups, kept)
        cut_groups = [g for g in self.groups if g.name in kept and len(kept[g.name]) < g.size]
        values = constants(self.compensation, self.model, cut_groups, calibrated or self._recorder, self._inputs)
        groups = [
            group_report(g, kept[g.name], scores[g.name], self._recorder.ids[g.name]) for g in self.groups if g.prunable
        ]
        self._operate(kept, cuts, values)
        return PruneReport(
            requested=requested,
            **self.reductions(),
            parameters=parameter_count(self.model),
            flops=self._count_flops(self.model),
            output_error=None if batches is None else relative_error(before, outputs(self.model, batches)),
            seconds=time.perf_counter() - started,
            groups=groups,
            cuts=cuts,
        )

    def _calibrate(self, batches: list[tuple] | None) -> tuple[list[Tensor], Recorder | None]:
        if batches is None:
            return [], None
        recorder = Recorder(self.model, self.groups, self._recorder.kinds)
        with recorder.record():
            before = outputs(self.model, batches)
        return before, recorder

    def _scores(self, calibrated: Recorder | None) -> Scores:
        criterion = CRITERIA[self.criterion]
        asks_calibrated = calibrated is not None and (criterion.asks_now or self._recorder.is_empty)
        recorder, score = calibrated if asks_calibrated else self._recorder, criterion.score
        scores = {g.name: score(self._evidence(g, recorder)).detach().cpu() for g in self.groups if g.prunable}
        for name, values in scores.items():
            if not torch.isfinite(values).all():
                raise PruningError(
                    f"criterion {self.criterion!r} gave NaN or Inf for group {name!r}; nothing was pruned"
                )
        return scores

    def _evidence(self, group: NeuronGroup, recorder: Recorder) -> Evidence:
        wants_covariance = CRITERIA[self.criterion].signal == "covariance"

        def side(name: str, direction: str) -> Side:
            module, signal = self.model.get_submodule(name), (name, direction)
            kind = kind_of(module)
            dim = (kind.outputs if direction == "out" else kind.inputs)["weight"]
            seen = {quantity: recorder.checked(signal, quantity) for quantity in ("value", "nonzero", "taylor")}
            moments = seen.pop("value")
            ran = direction == "in" and moments is not None and moments.count > 1
            covariance = recorder.covariance(name) if wants_covariance and ran else None
            weight = module.weight.detach().movedim(dim, 0)
            return Side(name, weight, group.maps[signal], moments, covariance=covariance, **seen)

        modules = {name: self.model.get_submodule(name) for name in group.passengers}
        norms = [name for name, m in modules.items() if isinstance(m, _BatchNorm) and m.weight is not None]
        return Evidence(
            group=group.name,
            size=group.size,
            producers=[side(name, "out") for name in group.producers],
            consumers=[side(name, "in") for name in group.consumers],
            norms=[side(name, "out") for name in norms],
            generator=self._generator,
            coupled=self.coupled,
        )

    def _select(self, requested: dict[str, float], scores: Scores, limits: Limits) -> Kept:
        ((budget, value),) = requested.items()
        if budget == "sparsity":
            return keep_by_sparsity(scores, self._original, value, limits)
        if budget == "threshold":
            root = CRITERIA[self.criterion].is_variance
            return keep_by_threshold({n: s.sqrt() if root else s for n, s in scores.items()}, value, limits)
        if budget == "flops_reduction" and self._flops is None:
            raise PruningError("flops_reduction counts FLOPs on a forward pass: give the Pruner example_inputs")
        measure = self._flops_reduction if budget == "flops_reduction" else self._parameter_reduction

        def reduction(kept: Kept) -> float:
            trial = copy_of(self.model)
            cuts = cuts_for(self.groups, kept)
            execute(trial, plan(trial, cuts, self._no_constants(cuts)), cuts)
            return measure(trial)

        return keep_by_reduction(scores, self._original, value, limits, reduction)

    def _no_constants(self, cuts: Cuts) -> dict[str, Tensor]:
        """Zeros in the place of the constants that will be folded: a consumer without a bias gets one, which counts."""
        if self.compensation == "none":
            return {}
        read = [layer for layer, direction in cuts if direction == "in"]
        return {layer: torch.zeros(self.model.get_submodule(layer).weight.shape[1]) for layer in read}

    def _operate(self, kept: Kept, cuts: Cuts, values: dict[str, Tensor]) -> None:
        """Plan everything, then change everything: nothing after the plans can fail."""
        changes = plan(self.model, cuts, values)
        copies = [self._copy_of(averaged) for averaged in self.averaged]
        copy_changes = [plan(averaged, cuts, values) for averaged in copies]
        migrations = [(optimizer, plan_migration(optimizer, changes)) for optimizer in self._optimizers]
        trained = set().union(*(known_names(self.model, optimizer) for optimizer in self._optimizers))
        self._warn_of_strangers(changes, trained)
        trained |= {f"{c.layer}.bias" for c in changes if c.beside is not None and f"{c.layer}.weight" in trained}
        execute(self.model, changes, cuts)
        for averaged, its_changes in zip(copies, copy_changes, strict=True):
            execute(averaged, its_changes, cuts)
        for optimizer, migration in migrations:
            execute_migration(optimizer, migration)
        check_membership(self.model, self._optimizers, trained)
        self._recorder.select(kept, cuts)
        for group in self.groups:
            if group.prunable:
                _shrink_group(group, kept[group.name])

    # Reports and checks.

    def _prove(self, inputs: tuple | None) -> None:
        """Groups given by hand must leave a network that runs: a forgotten layer is an error. Once, when inputs are known."""
        if self._proven or inputs is None:
            return
        trouble = failing(self.model, [group for group in self.groups if group.prunable], inputs)
        if trouble:
            lines = [f"  {group.name}: {why}" for group, why in trouble]
            raise PruningError("groups given by hand can't be cut; do they name every layer?\n" + "\n".join(lines))
        self._proven = True

    def _copy_of(self, averaged: nn.Module) -> nn.Module:
        """The network inside an averaged copy. Raises where its shapes are not the model's."""
        network = getattr(averaged, "module", averaged)
        shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
        if shapes != {name: tensor.shape for name, tensor in self.model.state_dict().items()}:
            raise PruningError(
                f"the averaged copy ({type(averaged).__name__}) has other layers or shapes than the model"
            )
        return network

    def _count_flops(self, model: nn.Module) -> int | None:
        if self._inputs is None:
            return None
        return flop_count(model, on_device_of(model, self._inputs))

    def _flops_reduction(self, model: nn.Module) -> float | None:
        return 1 - self._count_flops(model) / self._flops if self._flops else None

    def _parameter_reduction(self, model: nn.Module) -> float:
        return 1 - parameter_count(model) / self._parameters

    def _ignore(self, names: Iterable[str]) -> None:
        known = layer_names(dict(self.model.named_modules()))
        for name in [names] if isinstance(names, str) else names:
            if name not in known:
                raise PruningError(f"ignore names the layer {name!r}, which the model lacks; it has {', '.join(known)}")
            for group in self.groups:
                if name in (*group.producers, *group.passengers) and group.prunable:
                    group.prunable, group.reason = False, f"{name} is in ignore"

    def _require_something_prunable(self) -> None:
        if not any(group.prunable for group in self.groups):
            raise PruningError(f"nothing in this network can be pruned:\n{self.groups}")

    @property
    def _optimizers(self) -> list[Optimizer]:
        if self.optimizer is None:
            return []
        return [self.optimizer] if isinstance(self.optimizer, Optimizer) else list(self.optimizer)

    def _check_optimizers(self) -> None:
        for optimizer in self._optimizers:
            check_kind(optimizer)
            if not known_names(self.model, optimizer):
                raise PruningError("the optimizer holds none of the model's parameters: was it made for another copy?")

    def _warn_of_strangers(self, changes: list[ParameterChange], trained: set[str]) -> None:
        """A parameter that only another optimizer holds would silently stop learning."""
        names = [f"{c.layer}.{c.tensor}" for c in changes if isinstance(c.old, nn.Parameter) and c.old.requires_grad]
        if not self._optimizers and any(c.old is not None and c.old.grad is not None for c in changes):
            warnings.warn(
                "the Pruner knows no optimizer, but the network has gradients: an optimizer made before goes on with the "
                "old parameters. Give it, Pruner(optimizer=…), or make a new one now",
                stacklevel=5,
            )
        if self._optimizers and (strangers := [name for name in names if name not in trained]):
            warnings.warn(
                f"the Pruner's optimizer does not hold {', '.join(strangers)}: if another one trains them, "
                "it goes on with the old parameters. Give both: Pruner(optimizer=[a, b])",
                stacklevel=5,
            )


def explain(model: nn.Module, example_inputs: Tensor | tuple) -> NeuronGroups:
    """The network's neuron groups, which layers write, carry and read each, and why some can't be pruned: print it."""
    groups = find_groups(model, example_inputs)
    for group, why in failing(model, [group for group in groups if group.prunable], as_arguments(example_inputs)):
        group.prunable, group.reason = False, why
    return groups


def _choose(what: str, name: str, table: dict) -> None:
    if name not in table:
        raise PruningError(f"unknown {what} {name!r}: choose one of {', '.join(table)}")


def _one_budget(**budgets: float | None) -> dict[str, float]:
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise PruningError(f"prune() takes exactly one of {', '.join(budgets)}; got {', '.join(given) or 'none'}")
    ((name, value),) = given.items()
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise PruningError(f"{name} must be a finite number, got {value!r}")
    if name == "threshold" and value < 0:
        raise PruningError(f"threshold must be at least 0, got {value}")
    if name != "threshold" and not 0 <= value < 1:
        raise PruningError(
            f"{name} is a fraction in [0, 1), got {value}"
            + (": did you mean " + f"{value / 100:g}?" if 1 < value < 100 else "")
        )
    return {name: float(value)}


def _shrink_group(group: NeuronGroup, kept: Tensor) -> None:
    renumbered = torch.full((group.size + 1,), -2)
    renumbered[kept] = torch.arange(len(kept))
    renumbered[-1] = -1
    for where, neuron in group.maps.items():
        new = renumbered[neuron]
        group.maps[where] = new[new > -2]
    group.size = len(kept)
