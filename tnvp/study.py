"""Studies: experiments/<name>/study.yaml declares what is run for one question; its table and figures are made from that.

    python -m tnvp.study run NAME          # what is missing of its runs, through run.py -m
    python -m tnvp.study publish NAME      # finished runs → experiments/NAME/results.csv and figures
    python -m tnvp.study figures           # published tables → figures, of all studies

Overrides after the name (device=cuda hydra/launcher=joblib) go to every run.
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from matplotlib.figure import Figure

from tnvp import figures, results, stability, tracking
from tnvp.resume import SIGNALS
from tnvp.run_directory import ResultsError, RunDirectory

REPOSITORY = Path(__file__).resolve().parent.parent
EXPERIMENTS = REPOSITORY / "experiments"
KEYS = {"question": str, "figures": dict, "sweeps": list}
SWEEP_KEYS = {"base": list, "axes": dict}


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


class Study(NamedTuple):
    """A question, the figures that answer it, the sweeps that are run for it.

    figures: file name → one of `figures.KINDS`; one of `BY_SETTING` is followed by the config's columns that name a setting, such
    as "accuracy_by_setting pruning.window".
    """

    folder: Path
    question: str
    figures: dict[str, str]
    sweeps: list[Sweep]

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
    _check_keys(content, KEYS, str(path))
    if not content["sweeps"]:
        raise StudyError(f"{path}: sweeps is empty; it needs a sweep with the keys {', '.join(SWEEP_KEYS)}")
    for index, sweep in enumerate(content["sweeps"]):
        _check_sweep(sweep, f"{path}, sweeps[{index}]")
    for name, figure in content["figures"].items():
        _check_figure(name, figure, path)
    sweeps = [Sweep(**sweep) for sweep in content["sweeps"]]
    return Study(path.parent, content["question"], content["figures"], sweeps)


def _check_keys(values: Any, keys: dict[str, type], where: str) -> None:
    if not isinstance(values, dict) or set(values) != set(keys):
        found = ", ".join(map(str, values)) if isinstance(values, dict) else repr(values)
        raise StudyError(f"{where} needs the keys {', '.join(keys)}; it has {found}")
    for key, kind in keys.items():
        if not isinstance(values[key], kind):
            raise StudyError(f"{where}: {key} must be a {kind.__name__}, not {values[key]!r}")


def _check_sweep(sweep: Any, where: str) -> None:
    _check_keys(sweep, SWEEP_KEYS, where)
    for entry in sweep["base"]:
        if not isinstance(entry, str) or entry.startswith("-"):  # a flag such as -m is the command's, not a run's
            raise StudyError(f"{where}: the entry {entry!r} of base is no override; write key=value, quoted")
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


def _is_plain(value: Any) -> bool:
    """Whether `text` knows how to say it."""
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)


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


def runs_of(study: Study, extra: list[str]) -> list[RunDirectory]:
    """Where the run of each declared point is, or will be. Raises StudyError for a point that can't be run."""
    from tnvp.command_line import ERRORS, explain  # these take seconds, and figures do without
    from tnvp.config import compose
    from tnvp.setup import run_path

    more = [f"study={study.name}", *(word for word in extra if not re.match(r"\+*hydra[./]", word))]
    points = [[*point, *more] for sweep in study.sweeps for point in sweep.points()]
    left = iter(points)
    try:
        configs = compose(REPOSITORY / "conf", left)
    except ERRORS as error:
        point, why = points[-1 - len(list(left))], explain(error)  # they are drawn one by one: the last one failed
        if "--multirun" in why:  # Hydra's advice, which is none for a study
            what = why.splitlines()[0].removesuffix(" requires --multirun")
            why = f"{what}: what varies goes into axes, as key: [value, value]"
        raise StudyError(f"{study.folder / 'study.yaml'}, the run {' '.join(point)}: {why}") from error
    return [RunDirectory(path) for path in dict.fromkeys(map(run_path, configs))]


def run(study: Study, extra: list[str]) -> int:
    """Run what is missing, sweep by sweep; returns the exit status, as run.py's. A sweep that is complete is not started.

    A sweep with failed points leaves the next ones running; only an interrupt or a kill ends the study.
    """
    statuses = [0]
    for sweep in study.sweeps:
        runs = runs_of(study._replace(sweeps=[sweep]), extra)
        done = sum(run.is_complete for run in runs)
        print(f"{study.name}: {done} of {len(runs)} runs are finished: {' '.join(sweep.overrides())}", flush=True)
        if done < len(runs):
            command = [
                sys.executable,
                str(REPOSITORY / "run.py"),
                "-m",
                *sweep.overrides(),
                f"study={study.name}",
                *extra,
            ]
            statuses.append(attended(command))
            if statuses[-1] not in (0, 1, 2):
                return statuses[-1]
    return 1 if 1 in statuses else max(statuses)


def attended(command: list[str]) -> int:
    """Run a command and return its exit status. Signals are passed on to it, and its end is awaited: its runs are to finish their step."""
    with subprocess.Popen(command) as process:
        before = {n: signal.signal(n, lambda number, frame: process.send_signal(number)) for n in SIGNALS}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def publish(study: Study, extra: list[str], partial: bool = False, wandb: str = "disabled") -> list[Path]:
    """Write results.csv and the figures from finished runs; returns the paths. Missing runs are an error unless partial.

    wandb: a mode of `tracking.start`, in which table and figures are logged as a run of the study's group.
    """
    runs = runs_of(study, extra)
    missing = [str(run.path) for run in runs if not run.is_complete]
    if missing:
        names = "\n  ".join([*missing[:20], *(["…"] if len(missing) > 20 else [])])
        what = f"{len(missing)} of {len(runs)} runs of {study.name} are not finished:\n  {names}"
        if not partial or len(missing) == len(runs):
            raise StudyError(f"{what}\nRun them: make study STUDY={study.name}" + ("" if partial else "; or --partial"))
        warnings.warn(f"{what}\nThe table is published without them", stacklevel=2)
    table = results.table_of((run for run in runs if run.is_complete), runs[0].path.parent.parent)
    results.publish(table, study.table_path)
    print(results.describe(table))
    drawn = draw(study)
    track(study, table, [path for path in drawn if path.suffix == ".png"], runs[0].path.parent, wandb)
    return [study.table_path, *drawn]


def track(study: Study, table: pd.DataFrame, pictures: list[Path], directory: Path, mode: str) -> None:
    """Log a study's runs, means and figures as one W&B run of its group, kept beside its runs in ``directory``."""

    def first(column: str) -> str | None:
        values = table[column].dropna() if column in table else []
        return values.iloc[0] if len(values) else None

    tracker = tracking.start(
        mode,
        directory=directory,
        project=first("config.tracking.project") or "tnvp",
        entity=first("config.tracking.entity"),
        group=study.name,
        job_type="summary",
        name=f"{study.name}-summary",
        tags=[],
        config={"question": study.question, "sweeps": [sweep.overrides() for sweep in study.sweeps]},
    )
    for name, frame in {"runs": table, "means": results.aggregate(table)}.items():
        plain = frame.astype(object).where(frame.notna(), None)
        tracker.table(name, list(plain), plain.to_numpy().tolist())
    for path in pictures:
        tracker.image(path.stem, path)
    tracker.summary({"runs": len(table), "seeds": int(table["seed"].nunique())})
    tracker.finish()
    if tracker.where:
        print(f"W&B: {tracker.where}")


def draw(study: Study) -> list[Path]:
    """The study's figures from its published table, beside it; returns the paths."""
    table, latency = results.published(study.table_path), study.folder / "latency.csv"
    if latency.exists():
        table = results.with_latency(table, latency)
    written = []
    for name, kind in study.figures.items():
        drawn = _drawn(study, table, *kind.split())
        for setting, figure in drawn.items():
            stem = name if len(drawn) == 1 else figures.slug(f"{name}-{setting}")
            written += figures.save(figure, study.folder / stem)
    return written


def _drawn(study: Study, table: pd.DataFrame, kind: str, *columns: str) -> dict[str, Figure]:
    """Title → figure."""
    command = f"make study STUDY={study.name} and make publish STUDY={study.name}"
    if kind in figures.OF_STABILITY:
        path = study.folder / "stability.csv"
        runs = f"$(sed 1d experiments/{study.name}/stability.csv | cut -d, -f1 | sort -u | sed s,^,runs/{study.name}/,)"
        command = (
            f"make study STUDY={study.name}; python -m tnvp.stability {runs} --csv experiments/{study.name}/stability.csv; "
            f"make publish STUDY={study.name}"
        )
        return {study.name: figures.OF_STABILITY[kind](stability.read(path), table, study.name, command)}
    if kind in figures.BY_SETTING:
        return {study.name: figures.BY_SETTING[kind](table, list(columns), study.name, command)}
    return figures.of_table(table, kind, command)


def main(arguments: list[str] | None = None) -> int:
    """0; 1 or 2 where something failed, as in run.py; 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tnvp.study", description="Run, publish and draw studies.")
    parser.add_argument("action", choices=["run", "publish", "figures"])
    parser.add_argument("name", nargs="?", help="a folder of experiments/ with a study.yaml; figures: all, if left out")
    parser.add_argument("overrides", nargs="*", help="for every run, as in run.py")
    parser.add_argument("--partial", action="store_true", help="publish although runs are missing")
    parser.add_argument("--wandb", choices=tracking.MODES, default="disabled", help="log what is published to W&B too")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, metavar="DIR", help="folder of the studies")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.action == "figures":
            names = [options.name] if options.name else study_names(options.experiments)
            studies = [read(name, options.experiments) for name in names]
            for study in studies:
                if options.name or study.table_path.exists():
                    print(*draw(study), sep="\n")
            return 0
        if not options.name:
            raise StudyError(f"which study? There are: {', '.join(study_names(options.experiments))}")
        study = read(options.name, options.experiments)
        if options.action == "run":
            return run(study, options.overrides)
        print(*publish(study, options.overrides, options.partial, options.wandb), sep="\n")
    except (ResultsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.exit(main())
