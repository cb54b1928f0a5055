"""What a configuration asks for, made before a run begins: pruner, optimizer, tracker, the run's name; and what can't run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tnvp import data, tracking
from tnvp.config import Config, ConfigError, config_hash, to_dict
from tnvp.events import Budget, PruneEvent
from tnvp.journal import Journal
from tnvp.pruning import Pruner
from tnvp.pruning.calibration import running_norms
from tnvp.pruning.schedule import Cubic, Iterative
from tnvp.run_directory import RunDirectory
from tnvp.run_state import digest_of
from tnvp.schema import ActivePruning, PruningWhileTraining, Scratch
from tnvp.training import OPTIMIZERS, Alone

CONTROLS = ("none", "scratch")  # what pruned networks are compared with: nothing is pruned while these train

EVALUATION_BATCH = 256  # images a batch in eval mode: validation, test, calibration


def data_digest(images: data.Data) -> str:
    """Changes with any pixel, label or their split."""
    splits = [s for split in (images.train, images.validation, images.test) for s in (split.images, split.labels)]
    return digest_of([*splits, images.mean, images.std])


def check_events_fit(config: Config, steps_per_epoch: int) -> None:
    """A prune event that would come after the last step is an error, found before anything runs."""
    pruning = config.pruning
    if not isinstance(pruning, PruningWhileTraining):
        return
    (reached, what), steps = pruning.reaches(), pruning.epochs * steps_per_epoch
    if reached > steps:
        raise ConfigError(
            f"{what} is beyond the run's last step: {pruning.epochs} epochs of "
            f"{steps_per_epoch} steps are {steps}; lower it, or raise epochs"
        )


def check_batch_of_one(config: Config, model: nn.Module, images: data.Data) -> None:
    """A network whose batch norms would see one value a channel can't be trained: found before anything runs."""
    x, _ = next(data.batches(images, images.train, config.batch_size))
    try:
        with torch.random.fork_rng(), torch.no_grad():
            copy.deepcopy(model).train()(x[:1])
    except ValueError as error:
        raise ConfigError(
            f"batch_size={config.batch_size} makes training batches of one image, which this network's "
            f"batch norms can't be trained on ({error}): raise it"
        ) from error


def trunk_end(config: Config, place: Alone, steps_per_epoch: int) -> int:
    """The last step before the first prune event, up to which runs share a trunk; 0: this one shares none."""
    # Code compiled around more hooks is other code; several processes round otherwise than one.
    if not config.trunks or config.compile or place.count > 1 or config.pruning.name in CONTROLS:
        return 0
    if config.pruning.name == "one_shot":
        return config.pruning.dense_epochs * steps_per_epoch
    return config.pruning.first_event() - 1


def when_due(pruning: PruningWhileTraining) -> Callable[[int], Budget | None]:
    """Step → the budget of the prune event due there, or None."""
    if pruning.name == "threshold":
        return lambda step: {"threshold": pruning.threshold} if step % pruning.every == 0 else None
    if pruning.name == "gradual":
        schedule = Cubic(pruning.sparsity, pruning.start_step, pruning.end_step, pruning.every)
    else:
        schedule = Iterative(pruning.sparsity, pruning.start_step, pruning.every, pruning.events)
    return lambda step: None if (target := schedule.target(step)) is None else {"sparsity": target}


def make_pruner(config: Config, model: nn.Module, images: data.Data) -> Pruner:
    """The pruner, with an optimizer of its own; without pruning it only records."""
    pruning = config.pruning
    chosen = {
        key: getattr(pruning, key)
        for key in ("criterion", "coupled", "compensation", "window", "ignore", "mode", "approximate")
        if hasattr(pruning, key)
    }
    if pruning.name == "scratch":
        chosen |= {"criterion": "random", "compensation": "none"}  # whichever go, the weights are drawn anew
    x, _ = next(iter(data.batches(images, images.train, 1)))  # one image, as FLOPs are per image
    return Pruner(model, optimizer=make_optimizer(config, model), example_inputs=x, seed=config.seed, **chosen)


def narrow(pruner: Pruner, pruning: Scratch) -> None:
    """Begin with the widths that pruning would end with; each layer draws its weights anew, as if it had been built so."""
    pruner.prune(sparsity=pruning.sparsity, min_neurons=pruning.min_neurons, round_to=pruning.round_to)
    for module in pruner.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def make_event(
    pruning: ActivePruning,
    images: data.Data,
    pruner: Pruner,
    measure: Callable[[data.Split, nn.Module], dict[str, float]],
    journal: Journal,
) -> PruneEvent:
    return PruneEvent(
        pruner,
        measure=lambda model: measure(images.validation, model),
        calibration=training_images(images, pruning.calibration_batches),
        fresh=training_images(images, pruning.bn_recalibrate) if running_norms(pruner.model) else [],
        limits={key: getattr(pruning, key) for key in ("scope", "normalize", "min_neurons", "round_to")},
        journal=journal.event,
    )


def training_images(images: data.Data, batches: int) -> list[Tensor]:
    """The first batches of training images, in fixed order and not augmented."""
    return [x for x, _ in islice(data.batches(images, images.train, EVALUATION_BATCH), batches)]


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    options = asdict(config.optimizer)
    name = options.pop("name")
    options.pop("schedule")
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    return OPTIMIZERS[name](model.parameters(), **options)


def start_tracking(config: Config, directory: RunDirectory, resumed: dict | None = None) -> tracking.Tracker:
    options = asdict(config.tracking)
    if options.pop("name") == "none":
        return tracking.Tracker()
    return tracking.start(
        directory=directory.path,
        group=config.study,
        job_type=config.pruning.name,
        name=label(config),
        config=to_dict(config),
        resumed=resumed,
        **options,
    )


def run_path(config: Config) -> Path:
    """runs/<study>/<label>-<config hash>."""
    return Path(config.runs) / config.study / f"{label(config)}-{config_hash(config)}"


def label(config: Config) -> str:
    """The run's name: as given, or made from data set, model, pruning and seed."""
    if config.name:
        return config.name
    pruning = config.pruning
    how = [pruning.name] if pruning.name in CONTROLS else [pruning.name, pruning.criterion]
    how += [f"{getattr(pruning, key):g}" for key in ("sparsity", "threshold") if hasattr(pruning, key)]
    return "-".join([config.dataset.name, config.model.name, *how, f"s{config.seed}"])
