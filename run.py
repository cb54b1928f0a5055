"""Compose a configuration, or a sweep of them, and run the experiment: `python run.py --help`.

Every point of a sweep is composed and checked before the first one runs; then Hydra takes over, with whatever launcher it
was given. At the end a table tells how each point stands. One run may have several processes: `torchrun --standalone
--nproc-per-node=2 run.py …`. Exit status: 0 done, 1 a bug or a run missing at the end, 2 bad input (with one message), 130 or
143 interrupted by SIGINT or SIGTERM: the same command goes on.
"""

import os
import shutil
import signal
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from socket import gethostname

# The imports below take seconds and may swallow a KeyboardInterrupt: until `main` takes signals, Ctrl-C just ends the process.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from tnvp.command_line import Plan, arguments_for_hydra, compose, does_search, explain, quoted
from tnvp.config import VERSION, ConfigError, register, resolve
from tnvp.distributed import ended_elsewhere, number, processes
from tnvp.resume import Interrupts

CONF = Path(__file__).resolve().parent / "conf"
STATUSES: list[int] = []  # of the single run that this process made
TOTAL = 0  # points of the sweep, here and in the workers that its launcher starts; 0: a search, which draws them

register()  # at import: a launcher's worker processes need the schemas too


def main() -> int:
    """Do what the command line asks for; returns the exit status."""
    try:
        with Interrupts().handled():  # outside of training a signal ends things at once
            return act()
    except KeyboardInterrupt as stop:  # tnvp.resume.Stopped is one, and knows which signal came
        return told(stop)


def act() -> int:
    """Help, run or sweep, or refuse with a message; returns the exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, and `explain` tells them
    flags = get_args_parser().parse_intermixed_args()
    flags.multirun |= "hydra.mode=MULTIRUN" in flags.overrides
    try:
        if flags.help or flags.hydra_help or flags.cfg or flags.info or flags.shell_completion:
            job()
            return 0
        if flags.multirun and processes() > 1:
            raise ConfigError(
                "-m with several processes: one run at a time under torchrun, or the sweep without torchrun"
            )
        plan = compose(flags, CONF)
        return run_sweep(plan, flags) if plan.folder else run_once(flags)
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:  # Hydra has plain ValueErrors too
        tell(explain(error))
        return 2


def told(stop: KeyboardInterrupt) -> int:
    """Say what was interrupted; returns the exit status."""
    print(str(stop) or "interrupted", file=sys.stderr)
    return getattr(stop, "status", 130)


def run_once(flags: Namespace) -> int:
    """A single run; returns the exit status."""
    STATUSES.clear()
    sys.argv[1:] = arguments_for_hydra(flags)
    job()
    return max(STATUSES, default=1)


def run_sweep(plan: Plan, flags: Namespace) -> int:
    """Let Hydra's sweeper and launcher run the points, then tell how each stands; returns the exit status."""
    global TOTAL
    from tnvp import experiment, sweep
    from tnvp.files import made

    planned = [] if plan.searches else plan.points
    points = [sweep.Point(overrides, experiment.run_path(config).absolute()) for overrides, config in planned]
    before, TOTAL = sweep.complete(points), len(points)
    interrupted = status = 0
    with made(Path(plan.folder).absolute().parent):
        folder = sweep.own_folder(plan.folder)
        sys.argv[1:] = [*arguments_for_hydra(flags), f"hydra.sweep.dir={quoted(str(folder))}"]
        try:
            with Interrupts(first=partial(sweep.stop, folder)).handled():
                status = launch()
                sweep.wait(points)
        except KeyboardInterrupt as stop:
            interrupted = told(stop)
        except (HydraException, OmegaConfBaseException):  # set up wrongly
            if not sweep.notes(folder):
                shutil.rmtree(folder)
            raise
    rows = sweep.rows(points, sweep.notes(folder), before)
    if len(rows) > 1 or status or interrupted:
        print(sweep.describe(rows), file=sys.stderr)
    return interrupted or sweep.status(rows) or status


def launch() -> int:
    """Run the jobs; 1 where the launcher gave up, as some do when a worker was killed."""
    try:
        job()
    except (HydraException, OmegaConfBaseException):  # set up wrongly: nothing ran
        raise
    except Exception as error:  # launchers raise what they like
        lines = str(error).strip().splitlines() or [""]
        print(f"the launcher stopped: {type(error).__name__}: {lines[0]}", file=sys.stderr)
        return 1
    return 0


@hydra.main(version_base=VERSION, config_path=str(CONF), config_name="config")
def job(cfg: DictConfig) -> float | tuple[float, int] | None:
    """One run; its failure is told at once and leaves a sweep's other runs alone. The result is for sweepers that search."""
    from tnvp import sweep

    hydra_config = HydraConfig.get()
    os.chdir(hydra_config.runtime.cwd)  # the workers of a cluster begin elsewhere
    if hydra_config.mode != RunMode.MULTIRUN:
        STATUSES.append(attempt(cfg)["status"])
        return None
    facts = {"number": hydra_config.job.num, "overrides": [o.removeprefix("++") for o in hydra_config.overrides.task]}
    note = partial(sweep.note, hydra_config.runtime.output_dir, **facts)
    number = f"{facts['number'] + 1}/{TOTAL}" if TOTAL else facts["number"] + 1
    print(f"[{number}]", *facts["overrides"], file=sys.stderr, flush=True)

    def tell_of(**of_run: str) -> None:
        note(host=gethostname(), pid=os.getpid(), **of_run)
        if of_run["state"] == "begun":  # in this order: a signal finds the note, or the job finds that there was one
            sweep.require_going_on(Path(hydra_config.sweep.dir))

    directions = hydra_config.sweeper.get("direction")
    count = len(directions) if isinstance(directions, ListConfig) else 1
    result = partial(sweep.objectives, count=count) if does_search(hydra_config) else None
    with sweep.at_work(hydra_config.runtime.output_dir), Interrupts().handled():
        outcome = attempt(cfg, tell_of, result)
        note(**outcome)
    return outcome.get("result")


def attempt(
    cfg: DictConfig, tell_of: Callable = lambda **facts: None, result: Callable[[Path], object] | None = None
) -> dict:
    """Run it; returns where, how that ended and why, as a note has it. ``tell_of`` is called with path and state before, and if it is interrupted.

    A run that another process has at work is left to it, which counts as bad input, unless its ``result`` is asked for: that is waited for.
    """
    # Imported late: help and bad configurations are answered without waiting for pandas and W&B.
    from tnvp import experiment, sweep
    from tnvp.run_directory import RunDirectory, RunningElsewhere

    path = ""
    try:
        config = resolve(cfg)
        path = str(experiment.run_path(config).absolute())
        tell_of(path=path, state="begun")
        if result:
            sweep.wait([sweep.Point([], Path(path))])
        state = "was done" if RunDirectory(path).is_complete and not config.force else "done"
        experiment.run(config)
        more = {"result": result(Path(path))} if result else {}
    except (*experiment.USER_ERRORS, OSError) as error:  # OSError: a read-only folder, a full disk
        tell(str(error))
        state = "elsewhere" if isinstance(error, RunningElsewhere) else "failed"
        return {"path": path, "state": state, "why": str(error), "status": 2}
    except Exception as error:
        if ended_elsewhere(error):
            why = "another process of this run ended; what it said tells why"
            tell(why)
            return {"path": path, "state": "failed", "why": why, "status": 1}
        tell(traceback.format_exc().rstrip())
        why = f"{type(error).__name__}: {error}"
        return {"path": path, "state": "failed", "why": why, "status": 1, "traceback": traceback.format_exc()}
    except KeyboardInterrupt as stop:
        tell_of(path=path, state="interrupted", why=str(stop) or "interrupted")
        raise
    return {"path": path, "state": state, "why": "", "status": 0, **more}


def tell(text: str) -> None:
    """What went wrong, and in which process, if there are several."""
    who = f"process {number()}: " if processes() > 1 else ""
    print(who + text, file=sys.stderr)


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.exit(main())
