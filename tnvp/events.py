"""Callbacks that prune while a network trains: when an event is due, and what is measured around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict

from torch import Tensor, nn

from tnvp.pruning import Pruner, PruneReport
from tnvp.pruning.surgery import execute, plan
from tnvp.training import Callback, Fit, Validation

Budget = dict[str, float]  # one keyword of `Pruner.prune`, such as {"sparsity": 0.5}


class Recording(Callback):
    """Records every training step, in windows of ``every`` steps."""

    def __init__(self, pruner: Pruner, every: int):
        self.pruner, self.every = pruner, every

    def on_start(self, fit: Fit) -> None:
        self._block = self.pruner.record(covariance=False)  # each event calibrates, and measures it there
        self._block.__enter__()

    def on_step(self, fit: Fit) -> None:
        if fit.step % self.every == 0:
            self.pruner.close_window(fit.step)

    def on_epoch(self, fit: Fit) -> None:
        self.pruner.close_window(fit.step)

    def on_end(self, fit: Fit) -> None:
        self._block.__exit__(None, None, None)

    def narrow(self, fit: Fit) -> None:
        """After a trunk, record no more than this pruner asks for."""
        self.on_end(fit)
        self.pruner.watch_everything(False)
        self.on_start(fit)


class PruneEvent:
    """One way to prune, done whenever called, and what is measured around it.

    ``dense`` and ``pruned`` are copies of the network just before the first event and just after the last, for the test
    set. ``measure(model)`` gives "loss" and "accuracy" (percent) on validation data; ``limits`` are keywords of `Pruner.prune`; ``fresh`` batches, if
    any, recalibrate the batch norms; each record goes to ``journal``.
    """

    def __init__(
        self,
        pruner: Pruner,
        measure: Callable[[nn.Module], dict[str, float]],
        calibration: list[Tensor],
        fresh: list[Tensor],
        limits: dict,
        journal: Callable[[dict], None],
    ):
        self.pruner, self.measure, self.calibration = pruner, measure, calibration
        self.fresh, self.limits, self.journal = fresh, limits, journal
        self.dense: nn.Module | None = None
        self.pruned: nn.Module | None = None

    def __call__(self, budget: Budget, step: int, steps_per_epoch: int) -> None:
        model = self.pruner.model
        before = copy.deepcopy(model)
        self.dense = self.dense or before
        report = self.pruner.prune(**budget, **self.limits, calibration=self.calibration)
        bare = copy.deepcopy(before)
        execute(bare, plan(bare, report.cuts, {}), report.cuts)
        measured = [
            ("before", self.measure(before)),
            ("uncompensated", self.measure(bare)),
            ("after", self.measure(model)),
        ]
        if self.fresh:
            self.pruner.recalibrate(self.fresh)
            measured.append(("recalibrated", self.measure(model)))
        numbers = {f"{key}_{when}": values[key] for key in ("accuracy", "loss") for when, values in measured}
        self.pruned = copy.deepcopy(model)
        self.journal({"step": step, "epoch": step / steps_per_epoch, **event_record(report, self.pruner), **numbers})

    def state(self) -> dict:
        """The values of the networks before and after the events; None before the first."""
        return {name: model and model.state_dict() for name, model in (("dense", self.dense), ("pruned", self.pruned))}

    def go_on_from(self, state: dict, original: nn.Module) -> None:
        """Take what `state` gave, after the pruner's `restore`. ``original``: a network as it was before that."""
        if state["dense"] is not None:
            self.dense, self.pruned = original, copy.deepcopy(self.pruner.model)
            self.dense.load_state_dict(state["dense"])
            self.pruned.load_state_dict(state["pruned"])


def event_record(report: PruneReport, pruner: Pruner) -> dict:
    """A report as plain data; neurons by the ids they were born with."""
    groups = [
        {
            "name": group.name,
            "removed": group.removed_ids,
            "removed_scores": group.scores[group.removed].tolist(),
            "kept": group.kept_ids,
            "width_before": len(group.removed) + len(group.kept),
            "width_after": len(group.kept),
            "threshold": group.threshold,
        }
        for group in report.groups
    ]
    return {
        "criterion": pruner.criterion,
        "compensation": pruner.compensation,
        "mode": report.mode,
        "requested": report.requested,
        "neuron_sparsity": report.neuron_sparsity,
        "parameter_sparsity": report.parameter_sparsity,
        "flops_reduction": report.flops_reduction,
        "parameters": report.parameters,
        "flops": report.flops,
        "output_error": report.output_error,
        **{f"certificate/{key}": value for key, value in asdict(report.certificate).items()},
        "seconds": report.seconds,
        "groups": groups,
    }


class PruneWhileTraining(Callback):
    """Prunes at the steps for which ``due(step)`` gives a budget; the best epoch so far no longer fits then."""

    def __init__(self, event: PruneEvent, due: Callable[[int], Budget | None], validation: Validation):
        self.event, self.due, self.validation = event, due, validation

    def on_step(self, fit: Fit) -> None:
        budget = self.due(fit.step)
        if budget is not None:
            self.validation.forget()
            self.event(budget, fit.step, fit.steps_per_epoch)
