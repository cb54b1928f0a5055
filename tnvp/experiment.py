"""One run, top to bottom: data, model, training with variance traces, prune events, three test accuracies, results."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from tnvp import checkpoint, data, distributed, models, tracking, trunk
from tnvp.config import Config, ConfigError, config_hash, to_dict, trunk_hash
from tnvp.continuation import begin, complete_run, held, telling_what_was_kept, understood
from tnvp.events import PruneWhileTraining, Recording
from tnvp.files import made
from tnvp.journal import Journal
from tnvp.progress import ProgressBar
from tnvp.pruning import Pruner, PruningError
from tnvp.pruning.calibration import running_norms
from tnvp.pruning.cost import flop_count, parameter_count
from tnvp.resume import Checkpointing, Interrupts
from tnvp.run_directory import ResultsError, RunDirectory, RunningElsewhere, environment
from tnvp.run_state import Checkpoints, random_state, restore_random_state
from tnvp.setup import (
    CONTROLS,
    EVALUATION_BATCH,
    check_batch_of_one,
    check_events_fit,
    data_digest,
    make_event,
    make_optimizer,
    make_pruner,
    narrow,
    run_path,
    start_tracking,
    trunk_end,
    when_due,
)
from tnvp.summary import describe, publish, training_flops
from tnvp.training import (
    Alone,
    Callback,
    Fit,
    TrainingError,
    Validation,
    evaluate,
    make_schedule,
    memory_told,
    train,
)

USER_ERRORS = (  # what bad input raises: a message is enough, a stack trace is for bugs
    ConfigError, data.DataError, models.ModelError, PruningError, TrainingError, ResultsError, checkpoint.CheckpointError,
)  # fmt: skip
PART_ROWS = 100_000  # of the trace; fewer wait in memory for the next checkpoint


def run(config: Config) -> dict:
    """One run as ``config`` says; returns its summary. A complete run of the same config is reported, not repeated."""
    place = distributed.join()
    with memory_told(
        config.batch_size, " ".join(f"model.{key}={value}" for key, value in asdict(config.model).items())
    ):
        summary = run_in(place, config)
    place.leave()
    return summary


def run_in(place: Alone, config: Config) -> dict:
    """The part of this process, alone or one of several: all do the same, and the one that leads writes and tells."""
    path = run_path(config)
    done = RunDirectory(path)
    if not config.force and place.of_first(complete_run(path) is not None):
        if place.leads:
            print(f"{path}: complete already (force=true runs it again and sets the old one aside)")
        return done.summary
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = place.device(config.device)
    with place.first_alone():
        images = data.load(**asdict(config.dataset), device=device)
    model = models.build(**asdict(config.model), shape=images.shape, classes=len(images.classes)).to(device)
    pruner = make_pruner(config, place.adapt(model), images)
    sizes = data.batch_sizes(len(images.train), config.batch_size)
    check_events_fit(config, len(sizes))
    if 1 in sizes and running_norms(model):
        check_batch_of_one(config, model, images)
    trunks = made(Path(config.trunks)) if trunk_end(config, place, len(sizes)) else nullcontext()
    place.seed(config.seed)

    with trunks, place.folder(path) as folder, held(folder):  # where the trunks' fails, nothing is written yet
        if not config.force and place.of_first(complete_run(path) is not None):
            raise RunningElsewhere(f"{path} was run by another process until just now, and is complete")
        found = environment(str(device), config.seed, config_hash(config), trunk_hash(config))
        found |= {"processes": place.count, "data": data_digest(images)}
        directory, saved = begin(folder, to_dict(config), found, anew=config.force)
        saved = place.of_first(saved)
        tracker = start_tracking(config, directory, saved and saved["tracker"]) if place.leads else tracking.Tracker()
        complete = False
        try:
            with telling_what_was_kept(done, config.force), Interrupts().handled() as interrupts:
                summary = Study(config, images, pruner, directory, tracker, interrupts, place).run(saved)
            complete = True
        finally:
            tracker.finish(failed=not complete)
    if place.leads:
        print(describe(summary, config.pruning.name, directory, tracker))
    return summary


class Study:
    """Train, prune, measure. Decisions read validation data; the test set is read for three numbers at the end."""

    def __init__(
        self,
        config: Config,
        images: data.Data,
        pruner: Pruner,
        directory: RunDirectory,
        tracker: tracking.Tracker,
        interrupts: Interrupts,
        place: Alone,
    ):
        self.config, self.images, self.pruner, self.place = config, images, pruner, place
        self.model, self.optimizer = pruner.model, pruner.optimizer
        self.device = next(self.model.parameters()).device
        self.directory, self.tracker = directory, tracker
        self.validation = Validation(lambda: self.measure(images.validation, self.model))
        self.recording = Recording(pruner, config.pruning.trace_every)
        self.journal = Journal(directory, tracker, pruner, self.validation, config.pruning.trace_every)
        self.shuffle = torch.Generator().manual_seed(config.seed)
        self.epoch_began = self.shuffle.get_state()  # what the epoch at work draws its batches from
        self.interrupts, self.checkpoints = interrupts, Checkpoints(directory.checkpoint_path)
        self.resumed: dict | None = None  # the state that the next phase to be trained goes on from
        self.steps_per_epoch = len(data.batch_sizes(len(images.train), config.batch_size))
        self.trunk_end, self.trunk_lock = trunk_end(config, place, self.steps_per_epoch), ExitStack()
        self.step = 0
        self.warmup_steps = 0  # of the phases from here on
        self.seconds_elsewhere = 0.0  # of another run on this one's trunk, and of this one before it was stopped
        self.event = None
        if config.pruning.name not in CONTROLS:
            self.event = make_event(config.pruning, images, pruner, self.measure, self.journal)

    def run(self, saved: dict | None = None) -> dict:
        """The whole run, or what is left of it after the state ``saved``; returns the summary, which is written last."""
        with self.trunk_lock:
            self.start(saved)
            self.train_and_prune()
        if self.pruner.mode == "mask":
            self.pruner.rebuild()  # the same network, at the size that the masks left
        self.journal.write_traces()
        checkpoint.save(self.model, self.directory.model_path)
        summary = self.summarise(self.seconds())
        publish(summary, self.config, self.directory, self.tracker)
        self.directory.write_summary(summary)
        self.checkpoints.remove()
        return summary

    def train_and_prune(self) -> None:
        """The phases of this kind of pruning, from the one that is at work."""
        pruning, lr = self.config.pruning, self.config.optimizer.lr
        if pruning.name == "one_shot":
            if not self.goes_on_in("finetune"):
                self.train("dense", pruning.dense_epochs, lr)
                self.event({"sparsity": pruning.sparsity}, self.step, self.steps_per_epoch)
                self.renew_optimizer()
            self.train("finetune", pruning.finetune_epochs, lr * pruning.finetune_lr_factor)
        elif pruning.name == "scratch":
            if not self.goes_on_in("train"):
                narrow(self.pruner, pruning)
            self.train("train", pruning.dense_epochs + pruning.finetune_epochs, lr)
        else:
            during = [PruneWhileTraining(self.event, when_due(pruning), self.validation)] if self.event else []
            self.train("train", pruning.epochs, lr, during)

    def seconds(self) -> float:
        return time.perf_counter() - self.started + self.seconds_elsewhere

    def goes_on_in(self, phase: str) -> bool:
        """Whether this is a run that was stopped in ``phase``."""
        return self.resumed is not None and self.resumed["phase"] == phase

    def start(self, saved: dict | None) -> None:
        """Be where this run was when it was kept, or at the end of its trunk; one that is not there yet is made on the way."""
        makes = self.trunk_end > 0 and (saved is None or saved["shared"])
        if makes:
            self.trunk_path = self.path_of_trunk()
            self.trunk_lock.enter_context(trunk.locked(self.trunk_path))
        kept = trunk.read(self.trunk_path) if makes and saved is None else None
        if saved is not None:
            with understood(self.directory):
                self.go_on_from(saved, wide=makes)
                self.journal.go_on_from(saved["journal"])
        elif kept is not None:
            self.trunk_lock.close()
            self.go_on_from(kept)
            self.journal.replay(kept["journal"], kept["records"])
        elif makes:
            self.pruner.watch_everything()
        self.started = time.perf_counter()  # waiting for another run's trunk does not count

    def end_trunk(self, fit: Fit) -> None:
        """Keep the trunk, if this run makes it; from here on record what this run asks for."""
        if not self.pruner.watches_everything:
            return
        fit.require_finite()
        trunk.write(self.trunk_path, self.state(fit) | {"records": self.directory.records()})
        self.trunk_lock.close()
        self.recording.narrow(fit)

    def renew_optimizer(self) -> None:
        """After the event: carry the optimizer's state on, empty it, or begin with another optimizer."""
        how = self.config.pruning.optimizer_state
        if how == "reset":
            self.optimizer.state.clear()
        elif how == "fresh":
            self.optimizer = self.pruner.optimizer = make_optimizer(self.config, self.model)
            self.warmup_steps = self.config.pruning.warmup_steps

    def path_of_trunk(self) -> Path:
        found = self.directory.environment
        groups = [(g.name, g.producers, g.passengers, g.consumers, g.prunable) for g in self.pruner.groups]
        facts = (*(found[name] for name in ("data", "device", "hardware")), groups)
        return trunk.trunk_path(self.config.trunks, found["trunk_hash"], facts, self.model.state_dict().values())

    def state(self, fit: Fit) -> dict:
        """All that the rest of the run depends on, after a step or an epoch, as plain data and tensors."""
        return {
            "fit": fit.state(),
            "shuffle": self.epoch_began if fit.batches_done else self.shuffle.get_state(),
            "random": self.place.of_each(random_state(self.device)),
            "pruner": self.pruner.state(),
            "validation": self.validation.state(),
            "event": self.event and self.event.state(),
            "journal": self.journal.state(),
            "seconds": self.seconds(),
        }

    def keep(self, fit: Fit) -> None:
        """Write a checkpoint."""
        if not self.pruner.watches_everything:  # whose trace the trunk is to have
            self.journal.write_traces(at_least=PART_ROWS)
        state = self.state(fit) | {
            "shared": self.pruner.watches_everything,
            "tracker": self.tracker.state(),
            "position": self.directory.position(),
            "config_hash": config_hash(self.config),
        }
        if self.place.leads:
            self.checkpoints.write(fit.step, state)

    def go_on_from(self, state: dict, wide: bool = False) -> None:
        """Be where a run was when it gave `state`; what `train` needs of that is taken there. ``wide``: for a trunk."""
        original = copy.deepcopy(self.model)
        if wide:
            self.pruner.watch_everything()
        self.pruner.restore(state["pruner"])
        self.resumed = state["fit"]
        if self.goes_on_in("finetune"):
            self.renew_optimizer()
        if self.event:
            self.event.go_on_from(state["event"], original)
        self.validation.go_on_from(state["validation"])
        self.shuffle.set_state(state["shuffle"])
        self.seconds_elsewhere = state["seconds"]
        restore_random_state(self.place.own(state["random"]), self.device)

    def train(self, phase: str, epochs: int, lr: float, callbacks: Sequence[Callback] = ()) -> None:
        """``epochs`` epochs, ending at that of the best validation accuracy since the last prune event."""
        if epochs == 0:
            return
        config = self.config
        resumed, self.resumed = self.resumed, None
        bar = [ProgressBar(lambda: self.pruner.widths, Console(stderr=True))] * (config.progress and self.place.leads)
        self.step = train(
            self.model,
            self.optimizer,
            make_schedule(
                config.optimizer.schedule, self.optimizer, lr, epochs * self.steps_per_epoch, self.warmup_steps
            ),
            self.epoch_batches,
            epochs=epochs,
            steps_per_epoch=self.steps_per_epoch,
            phase=phase,
            first_step=self.step,
            callbacks=[
                self.recording,
                *callbacks,
                self.validation,
                self.journal,
                *bar,
                trunk.LastStep(self.trunk_end, self.end_trunk),
                Checkpointing(
                    self.keep, config.checkpoint_steps, config.checkpoint_minutes, self.interrupts, self.place.greatest
                ),
            ],
            precision=config.precision,
            compiled=config.compile,
            resumed=resumed,
            place=self.place,
        )
        self.interrupts.end()
        self.validation.restore(self.model, self.optimizer)

    def epoch_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of training batches, shuffled and augmented."""
        self.epoch_began, images = self.shuffle.get_state(), self.images
        augment = self.config.dataset.flip or self.config.dataset.crop_padding > 0
        return data.batches(images, images.train, self.config.batch_size, generator=self.shuffle, augment=augment)

    def measure(self, split: data.Split, model: nn.Module) -> dict[str, float]:
        """Loss and accuracy of ``model`` on a split; not recorded."""
        with self.pruner.paused():
            return self.place.of_first(evaluate(model, data.batches(self.images, split, EVALUATION_BATCH)))

    def summarise(self, seconds: float) -> dict:
        """The keys every run has (README, "Results"); accuracies in percent, None where nothing was pruned."""
        config, pruner, event = self.config, self.pruner, self.event
        before, after = (event.dense, event.pruned) if event and event.pruned else (self.model, None)
        test, narrow = self.images.test, config.pruning.name == "scratch"  # which never was a dense network
        hashes = self.directory.environment
        return {
            "test_accuracy_dense": None if narrow else self.measure(test, before)["accuracy"],
            "test_accuracy_pruned": self.measure(test, after)["accuracy"] if after else None,
            "test_accuracy": self.measure(test, self.model)["accuracy"],
            **pruner.reductions(),
            "parameters": parameter_count(self.model),
            "flops": self.flops(self.model),
            "training_flops": training_flops(
                self.flops(before), self.directory.events(), self.step, len(self.images.train) / self.steps_per_epoch
            ),
            "bytes": self.directory.model_path.stat().st_size,
            "widths": "-".join(map(str, pruner.widths.values())),
            "seconds": seconds,
            "criterion": pruner.criterion if event else None,
            "compensation": pruner.compensation if event else None,
            "seed": config.seed,
            "study": config.study,
            **{key: hashes[key] for key in ("config_hash", "trunk_hash")},
            "commit": hashes["commit"] and hashes["commit"] + "-dirty" * bool(hashes["dirty"]),
            "hardware": hashes["hardware"],
        }

    def flops(self, model: nn.Module) -> int:
        """FLOPs of a forward pass of one image."""
        return flop_count(model, (self.images.train.images[:1].float(),))
