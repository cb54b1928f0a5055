"""What a study declares: experiments/<name>/study.yaml, read and checked before anything runs.

question: How far …?
figures: {accuracy: accuracy_vs_sparsity}          # file name: one of figures.KINDS
sweeps:                                            # runs; or, in their stead, search: [overrides of a sweeper that searches]
  - base: [experiment=digits]
    axes: {seed: [0, 1, 2]}
tables:                                            # may be left out: what else is published, and what writes it
  latency.csv:
    command: tnvp.latency {runs}/model.pt --csv {out}/latency.csv
    runs: {pruning.criterion: variance, seed: [0]} # {runs}: the finished ones of these values
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tnvp import figures

REPOSITORY = Path(__file__).resolve().parent.parent
EXPERIMENTS = REPOSITORY / "experiments"
KEYS = {"question": str, "figures": dict, "sweeps": list}
SWEEP_KEYS = {"base": list, "axes": dict}
WRITERS = re.compile(
    r"tnvp\.\w+|\{folder\}/\w+\.py"
)  # what may write a table: a module of ours, a script of the study's


class StudyError(ValueError):
    """A study that can't be read, run or published; the message names the file or the runs, and the way out."""


class Sweep(NamedTuple):
    """Every combination of the axes' values on top of the overrides in base."""

    base: list[str]
    axes: dict[str, list]

    def overrides(self) -> list[str]:
        """As the command line says it."""
        return [*self.base, *(f"{key}={','.join(map(text, values))}" for key, values in self.axes.items())]

    def points(self) -> list[list[str]]:
        """The overrides of each run, the last axis fastest."""
        combinations = itertools.product(*self.axes.values())
        pairs = (zip(self.axes, values, strict=True) for values in combinations)
        return [[*self.base, *(f"{key}={text(value)}" for key, value in point)] for point in pairs]


class Table(NamedTuple):
    """What else a study publishes beside its results.csv, and the words of the command that writes it.

    In the words stand {folder}, the study's own folder; {out}, where its tables are written; and, in a word that is said once a
    run, {runs}, the directories of finished runs. runs: key of the config → values that those have; None: published tables are
    all that is read.
    """

    command: list[str]
    runs: dict[str, list] | None


class Study(NamedTuple):
    """A question, the figures that answer it, what is run for it, and the tables that are made beside the results.

    figures: file name → one of `figures.KINDS`; one of `BY_SETTING` is followed by the config's columns that name a setting, such
    as "accuracy_by_setting pruning.window". search: the overrides of a sweeper that draws its points itself, in the sweeps' stead.
    tables: file name → what writes it.
    """

    folder: Path
    question: str
    figures: dict[str, str]
    sweeps: list[Sweep]
    search: list[str]
    tables: dict[str, Table]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def table_path(self) -> Path:
        return self.folder / "results.csv"


def text(value: Any) -> str:
    """A value of study.yaml as Hydra's command line takes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(text, value))}]"
    plain = isinstance(value, int | float) or re.fullmatch(r"[\w./-]+", value)
    return str(value) if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def read(name: str, experiments: Path = EXPERIMENTS) -> Study:
    """The study that experiments/<name>/study.yaml declares. Raises StudyError where something is wrong there."""
    path = experiments / name / "study.yaml"
    if not path.is_file():
        known = ", ".join(study_names(experiments)) or "none"
        raise StudyError(f"there is no study {name!r} ({path}); there are: {known}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise StudyError(f"{path} is no YAML in UTF-8: {error}") from error  # ValueError: other bytes, the 31st of June
    tables = content.pop("tables", {}) if isinstance(content, dict) else {}
    searches = isinstance(content, dict) and "search" in content
    _check_keys(content, {"question": str, "figures": dict, "search": list} if searches else KEYS, str(path))
    _check_overrides(content.get("search", []), str(path), "search")
    for key in ("search", "sweeps"):
        if key in content and not content[key]:
            needs = "the overrides of a sweeper" if searches else f"a sweep with the keys {', '.join(SWEEP_KEYS)}"
            raise StudyError(f"{path}: {key} is empty; it needs {needs}")
    for index, sweep in enumerate(content.get("sweeps", [])):
        _check_sweep(sweep, f"{path}, sweeps[{index}]")
    for figure_name, figure in content["figures"].items():
        _check_figure(figure_name, figure, path)
    sweeps = [Sweep(**sweep) for sweep in content.pop("sweeps", [])]
    search = content.pop("search", [])
    return Study(path.parent, **content, sweeps=sweeps, search=search, tables=_tables(tables, path))


def _check_keys(values: Any, keys: dict[str, type], where: str) -> None:
    if not isinstance(values, dict) or set(values) != set(keys):
        found = ", ".join(map(str, values)) if isinstance(values, dict) else repr(values)
        raise StudyError(f"{where} needs the keys {', '.join(keys)}; it has {found}")
    for key, kind in keys.items():
        if not isinstance(values[key], kind):
            raise StudyError(f"{where}: {key} must be a {kind.__name__}, not {values[key]!r}")


def _check_sweep(sweep: Any, where: str) -> None:
    _check_keys(sweep, SWEEP_KEYS, where)
    _check_overrides(sweep["base"], where, "base")
    for key, values in sweep["axes"].items():
        if not isinstance(key, str):
            raise StudyError(f"{where}: the axis {key!r} must be a key of the configuration, such as seed")
        if not isinstance(values, list) or not values:
            raise StudyError(f"{where}: the axis {key} needs a list of values")
        if bad := [value for value in values if not _is_plain(value)]:
            raise StudyError(
                f"{where}: the axis {key} can't take {bad[0]!r}; values are text (quote a date), numbers, "
                "true, false, null, or lists of these"
            )


def _check_overrides(entries: list, where: str, key: str) -> None:
    for entry in entries:
        if not isinstance(entry, str) or entry.startswith("-"):  # a flag such as -m is the command's, not a run's
            raise StudyError(f"{where}: the entry {entry!r} of {key} is no override; write key=value, quoted")


def _is_plain(value: Any) -> bool:
    """Whether `text` knows how to say it."""
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)


def _tables(declared: Any, path: Path) -> dict[str, Table]:
    """The tables of study.yaml, checked: a command is split at blanks and meets no shell."""
    if not isinstance(declared, dict):
        raise StudyError(f"{path}: tables must be a dict, not {declared!r}")
    tables = {}
    for name, table in declared.items():
        where = f"{path}, tables, {name}"
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name) or name == "results.csv":
            raise StudyError(
                f"{where}: the name must be text of letters, digits, '.', '_' and '-', and not results.csv"
            )
        runs = table.get("runs") if isinstance(table, dict) else None
        _check_keys(table, {"command": str} | ({"runs": dict} if runs is not None else {}), where)
        words = table["command"].split()
        if not words or not WRITERS.fullmatch(words[0]):
            raise StudyError(f"{where}: a command begins with a module, such as tnvp.latency, or {{folder}}/SCRIPT.py")
        if unknown := set(re.findall(r"\{.*?\}", table["command"])) - {"{folder}", "{out}", "{runs}"}:
            raise StudyError(f"{where}: {sorted(unknown)[0]} is none of {{folder}}, {{out}}, {{runs}}")
        if ("{runs}" in table["command"]) != (runs is not None):
            raise StudyError(
                f"{where}: {{runs}} in the command and the key runs, which says of what values, go together"
            )
        for key, values in (runs or {}).items():
            if not isinstance(key, str) or not isinstance(values, list) or not values:
                raise StudyError(f"{where}: runs needs lists of values, such as {{seed: [0]}}")
        tables[name] = Table(words, runs)
    return tables


def _check_figure(name: Any, figure: Any, path: Path) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise StudyError(f"{path}: the figure name {name!r} must be text of letters, digits, '.', '_' and '-'")
    kind, *columns = str(figure).split() or [""]
    if kind not in figures.KINDS:
        raise StudyError(f"{path}: figure {figure!r} is none of {', '.join(figures.KINDS)}")
    if bool(columns) != (kind in figures.BY_SETTING):
        needs = f"{kind} takes no columns" if columns else f"{kind} needs the columns that name a setting"
        raise StudyError(f"{path}: figure {figure!r}: {needs}; such as accuracy_by_setting pruning.window")


def study_names(experiments: Path = EXPERIMENTS) -> list[str]:
    """The studies that are declared."""
    return sorted(path.parent.name for path in experiments.glob("*/study.yaml"))
