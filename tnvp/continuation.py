"""One process at a time does a run, and it goes on where the last one was killed, if there is something to go on from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tnvp.locks import LockedError, locked
from tnvp.pruning import PruningError
from tnvp.resume import Stopped
from tnvp.run_directory import ResultsError, RunDirectory, RunningElsewhere
from tnvp.run_state import Checkpoints
from tnvp.training import TrainingError

REQUIRED = ("processes", "data")  # of the environment, what a run can't go on without; data is a digest
DECIDES = ("commit", "dirty", "versions", "hardware")  # of the environment, what results may depend on


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Inside, the run directory is this process's alone. Raises RunningElsewhere where it is another's."""
    try:
        with locked(RunDirectory(path).lock_path):
            yield
    except LockedError:
        raise RunningElsewhere(
            f"{path} is being run by another process: when that is done, repeat the command"
        ) from None


def complete_run(path: Path) -> RunDirectory | None:
    """The run at ``path``, if it is complete."""
    run = RunDirectory(path)
    if not run.is_complete:
        return None
    _ = run.summary  # an error if it can't be read: then what is there stays
    Checkpoints(run.checkpoint_path).remove()  # a kill may have come between the summary and this
    return run


def begin(path: Path, config: dict, environment: dict, anew: bool) -> tuple[RunDirectory, dict | None]:
    """The directory, and the state to go on from: None for a new run, which sets aside what an old one left."""
    run = RunDirectory(path)
    run.remove_leftovers()
    checkpoints = Checkpoints(run.checkpoint_path)
    if not anew and checkpoints.paths():
        state = checkpoints.newest(partial(_trouble, run, environment["config_hash"]))
        if state is not None:
            _require_same(run, environment)
            run.write_config(config)
            run.cut_back(state["position"])
            fit = state["fit"]
            print(f"{path}: goes on from step {fit['step']} ({fit['phase']}, epoch {fit['epoch']:.2f})", flush=True)
            _warn_of_changes(run, environment)
            return run, state
        warnings.warn(f"{path} has no whole checkpoint: it is set aside, and the run starts over", stacklevel=2)
    elif not anew and run.has_begun:
        print(f"{path} was stopped before its first checkpoint: it is set aside, and the run starts over", flush=True)
    run = RunDirectory.create(path, aside=run.has_begun)
    run.write_config(config)
    run.write_environment(environment)
    return run, None


def _trouble(run: RunDirectory, config_hash: str, state: dict) -> str:
    """Why the run can't go on from ``state``; "" if it can."""
    if state["config_hash"] != config_hash:
        return "it is of another run"
    return run.trouble(state["position"])


def _require_same(run: RunDirectory, now: dict) -> None:
    """Raises ResultsError where the run goes on with something else than it began with."""
    then = run.environment
    for name in REQUIRED:
        if (began := then.get(name)) != now[name]:
            raise ResultsError(
                f"{run.path} was begun with {name}={began}, now it is {now[name]}: go on with what it was begun with, or "
                "force=true, which starts over and sets it aside"
            )


@contextmanager
def understood(run: RunDirectory) -> Iterator[None]:
    """Inside, a checkpoint is restored. Raises ResultsError where it holds something else than this code expects."""
    try:
        yield
    except ResultsError:  # a record that can't be read: it says so itself
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ResultsError(
            f"{run.path} can't go on from its checkpoint, which other code wrote ({why}): use the code of its environment.json, or "
            "force=true, which starts over and sets it aside"
        ) from error


def _warn_of_changes(run: RunDirectory, now: dict) -> None:
    then = run.environment
    if changed := [name for name in DECIDES if now[name] != then.get(name)]:
        changes = ", ".join(f"{name} was {then.get(name)} and is {now[name]}" for name in changed)
        warnings.warn(
            f"{run.path} goes on in another environment than it began in, so that its results may differ from those of an "
            f"uninterrupted run ({changes}): force=true starts over",
            stacklevel=3,
        )


@contextmanager
def telling_what_was_kept(run: RunDirectory, forced: bool) -> Iterator[None]:
    """What ends the run inside says where it goes on; the command that ``forced`` it would start over."""
    checkpoints, command = Checkpoints(run.checkpoint_path), "the same command" + " without force=true" * forced
    try:
        yield
    except Stopped as stop:
        last = checkpoints.last_step
        how = "starts it again" if last is None else f"goes on from step {last}"
        stop.args = (f"{run.path}: {stop}; {command} {how}",)
        raise
    except (TrainingError, PruningError) as error:
        lines = [str(error)]
        if (last := checkpoints.last_step) is not None:
            lines.append(
                f"The last good state, of step {last}, is in {checkpoints.folder}; {command} goes on from there, to the "
                "same end."
            )
        raise type(error)("\n".join([*lines, "A changed configuration is another run."])) from error
