"""What a run is: a ``Config``, made of the configuration that Hydra composes, checked, and named by its hash.

``schema`` has the fields with their ranges and choices. Only ``experiment`` and ``setup`` unpack a ``Config``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from omegaconf.resolvers import oc

from .models import how_to_choose
from .schema import LARGEST, LARGEST_FLOAT, LONGEST_PATH, SCHEMAS, Composition, Config

__all__ = ["Config", "ConfigError", "check", "compose", "config_hash", "register", "resolve", "to_dict", "trunk_hash"]

VERSION = "1.3"  # of Hydra's behaviour
# What a run can differ in with the same results: where things are kept, shown and named.
NEUTRAL = ("tracking", "study", "name", "runs", "trunks", "force", "progress", "checkpoint_steps", "checkpoint_minutes")
NEUTRAL_OF_DATASET = ("root", "download")


class ConfigError(ValueError):
    """A bad configuration; the message names the field, its value and what is allowed."""


def variable(name: str, *default: Any) -> str | None:
    """The environment's value, or else the default, of a variable that configurations may read."""
    if not str(name).startswith("TNVP_"):
        raise ConfigError(f"only environment variables whose names begin with TNVP_ may be read here, not {name}")
    return oc.env(name, *default)


# Run directories, sweeps' folders and W&B keep configurations: no secret may get into one, however it is spelled. At import,
# for every process that resolves one.
OmegaConf.register_new_resolver("oc.env", variable, replace=True)


def register() -> None:
    """Give Hydra the schemas, for the yaml files in conf/ to name; must come before it composes."""
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Composition)
    for group, choices in SCHEMAS.items():
        for choice, schema in choices.items():
            node = OmegaConf.structured(schema)
            node.name = choice
            # Outside the group: a schema is no choice, so neither help nor error messages may list it as one.
            store.store(name=f"{group}_{choice}_schema", node=node)


def resolve(cfg: DictConfig) -> Config:
    """The composed (or reloaded) configuration as a Config of plain values.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a value out of range, values that don't fit.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        plain.pop("epochs", None)  # the shorthand; the keys that refer to it are resolved by now
        schemas = {group: _schema(group, plain.get(group)) for group in SCHEMAS}
        _check_keys(plain, schemas)
        typed = OmegaConf.structured(Config)
        for group, schema in schemas.items():
            typed[group] = OmegaConf.structured(schema)
        config = OmegaConf.to_object(OmegaConf.merge(typed, plain))
    except OmegaConfBaseException as error:
        raise ConfigError(describe(error)) from error
    check(config)
    return config


def compose(folder: str | Path, points: Iterable[Sequence[str]]) -> list[Config]:
    """The checked configuration of each point, a list of overrides, of conf/ in ``folder``."""
    register()
    with initialize_config_dir(str(folder), version_base=VERSION):
        return [resolve(hydra_compose("config", list(overrides))) for overrides in points]


def check(config: Config) -> None:
    """Raises ConfigError with a line for each value out of range, and for each conflict between values."""
    if problems := list(_problems(config)):
        raise ConfigError("\n".join(problems))


def to_dict(config: Config) -> dict:
    """The configuration as nested dictionaries of plain values, fit for yaml and JSON."""
    return asdict(config)


def config_hash(config: Config) -> str:
    """12 hex digits that agree for two configurations if, and only if, they ask for the same results."""
    return _digest(_influential(config))


def trunk_hash(config: Config) -> str:
    """12 hex digits that agree if two runs are the same up to, and in the step of, their first prune event.

    Criterion, sparsity, compensation and all that happens after the event are left out. With gradual,
    iterative and threshold pruning the step of the first event counts, and `epochs`, since the learning rate
    depends on the length of the run. Without a prune event the whole run is trunk.
    """
    trunk = {"name": config.pruning.name, "trace_every": config.pruning.trace_every, **config.pruning.trunk()}
    return _digest(_influential(config) | {"pruning": trunk})


def _influential(config: Config) -> dict:
    values = to_dict(config)
    for key in NEUTRAL:
        del values[key]
    for key in NEUTRAL_OF_DATASET:
        values["dataset"].pop(key, None)
    return values


def _digest(values: dict) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


# Messages.


def describe(error: OmegaConfBaseException) -> str:
    """One line for what OmegaConf found, without its key and type footer."""
    key, what = error.full_key, str(error).splitlines()[0]
    what = what.removeprefix("ConfigError raised while resolving interpolation: ")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key)
    if isinstance(error, MissingMandatoryValue):
        return missing_key(key)
    if "is not a ListConfig" in what:
        return f"{key} must be a list: write {key}=[first,second]"
    return f"{key}: {what}" if key and key != "_dummy_" else what


def unknown_key(key: str) -> str:
    """Says that `key` (dotted) is none, and which key was probably meant."""
    group, _, leaf = key.rpartition(".")
    owners = [choice for choice, schema in SCHEMAS.get(group, {}).items() if leaf in _names(schema)]
    if owners:
        return f"unknown key {key}: it exists only with {group}={' or '.join(owners)}"
    right = _names(Composition)
    for name, choices in SCHEMAS.items():
        right += [f"{name}.{leaf}" for schema in choices.values() for leaf in _names(schema)]
    siblings = [name for name in right if name.rpartition(".")[0] == group]
    for pool in (siblings, right):  # what stands beside it first
        leaves = {name.rpartition(".")[2]: name for name in pool}
        if match := get_close_matches(leaf, leaves, n=1):
            return f"unknown key {key}: did you mean {leaves[match[0]]}?"
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in siblings) or right
    return f"unknown key {key}: {group if siblings and group else 'the top level'} has {', '.join(leaves)}"


def missing_key(key: str) -> str:
    """Says that `key` (dotted) has no value, and how to give it one."""
    group = key.partition(".")[0]
    if group in SCHEMAS:
        return f"{key} has no value: choose {group}={'|'.join(SCHEMAS[group])}"
    return f"{key} has no value: give it one with {key}=..."


def not_a_choice(key: str, value: Any, choices: Iterable[str]) -> str:
    """Says which values `key` may have, and which was probably meant."""
    near = get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{key}={value} is not one of {', '.join(choices)}{hint}"


# Checks.


def _names(schema: type) -> list[str]:
    return [field.name for field in fields(schema)]


def _schema(group: str, values: Any) -> type:
    """The schema of what was chosen in the group."""
    if not isinstance(values, dict):
        raise ConfigError(missing_key(group))
    key = "library" if "library" in values else "name"  # a library has names of its own
    choice = values.get(key)
    if choice in SCHEMAS[group]:
        return SCHEMAS[group][choice]
    if group == "model" and (how := how_to_choose(choice)):
        raise ConfigError(f"model.{key}={choice} does not go with this choice of model: write {how}")
    raise ConfigError(not_a_choice(f"{group}.{key}", choice, SCHEMAS[group]))


def _check_keys(plain: dict, schemas: dict[str, type]) -> None:
    """Every key of the schemas is there and no other: `+pruning.sparsitty=0.9` composes, but does nothing."""
    for path, schema, values in [("", Config, plain), *((f"{g}.", s, plain[g]) for g, s in schemas.items())]:
        if unknown := [name for name in values if name not in _names(schema)]:
            raise ConfigError(unknown_key(f"{path}{unknown[0]}"))
        if missing := [name for name in _names(schema) if name not in values]:
            raise ConfigError(missing_key(f"{path}{missing[0]}"))


def _problems(node: Any, path: str = "") -> Iterator[str]:
    """A line for each value that its field's metadata refuses, and for each conflict between values."""
    for field in fields(node):
        key, value = f"{path}{field.name}", getattr(node, field.name)
        if is_dataclass(value):
            yield from _problems(value, f"{key}.")
        elif isinstance(value, list):
            for index, element in enumerate(value):
                yield from _problem(f"{key}[{index}]", element, field.metadata)
        elif value is not None:
            yield from _problem(key, value, field.metadata)
    yield from node.conflicts()


def _problem(key: str, value: Any, allowed: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(value, list | dict):
        yield f"{key}={value} must be one value"
        return
    if "interval" in allowed and not _inside(value, allowed["interval"]):
        yield f"{key}={value} must be a number in {allowed['interval']}"
    elif "interval" in allowed and abs(value) > (largest := LARGEST if isinstance(value, int) else LARGEST_FLOAT):
        yield f"{key}={value} is too large: at most {largest}"
    if "choices" in allowed and value not in allowed["choices"]:
        yield not_a_choice(key, value, allowed["choices"])
    if "pattern" in allowed and not re.fullmatch(allowed["pattern"], value):
        yield f"{key}={value!r} must be {allowed['form']}"
    elif "pattern" in allowed and not value.isprintable():
        yield f"{key}={value!r} has characters that can't be printed: leave them out"
    elif "longest" in allowed and (
        max(len(part.encode()) for part in value.split("/")) > allowed["longest"] or len(value) > LONGEST_PATH
    ):
        yield f"{key}={value[:40]}… is too long: at most {allowed['longest']} bytes between slashes"


def _inside(value: float, interval: str) -> bool:
    """NaN is in no interval, and infinity not in one that ends "inf)"."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below
