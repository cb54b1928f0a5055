"""Compose a configuration, or a sweep of them, and run the experiment: `python run.py --help`.

Every point of a sweep is composed and checked before the first one runs; then Hydra takes over, with whatever launcher it
was given. One run may have several processes: `torchrun --standalone --nproc-per-node=2 run.py …`. Exit status: 0 done,
1 a bug or a run missing at the end, 2 bad input (with one message), 130 or 143 interrupted by SIGINT or SIGTERM: the same
command goes on.
"""

import os
import re
import sys
import traceback
from argparse import Namespace
from itertools import product
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tnvp.config import VERSION, Config, ConfigError, describe, not_a_choice, register, resolve
from tnvp.distributed import number, processes

CONF = Path(__file__).resolve().parent / "conf"
STATUSES: list[int] = []  # of the jobs that ran in this process
CONFIGS: dict[str, Config] = {}  # overrides → configuration of every point, in the process that launches them

register()  # at import: a launcher's worker processes need the schemas too


def main() -> int:
    """Do what the command line asks for; returns the exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, and `explain` tells them
    flags = get_args_parser().parse_intermixed_args()
    try:
        if flags.help or flags.hydra_help or flags.cfg or flags.info or flags.shell_completion:
            job()
            return 0
        if flags.multirun and processes() > 1:
            raise ConfigError(
                "-m with several processes: one run at a time under torchrun, or the sweep without torchrun"
            )
        CONFIGS.clear()
        STATUSES.clear()
        CONFIGS.update(compose(flags))
        sys.argv[1:] = arguments_for_hydra(flags)
        job()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:  # Hydra has plain ValueErrors too
        tell(explain(error))
        return 2
    except KeyboardInterrupt as stop:  # tnvp.resume.Stopped is one, and knows which signal came
        print(str(stop) or "interrupted", file=sys.stderr)
        return getattr(stop, "status", 130)
    return 1 if 1 in STATUSES else max([*STATUSES, missing()])


@hydra.main(version_base=VERSION, config_path=str(CONF), config_name="config")
def job(cfg: DictConfig) -> float | None:
    """One run; its failure is told at once and leaves a sweep's other runs alone. The result is for sweepers that search."""
    # Imported late: help and bad configurations are answered without waiting for pandas, matplotlib and W&B.
    from tnvp import experiment

    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        number = f"{hydra_config.job.num + 1}/{len(CONFIGS)}" if CONFIGS else hydra_config.job.num + 1
        overrides = (override.removeprefix("++") for override in hydra_config.overrides.task)
        print(f"[{number}]", *overrides, file=sys.stderr, flush=True)
    status, accuracy = 0, None
    try:
        accuracy = experiment.run(resolve(cfg))["test_accuracy"]
    except (*experiment.USER_ERRORS, OSError) as error:  # OSError: a read-only folder, a full disk
        tell(str(error))
        status = 2
    except Exception:
        tell(traceback.format_exc().rstrip())
        status = 1
    STATUSES.append(status)
    return accuracy


def tell(text: str) -> None:
    """What went wrong, and in which process, if there are several."""
    who = f"process {number()}: " if processes() > 1 else ""
    print(who + text, file=sys.stderr)


def missing() -> int:
    """Names the points of a sweep that left no complete run; 1 if a run is missing that no message explained."""
    if number() > 0:
        return 0  # the first of several processes writes the run
    from tnvp.experiment import run_path
    from tnvp.run_directory import RunDirectory

    names = [overrides for overrides, config in CONFIGS.items() if not RunDirectory(run_path(config)).is_complete]
    if names and len(CONFIGS) > 1:
        print(f"{len(names)} of {len(CONFIGS)} runs are not complete:", *names, sep="\n  ", file=sys.stderr)
    return 1 if names and not any(STATUSES) else 0


def arguments_for_hydra(flags: Namespace) -> list[str]:
    """The command line as Hydra's multirun understands it, now that every point of it is known to be right.

    Hydra wants -m on one side of the overrides, and composes a sweep's base from the default choices, where a key of
    a swept choice (`-m optimizer=adam,adamw optimizer.beta1=0.8`) is unknown: `++` lets it pass.
    """
    arguments = [argument for argument in sys.argv[1:] if argument not in ("-m", "--multirun")]
    if not flags.multirun:
        return arguments
    return ["--multirun", *(re.sub(r"^(?!hydra\.)(?=\w+(\.\w+)+=)", "++", argument) for argument in arguments)]


def compose(flags: Namespace) -> dict[str, Config]:
    """The checked configuration of each point, by its overrides. Nothing is run or written."""
    folder, name = Path(flags.config_path or CONF).absolute(), flags.config_name or "config"
    search = [f"hydra.searchpath=['{Path(flags.config_dir).absolute()}']"] if flags.config_dir else []
    with hydra.initialize_config_dir(str(folder), job_name="run", version_base=VERSION):
        return {" ".join(point): resolve(hydra.compose(name, search + point)) for point in points(flags)}


def points(flags: Namespace) -> list[list[str]]:
    """The overrides of each run: of a sweep, every combination of the values given, the last key fastest.

    Hydra's own keys and axes that a searching sweeper draws from (an interval) are left to Hydra.
    """
    if flags.experimental_rerun:
        raise ConfigError("--experimental-rerun does nothing here: repeat the command, with force=true")
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    axes = []
    for override in parser.parse_overrides(flags.overrides):
        if override.is_hydra_override() or override.is_interval_sweep():
            continue
        if flags.multirun and override.is_sweep_override():
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([override.input_line])
        if not axes[-1]:
            raise ConfigError(f"{override.input_line} has no values to sweep over")
    return [list(point) for point in product(*axes)]


def explain(error: Exception) -> str:
    """What was wrong with the configuration, without Hydra's search paths, links and advice to use `+`."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return not_a_choice(group, choice, error.options)
    text = str(error)
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        file = text.partition(": ")[0] + ": " if text.startswith("In '") else ""
        return file + describe(cause)
    if text.startswith("Multiple values for "):
        return f"{text.partition('. ')[0]}: choose without +"
    lines = [line.partition(" expecting {")[0] for line in text.splitlines()]
    return "\n".join(line for line in lines if line.strip() and not line.startswith("See http"))


if __name__ == "__main__":
    sys.exit(main())
