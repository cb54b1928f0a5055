"""Pruner: record while the network trains, then score, select, compensate, shrink and migrate the optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .calibration import calibration_batches, on_device_of, outputs, recalibrate, relative_error, running_norms
from .certificate import Certificate, certify, excuses, warn_of_disagreement
from .channels import (
    NeuronGroup,
    NeuronGroups,
    as_arguments,
    check_widths,
    complete_groups,
    copy_of,
    layer_names,
    shapes,
    shrink,
)
from .compensation import COMPENSATIONS, StandIn, replacing, stand_ins, uniform_stand_ins
from .cost import Savings, parameter_count
from .criteria import CRITERIA
from .errors import PruningError, choose, damaged
from .evidence import COUPLINGS, evidence_for
from .floors import with_floors
from .graph import find_groups
from .optimizer_state import (
    as_list,
    as_optimizers,
    check_membership,
    check_optimizers,
    execute_migration,
    plan_migration,
    trained_names,
    warn_of_strangers,
)
from .ranks import fingerprint, gathered, require_alike, require_bare, several
from .recorder import WINDOWS, Recorder, TraceRow
from .report import PruneReport, group_report
from .selection import Kept, Limits, Scores, keep_by_reduction, keep_by_sparsity, keep_by_threshold, one_budget
from .state import read_state
from .surgery import MODES, Cuts, check_masked, cuts_for, execute, plan, positions_read
from .trial import failing

LOOKS_AT = (*WINDOWS, "calibration")  # what scores look at: a window of the recording, or the batches of the event


class Pruner:
    """Watches a network's neurons while it trains and removes those that hardly vary.

    Args:
        model: any network torch.fx can trace, changed in place by `prune`.
        optimizer: its optimizer, or several in a list, which follow every event; None if there is none yet.
        example_inputs: what one forward pass takes, a tensor or a tuple; traces the network and counts FLOPs.
        criterion: a name in `CRITERIA`. compensation: a name in `COMPENSATIONS`.
        window: what scores look at: "cumulative", "since_prune" or "ema" of what was recorded, or "calibration", the eval-mode
            pass at the event alone.
        ignore: names of layers whose neurons stay.
        groups: neuron groups by hand, for networks that can't be traced.
        averaged: averaged copies of the model (EMA, SWA), cut alike; may be set later.
        approximate: prune behind mixers such as LayerNorm too, where the rebuilt network differs from the masked one.
        mode: "rebuild" shrinks layers; "mask" makes removed rows zero and keeps them so, until `rebuild`.
        coupled: how the scores of several layers that write or read one group are combined: "mean", "sum" or "max".
        seed: of the criterion "random".
        process_group: of the processes that train this network together (DistributedDataParallel); None is the default group
            where `torch.distributed` is initialised, and otherwise this process alone.

    On several ranks ``model`` is the bare network, which the caller wraps in DistributedDataParallel, and wraps anew after
    every event: a wrapper holds the parameters it was made with, and would no longer average the new ones' gradients.
    Every rank records its part of each batch; `close_window`, `state`, `prune` and `rebuild` merge the parts and wait for
    the other ranks, so all must call them. With `prune`, each rank hands in its own part of the calibration batches;
    ``output_error`` and the certificate are those of that part.

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
        approximate: bool = False,
        mode: str = "rebuild",
        coupled: str = "mean",
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ):
        require_bare(model)
        choose("criterion", criterion, CRITERIA)
        choose("compensation", compensation, COMPENSATIONS)
        choose("coupled", coupled, COUPLINGS)
        choose("mode", mode, MODES)
        choose("window", window, LOOKS_AT)
        if example_inputs is None and groups is None:
            raise PruningError("give example_inputs (to trace the network) or groups (by hand)")
        self.model, self.optimizer = model, as_optimizers(optimizer)
        self.averaged = [averaged] if isinstance(averaged, nn.Module) else list(averaged or ())
        if not isinstance(seed, int):
            raise PruningError(f"seed must be an integer, got {seed!r}")
        self.criterion, self.compensation, self.coupled, self.mode = criterion, compensation, coupled, mode
        self._alive: Kept = {}  # of groups that hold masked neurons, the others
        self._inputs = None if example_inputs is None else as_arguments(example_inputs)
        self._generator = torch.Generator().manual_seed(seed)
        if groups is None:
            self.groups = explain(model, example_inputs, approximate)
        else:
            self.groups = complete_groups(model, groups, approximate)
        self._ignore(ignore)
        if groups is not None:
            self._prove(self._inputs, None, "groups given by hand can't be cut; do they name every layer?")
        self._require_something_prunable()
        check_optimizers(model, self._optimizers)
        self._original = {group.name: group.size for group in self.groups if group.prunable}
        self._born = parameter_names(model)
        self._savings = Savings(model, self._inputs)
        signals = (CRITERIA[criterion].signal, COMPENSATIONS[compensation])
        self._looks_at, self._ranks = window, process_group
        recorded = window if window in WINDOWS else "cumulative"
        self._recorder = self._make_recorder(dict.fromkeys(s for s in signals if s) or ("activation",), recorded)
        self._recorder.wants_inputs = self._inputs is None

    # Recording.

    def _make_recorder(self, kinds: Iterable[str], window: str = "cumulative", wide: bool = False) -> Recorder:
        return Recorder(self.model, self.groups, kinds, window, wide, self._ranks)

    def _new_recorder(self, wide: bool) -> Recorder:
        """In the place of the one at work."""
        recorder = self._make_recorder(self._recorder.kinds, self._recorder.window, wide)
        recorder.wants_inputs = self._recorder.wants_inputs
        return recorder

    def record(self, covariance: bool = True) -> AbstractContextManager[None]:
        """Watch every forward pass inside the block; the result of the forward never changes.

        The covariance that "obs" needs costs most of the recording. Where `prune` will get calibration batches, it is
        measured on these: ``covariance=False`` then leaves it out here.
        """
        return self._recorder.record(covariance)

    def paused(self) -> AbstractContextManager[None]:
        """Inside, nothing is recorded: for validation within a `record` block."""
        return self._recorder.paused()

    def watch_everything(self, on: bool = True) -> None:
        """From now on record what a pruner of any criterion, compensation and window may ask, so that it can go on from here.

        Outside `record`, before anything is recorded; what was is forgotten. Covariances are left to calibration batches. ``on=False`` ends it:
        of what was recorded, the part that this pruner asks for stays.
        """
        self._require_closed("watch_everything()")
        before, self._recorder = self._recorder, self._new_recorder(wide=on)
        if not on:
            self._recorder.restore(before.state())

    @property
    def watches_everything(self) -> bool:
        return self._recorder.wide

    # Stopping and going on.

    def state(self) -> dict:
        """All that `restore` needs, as tensors and plain data: ``torch.save`` it, and load it with ``weights_only=True``.

        It holds which neurons are left and masked, and all that was recorded. The model's, the optimizer's and the averaged
        copies' own ``state_dict()`` are saved beside it. Tensors are those at work, as in a ``state_dict()``.
        """
        here = parameter_names(self.model)
        return {
            "sizes": dict(self._original),
            "kept": dict(self._recorder.ids),
            "masked": dict(self._alive),
            "added": sorted(here - self._born),
            "random": self._generator.get_state(),
            "recorded": self._recorder.state(),
        }

    def restore(self, state: dict) -> None:
        """Be where another pruner was when it gave `state`; for a pruner just made, of a network as it was before all events.

        Repeats the cuts, masks and new biases on the model, the optimizer and the averaged copies, so that the state_dicts
        saved beside ``state`` fit, to be loaded next: of the model and the copies, then, once it is made anew, of a
        learning-rate schedule, then of the optimizer. Values are theirs to bring. What was recorded is taken over in the part that this
        pruner's criterion, compensation and window ask for. ``state`` is copied, and stays as it is.

        Raises:
            PruningError: ``state`` is damaged, of another network or of a pruner with other groups, or lacks what this one
                watches; this one was pruned before, or a `record` block is open. Nothing is changed then.
        """
        self._require_closed("restore()")
        if self.widths != self._original:
            raise PruningError("restore() needs a network that nothing was removed from: build it and its Pruner anew")
        found = read_state(state, self._original, self.model)
        if not isinstance(state.get("recorded"), dict):
            raise damaged("it lacks what was recorded")
        kept, masked, added = found["kept"], found["masked"], found["added"]
        recorder = self._new_recorder(self._recorder.wide)
        recorder.restore(state["recorded"], kept, cuts_for(self.groups, kept))
        self._repeat(kept, added, "rebuild")
        if masked:
            self._repeat(masked, added, "mask")
        self._generator, self._recorder = found["random"], recorder

    def _require_closed(self, what: str) -> None:
        if self._recorder.is_recording:
            raise PruningError(
                f"{what} would end the recording of the open record() block: leave the record() block first"
            )

    def _repeat(self, kept: Kept, added: list[str], mode: str) -> None:
        """One event in the place of all that led to ``kept``, with any numbers in the biases that they added."""
        cuts = cuts_for(self.groups, kept)
        here = parameter_names(self.model)
        layers = {name.rpartition(".")[0] for name in added if name not in here}
        read = {layer: stays for layer, stays in positions_read(cuts).items() if layer in layers}
        self._operate(kept, cuts, uniform_stand_ins(self.model, read, lambda module: 1.0), mode)

    def close_window(self, step: int | None = None) -> None:
        """End a recording window: its moments become rows of `trace`. ``step`` defaults to the batches seen."""
        self._recorder.close_window(self._recorder.batches if step is None else step)

    @property
    def trace(self) -> list[TraceRow]:
        """One row per group and closed window."""
        return self._recorder.trace

    def take_trace(self) -> list[TraceRow]:
        """The rows of `trace`, which is empty then: for a long run that keeps them elsewhere."""
        return self._recorder.take_trace()

    @property
    def widths(self) -> dict[str, int]:
        """Prunable group → neurons alive."""
        return {name: len(alive) for name, alive in self._living().items()}

    def reductions(self) -> dict[str, float | None]:
        """How far the network is from the original, as fractions removed: neurons (of prunable groups), parameters, FLOPs."""
        return self._reductions(self.model, self.widths)

    def _reductions(self, model: nn.Module, widths: dict[str, int]) -> dict[str, float | None]:
        return {
            "neuron_sparsity": 1 - sum(widths.values()) / sum(self._original.values()),
            "parameter_sparsity": self._savings.parameter_reduction(model),
            "flops_reduction": self._savings.flops_reduction(model),
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
        bn_recalibrate: Iterable | None = None,
        mode: str | None = None,
    ) -> PruneReport:
        """Remove the neurons of lowest score, and let their consumers take over what they were.

        Exactly one budget: ``sparsity`` (fraction of the original neurons), ``threshold`` (remove what scores under this
        times its layer's mean; on standard deviations for the variance criteria), ``flops_reduction`` or
        ``parameter_reduction`` (fractions of the original network). ``scope`` "layer" or "global" says where neurons
        compete; with "global", ``normalize`` "mean", "max" or "l2" divides the scores of each group by that of its own
        first. ``calibration``: a loader or batches, each a tensor or an (x, y) pair, held in memory: their eval-mode moments serve
        the compensation (and the scores, if nothing was recorded, the window is "calibration" or the criterion "obs"), and they measure
        ``output_error`` and the certificate. ``bn_recalibrate``: batches on which running statistics are measured anew
        afterwards. ``mode``: as in the constructor, for this event.

        All or nothing: on any error the model, the optimizer and the averaged copies are as before.
        """
        requested = one_budget(
            sparsity=sparsity,
            threshold=threshold,
            flops_reduction=flops_reduction,
            parameter_reduction=parameter_reduction,
        )
        if mode is not None:
            choose("mode", mode, MODES)
        if torch.is_inference_mode_enabled():
            raise PruningError(
                "prune() under torch.inference_mode() would make parameters that can't be trained: leave it"
            )
        limits = Limits(scope, min_neurons, round_to, normalize)
        batches = None if calibration is None else calibration_batches(calibration, "calibration")
        fresh = None if bn_recalibrate is None else calibration_batches(bn_recalibrate, "bn_recalibrate")
        started = time.perf_counter()
        with self.paused(), torch.random.fork_rng(devices=[]):
            check_widths(self.model, self.groups)
            self._meet()
            before, calibrated = self._calibrate(batches)
            scores = gathered(self._scores(calibrated), self._ranks)[0]
            kept = self._select(requested, scores, limits)
            require_alike(
                {name: index.tolist() for name, index in kept.items()},
                "they would keep other neurons; call prune() with the same arguments on all ranks",
                self._ranks,
            )
            self._prove(
                self._inputs or (batches[0] if batches else self._recorder.seen), kept, "this cut can't be made"
            )
            report = self._event(requested, kept, scores, mode or self.mode, before, calibrated, batches, fresh)
            return replace(report, seconds=time.perf_counter() - started)

    def rebuild(self) -> PruneReport:
        """Shrink the layers to what the masks left: the same network, smaller.

        Raises:
            PruningError: what was masked is not zero any more.
        """
        with self.paused():
            check_widths(self.model, self.groups)
            self._meet()
            kept = self._living()
            check_masked(self.model, cuts_for(self.groups, kept))
            return self._event({}, kept, None, "rebuild", [], None, None, None)

    def recalibrate(self, batches: Iterable) -> None:
        """Measure the batch norms' running statistics anew on ``batches``, in the form of ``calibration``."""
        with self.paused():
            recalibrate(self.model, calibration_batches(batches, "recalibrate"))

    def _meet(self) -> None:
        """All ranks have the same network, and from here on the same moments."""
        if several(self._ranks):
            trouble = (
                "their weights are not the same; wrap the network in a new DistributedDataParallel after every event"
            )
            require_alike(fingerprint(self.model), trouble, self._ranks)
            self._recorder.exchange()

    def _event(
        self,
        requested: dict[str, float],
        kept: Kept,
        scores: Scores | None,
        mode: str,
        before: list[list[Tensor]],
        calibrated: Recorder | None,
        batches: list[tuple] | None,
        fresh: list[tuple] | None,
    ) -> PruneReport:
        """Everything is done on a copy first, and told; then on the network itself."""
        cuts = cuts_for(self.groups, kept)
        cut_groups = [g for g in self.groups if g.name in kept and len(kept[g.name]) < g.size]
        how = self.compensation if scores is not None else "none"
        taken = stand_ins(how, self.model, cut_groups, positions_read(cuts), calibrated or self._recorder, self._inputs)
        present = self._living() if mode == "mask" else {g.name: torch.arange(g.size) for g in self.groups}
        twin = copy_of(self.model)
        execute(twin, plan(twin, cuts, taken, mode), cuts)
        after, certificate = self._measured(before, taken, twin, cut_groups, batches)
        fractions = self._reductions(twin, {name: len(stays) for name, stays in kept.items()})
        size, flops = parameter_count(twin), self._savings.flops(twin)
        if fresh is not None:
            recalibrate(twin, fresh)
        report = PruneReport(
            requested=requested,
            mode=mode,
            **fractions,
            parameters=size,
            flops=flops,
            output_error=relative_error(before, after) if batches else None,
            certificate=certificate,
            recalibrated_error=relative_error(before, outputs(twin, batches)) if fresh and batches else None,
            groups=[
                group_report(g, kept[g.name], present[g.name], scores and scores[g.name], self._recorder.ids[g.name])
                for g in self.groups
                if g.prunable
            ],
            cuts=cuts,
            keeps_norms=bool(cut_groups) and fresh is None and scores is not None and bool(running_norms(self.model)),
        )
        self._operate(kept, cuts, taken, mode)
        if fresh is not None:
            recalibrate(self.model, fresh)
        return report

    def _measured(
        self, before, taken: dict[str, StandIn], twin: nn.Module, groups: list[NeuronGroup], batches
    ) -> tuple[list[list[Tensor]], Certificate | None]:
        """Outputs of the pruned ``twin``, and the certificate; warns if it disagrees."""
        if not batches:
            return [], None
        after = outputs(twin, batches)
        with replacing(self.model, taken):
            masked = outputs(self.model, batches)
        if not before or not before[0]:
            return after, None
        dtype = next(p.dtype for p in self.model.parameters())
        certificate = certify(before, masked, after, excuses(self.model, groups), dtype)
        warn_of_disagreement(certificate, stacklevel=4)
        return after, certificate

    def _calibrate(self, batches: list[tuple] | None) -> tuple[list[list[Tensor]], Recorder | None]:
        if batches is None:
            return [], None
        recorder = self._make_recorder(self._recorder.kinds)
        with recorder.record():
            before = outputs(self.model, batches)
        recorder.exchange()
        return before, recorder

    def _scores(self, calibrated: Recorder | None) -> Scores:
        criterion = CRITERIA[self.criterion]
        if self._looks_at == "calibration" and calibrated is None:
            raise PruningError('window="calibration" scores the batches of the event: pass prune(calibration=…)')
        now = criterion.asks_now or self._recorder.is_empty or self._looks_at == "calibration"
        asks_calibrated = calibrated is not None and now
        recorder = calibrated if asks_calibrated else self._recorder
        scores = {}
        for group in self.groups:
            if group.prunable:
                found = evidence_for(self.model, group, recorder, criterion.signal, self.coupled, self._generator)
                scores[group.name] = criterion.score(found).detach().cpu()
        for name, values in scores.items():
            if not torch.isfinite(values).all():
                raise PruningError(
                    f"criterion {self.criterion!r} gave NaN or Inf for group {name!r}; nothing was pruned"
                )
        return scores

    def _living(self) -> Kept:
        """Prunable group → the neurons that are not masked."""
        return {g.name: self._alive.get(g.name, torch.arange(g.size)) for g in self.groups if g.prunable}

    def _select(self, requested: dict[str, float], scores: Scores, limits: Limits) -> Kept:
        """The neurons to keep, of those that are not masked."""
        living = self._living()

        def in_group(chosen: Kept) -> Kept:
            kept = {name: living[name][index] for name, index in chosen.items()}
            return with_floors(self.groups, kept, living, scores, limits)

        return in_group(self._choose({n: scores[n][alive] for n, alive in living.items()}, requested, limits, in_group))

    def _choose(self, scores: Scores, requested: dict[str, float], limits: Limits, in_group) -> Kept:
        """Indices among the living neurons; ``in_group`` makes them those of the group."""
        ((budget, value),) = requested.items()
        if budget == "sparsity":
            return keep_by_sparsity(scores, self._original, value, limits)
        if budget == "threshold":
            root = CRITERIA[self.criterion].is_variance
            return keep_by_threshold({n: s.sqrt() if root else s for n, s in scores.items()}, value, limits)
        measure = getattr(self._savings, budget)
        if budget == "flops_reduction" and not self._savings.knows_flops:
            raise PruningError("flops_reduction counts FLOPs on a forward pass: give the Pruner example_inputs")

        def reduction(chosen: Kept) -> float:
            trial = copy_of(self.model)
            cuts = cuts_for(self.groups, in_group(chosen))
            execute(trial, plan(trial, cuts, self._any_constants(cuts)), cuts)
            return measure(trial)

        return keep_by_reduction(scores, self._original, value, limits, reduction)

    def _any_constants(self, cuts: Cuts) -> dict[str, StandIn]:
        """What makes a consumer without a bias get one, which counts."""
        if self.compensation == "none":
            return {}
        return uniform_stand_ins(self.model, positions_read(cuts), lambda module: 1.0)

    def _operate(self, kept: Kept, cuts: Cuts, taken: dict[str, StandIn], mode: str) -> None:
        """Plan everything, then change everything: nothing after the plans can fail."""
        changes = plan(self.model, cuts, taken, mode)
        copies = [self._copy_of(averaged) for averaged in self.averaged]
        copy_changes = [plan(averaged, cuts, taken, mode) for averaged in copies]
        migrations = [(optimizer, plan_migration(optimizer, changes)) for optimizer in self._optimizers]
        trained = trained_names(self.model, self._optimizers, changes)
        warn_of_strangers(changes, trained, self._optimizers, stacklevel=4)
        execute(self.model, changes, cuts)
        for averaged, its_changes in zip(copies, copy_changes, strict=True):
            execute(averaged, its_changes, cuts)
        for optimizer, migration in migrations:
            execute_migration(optimizer, migration)
        check_membership(self.model, self._optimizers, trained)
        self._follow(kept, cuts, mode)

    def _follow(self, kept: Kept, cuts: Cuts, mode: str) -> None:
        """What the pruner itself knows of the neurons follows the event."""
        if mode == "mask":
            self._alive = kept
            if self._recorder.window == "since_prune":
                self._recorder.forget()
            return
        self._alive = {}
        self._recorder.select(kept, cuts)
        for group in self.groups:
            shrink(group, kept.get(group.name, torch.arange(group.size)), cuts)

    # Reports and checks.

    def _prove(self, inputs: tuple | None, kept: Kept | None, what: str) -> None:
        """Hold the trial, with a random part or with ``kept``; raises where it fails. Without inputs nothing can be proven."""
        if inputs is None:
            return
        groups = [g for g in self.groups if g.prunable and (kept is None or len(kept[g.name]) < g.size)]
        if trouble := failing(self.model, groups, on_device_of(self.model, inputs), kept):
            raise PruningError("\n".join([f"{what}:", *(f"  {group.name}: {why}" for group, why in trouble)]))

    def _copy_of(self, averaged: nn.Module) -> nn.Module:
        """The network inside an averaged copy. Raises where its shapes are not the model's."""
        if not isinstance(averaged, nn.Module) or averaged is self.model:
            raise PruningError(
                f"averaged holds {type(averaged).__name__}: give copies of the model, such as an AveragedModel"
            )
        network = averaged if type(averaged) is type(self.model) else getattr(averaged, "module", averaged)
        if shapes(network) != shapes(self.model):
            raise PruningError(
                f"the averaged copy ({type(averaged).__name__}) has other layers or shapes than the model"
            )
        return network

    def _ignore(self, names: Iterable[str]) -> None:
        known = layer_names(dict(self.model.named_modules()))
        if not isinstance(names, Iterable):
            raise PruningError(f"ignore must be a list of layers' names, got {names!r}")
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
        return as_list(self.optimizer)


def parameter_names(model: nn.Module) -> set[str]:
    """All names, those of tied parameters too."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def explain(model: nn.Module, example_inputs: Tensor | tuple, approximate: bool = False) -> NeuronGroups:
    """The network's neuron groups, which layers write, carry and read each, and why some can't be pruned: print it."""
    groups = find_groups(model, example_inputs, approximate)
    for group, why in failing(model, [group for group in groups if group.prunable], as_arguments(example_inputs)):
        group.prunable, group.reason = False, why
    return groups
