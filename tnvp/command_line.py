"""The command line as Hydra reads it: every point of it composed and checked before the first one runs, and its errors told in plain words."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tnvp.config import VERSION, Config, ConfigError, describe, not_a_choice, resolve

# Of a bad configuration, for `explain`; Hydra has plain ValueErrors too.
ERRORS = (HydraException, OmegaConfBaseException, ValueError)


class Plan(NamedTuple):
    """What the command line asks for, composed and checked."""

    points: list[tuple[list[str], Config]]  # overrides, configuration; of a search, samples of what it may draw
    searches: bool  # the points are drawn while it goes on
    folder: str  # where a sweep shall keep its notes; "": a single run


def arguments_for_hydra(flags: Namespace) -> list[str]:
    """The command line as Hydra's multirun understands it, now that every point of it is known to be right.

    Hydra wants -m on one side of the overrides, and composes a sweep's base from the default choices, where a key of
    a swept choice (`-m optimizer=adam,adamw optimizer.beta1=0.8`) is unknown: `++` lets it pass.
    """
    arguments = [argument for argument in sys.argv[1:] if argument not in ("-m", "--multirun")]
    if not flags.multirun:
        return arguments
    return ["--multirun", *(re.sub(r"^(?!hydra\.)(?=\w+(\.\w+)+=)", "++", argument) for argument in arguments)]


def quoted(text: str) -> str:
    """As Hydra's command line takes any text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def does_search(hydra_config: DictConfig) -> bool:
    """Whether the sweeper draws points by what the ones before gave; Hydra's own takes every combination."""
    return hydra_config.runtime.choices["hydra/sweeper"] != "basic"


def compose(flags: Namespace, conf: Path) -> Plan:
    """What the command line asks for, every point of it checked, with ``conf`` as the folder of configurations. Nothing is run or written."""
    folder, name = Path(flags.config_path or conf).absolute(), flags.config_name or "config"
    search = [f"hydra.searchpath=['{Path(flags.config_dir).absolute()}']"] if flags.config_dir else []
    with hydra.initialize_config_dir(str(folder), job_name="run", version_base=VERSION):
        its_own = [override.input_line for override in parse(flags.overrides) if override.is_hydra_override()]
        if not flags.multirun:
            return Plan([(point, composed(name, search + point)) for point in points(flags)], False, "")
        hydra_config = hydra.compose(name, search + its_own, return_hydra_config=True).hydra
        params = [f"{key}={value}" for key, value in (hydra_config.sweeper.get("params") or {}).items()]
        searches = does_search(hydra_config)
        drawn = [(point, composed(name, search + point)) for point in points(flags, params, searches)]
        whole = hydra.compose(name, search + its_own + drawn[0][0], return_hydra_config=True)
        return Plan(drawn, searches, str(whole.hydra.sweep.dir))


def composed(name: str, overrides: list[str]) -> Config:
    """One checked configuration."""
    try:
        return resolve(hydra.compose(name, overrides))
    except ValueError as error:
        if str(error).startswith("Config group override"):  # Hydra doesn't say which
            raise ConfigError(f"{error}, in: {' '.join(overrides)}") from error
        raise


def parse(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))


def points(flags: Namespace, params: Sequence[str] = (), searches: bool = False) -> list[list[str]]:
    """The overrides of each run: of a sweep, every combination of the values given, the last key fastest.

    Of a search, whose combinations are drawn later, one point for each value or end of an interval, so that each is checked.
    Hydra's own keys are left to Hydra. ``params`` are overrides that the sweeper's configuration has.
    """
    if flags.experimental_rerun:
        raise ConfigError("--experimental-rerun does nothing here: repeat the command, with force=true")
    axes = []
    for override in parse([*params, *flags.overrides]):
        if not override.is_hydra_override():
            axes.append(values_of(override, searches) if flags.multirun else [override.input_line])
            if not axes[-1]:
                raise ConfigError(f"{override.input_line} has no values to sweep over")
    if searches:
        first = [axis[0] for axis in axes]
        return [first, *([*first[:i], other, *first[i + 1 :]] for i, axis in enumerate(axes) for other in axis[1:])]
    return [list(point) for point in product(*axes)]


def values_of(override: Override, searches: bool) -> list[str]:
    """An override for each value that a sweep gives the key; the ends of an interval."""
    key = override.get_key_element()
    if override.is_interval_sweep():
        if not searches:
            raise ConfigError(
                f"{override.input_line}: an interval needs a sweeper that searches, as hydra/sweeper=optuna"
            )
        return [f"{key}={override.value().start}", f"{key}={override.value().end}"]
    if not override.is_sweep_override():
        return [override.input_line]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


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
    if isinstance(error, OverrideParseException):
        what = "quote unusual characters, as in \"name='é'\"" if text.startswith("Lexer") else text
        text = text if "Error parsing override" in text else f"{error.override!r} can't be read: {what}"
    lines = [line.partition(" expecting {")[0] for line in text.splitlines()]
    return "\n".join(line for line in lines if line.strip() and not line.startswith("See http"))
