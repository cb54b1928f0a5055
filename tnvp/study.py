"""Studies: experiments/<name>/study.yaml declares what is run for one question; its table and figures are made from that.

    python -m tnvp.study run NAME                            # what is missing of its runs, through run.py -m
    python -m tnvp.study publish NAME                        # finished runs → experiments/NAME/results.csv, other tables, figures
    python -m tnvp.study figures                             # published tables → figures, of all studies
    python -m tnvp.study figures --results RUNS --out DIR    # runs → the same of them, in DIR/NAME, and figures of single runs

Overrides after the name (device=cuda hydra/launcher=joblib) go to every run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tnvp import figures, results, search_figure, stability, sweep, tracking
from tnvp.declaration import EXPERIMENTS, REPOSITORY, Study, StudyError, Table, read, study_names
from tnvp.figure_style import plural
from tnvp.resume import signals_to
from tnvp.run_directory import ResultsError, RunDirectory


def runs_of(study: Study, extra: list[str]) -> list[RunDirectory]:
    """Where the run of each declared point is, or will be; of a search, whose points nobody knows before, those that are finished.

    Raises StudyError for a point that can't be run, and for a search that has no finished run.
    """
    from tnvp.command_line import ERRORS, explain  # these take seconds, and figures do without
    from tnvp.config import compose
    from tnvp.setup import run_path

    more = [f"study={study.name}", *(word for word in extra if not re.match(r"\+*hydra[./]", word))]
    points = [[*point, *more] for part in study.sweeps for point in part.points()] or [more]
    left = iter(points)
    try:
        configs = compose(REPOSITORY / "conf", left)
    except ERRORS as error:
        point, why = points[-1 - len(list(left))], explain(error)  # they are drawn one by one: the last one failed
        if "--multirun" in why:  # Hydra's advice, which is none for a study
            what = why.splitlines()[0].removesuffix(" requires --multirun")
            why = f"{what}: what varies goes into axes, as key: [value, value]"
        raise StudyError(f"{study.folder / 'study.yaml'}, the run {' '.join(point)}: {why}") from error
    paths = list(dict.fromkeys(map(run_path, configs)))
    if not study.search:
        return [RunDirectory(path) for path in paths]
    folder = paths[0].parent
    found = [run for run in map(RunDirectory, sorted(folder.glob("[!.]*/"))) if run.is_complete]
    if not found:
        raise StudyError(f"{folder} has no finished run of the search. Run it: make study STUDY={study.name}")
    return found


def run(study: Study, extra: list[str]) -> int:
    """Run what is missing, sweep by sweep; returns the exit status, as run.py's. A sweep that is complete is not started.

    A sweep with failed points leaves the next ones running; only an interrupt or a kill ends the study.
    """
    if study.search:  # it draws the same points again from the same seed, and finished ones aren't run again
        return _launch(study, study.search, extra)
    statuses = [0]
    for part in study.sweeps:
        runs = runs_of(study._replace(sweeps=[part]), extra)
        done = sum(run.is_complete for run in runs)
        print(f"{study.name}: {done} of {len(runs)} runs are finished: {' '.join(part.overrides())}", flush=True)
        if done < len(runs):
            statuses.append(_launch(study, part.overrides(), extra))
            if statuses[-1] not in (0, 1, 2):
                return statuses[-1]
    return 1 if 1 in statuses else max(statuses)


def _launch(study: Study, overrides: list[str], extra: list[str]) -> int:
    command = [sys.executable, str(REPOSITORY / "run.py"), "-m", *overrides, f"study={study.name}", *extra]
    return attended(command)


def attended(command: list[str]) -> int:
    """Run a command and return its exit status, 128 + n where signal n ended it.

    Signals are passed on to it, and its end is awaited: its runs are to finish their step.
    """
    with subprocess.Popen(command) as process, signals_to(lambda number, frame: process.send_signal(number)):
        status = process.wait()
    return status if status >= 0 else 128 - status


def publish(study: Study, extra: list[str], partial: bool = False, wandb: str = "disabled") -> list[Path]:
    """Write results.csv, the study's other tables and its figures from finished runs; returns the paths. Missing runs are an error unless partial.

    wandb: a mode of `tracking.start`, in which table and figures are logged as a run of the study's group.
    """
    runs = runs_of(study, extra)
    missing = [str(run.path) for run in runs if not run.is_complete]
    if missing:
        names = "\n  ".join([*missing[:20], *(["…"] if len(missing) > 20 else [])])
        what = f"{len(missing)} of {len(runs)} runs of {study.name} are not finished:\n  {names}"
        if not partial or len(missing) == len(runs):
            raise StudyError(
                f"{what}\nRun them: make study STUDY={study.name}; what its ARGS said, such as runs=DIR, publish needs too"
                + ("" if partial else "; or --partial")
            )
        warnings.warn(f"{what}\nThe table is published without them", stacklevel=2)
    root = runs[0].path.parent.parent
    table = _with_validation(study, results.table_of((run for run in runs if run.is_complete), root), root)
    results.publish(table, study.table_path)
    print(results.describe(table))
    measured = measure(study, table, root, study.folder, partial)
    drawn = draw(study)
    track(study, table, [path for path in drawn if path.suffix == ".png"], runs[0].path.parent, wandb)
    return [study.table_path, *measured, *drawn]


def _with_validation(study: Study, table: pd.DataFrame, root: Path) -> pd.DataFrame:
    """The table of a search with what it looked at: validation accuracy in percent, and whether a run is on the front."""
    if not study.search:
        return table
    found = [sweep.objectives(root / name, 1) for name in table["run"]]
    front = search_figure.on_front(pd.Series(found), table["flops"])
    columns = {search_figure.VALIDATION: found, "on_front": front}
    return pd.concat([table[["run"]], table.assign(**columns)[list(columns)], table.drop(columns="run")], axis=1)


def measure(study: Study, table: pd.DataFrame, root: Path, out: Path, lenient: bool = False) -> list[Path]:
    """Write the study's tables that are made of runs, into the folder ``out``; returns their paths.

    table: rows of finished runs, whose paths are relative to ``root``. What can't be written, for instance since no run has the values
    that it is made of, raises StudyError, or, if ``lenient``, is a warning.
    """
    written = []
    for name in (name for name, declared in study.tables.items() if declared.runs is not None):
        try:
            written.append(_write(study, name, out, _chosen(study, name, table, root)))
        except StudyError as error:
            if not lenient:
                raise
            warnings.warn(str(error), stacklevel=2)
    return written


def _chosen(study: Study, name: str, table: pd.DataFrame, root: Path) -> list[Path]:
    """The runs that the table ``name`` is made of. Raises StudyError if there is none."""
    wanted, chosen = study.tables[name].runs, pd.Series(True, index=table.index)
    for key, values in wanted.items():
        chosen &= table.get(f"config.{key}", pd.Series(index=table.index, dtype=object)).isin(values)
    if not chosen.any():
        raise StudyError(f"{study.name} has no finished run for {name}: {wanted or 'any'}")
    return [root / run for run in table.loc[chosen, "run"]]


def _write(study: Study, name: str, out: Path, runs: list[Path]) -> Path:
    """Run the command of the table ``name``; returns its path in ``out``. Raises StudyError where it fails."""
    table, path = study.tables[name], out / name
    how = f"of {plural(len(runs), 'run')} " if runs else ""
    print(f"{path}: {how}with {' '.join(table.command)}", flush=True)
    done = subprocess.run(_command(study, table, out, runs), capture_output=True, text=True)
    if done.returncode or not path.exists():
        said = done.stderr.strip().splitlines() or ["it wrote no such file"]
        raise StudyError(f"{path} can't be written with {' '.join(table.command)}: {said[-1]}")
    return path


def _command(study: Study, table: Table, out: Path, runs: list[Path]) -> list[str]:
    """The table's command as a list of words for this interpreter."""
    words = [sys.executable, *(["-m"] if table.command[0].startswith("tnvp.") else [])]
    for word in table.command:
        word = word.replace("{folder}", str(study.folder)).replace("{out}", str(out))
        words += [word.replace("{runs}", str(run)) for run in runs] if "{runs}" in word else [word]
    return words


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


def draw_all(studies: Sequence[Study]) -> Iterator[list[Path]]:
    """`draw` each of them, as many at a time as there are processors."""
    if len(studies) < 2:
        yield from map(draw, studies)
        return
    spawn = multiprocessing.get_context("spawn")  # the same on every system
    with ProcessPoolExecutor(min(len(studies), os.cpu_count() or 1), spawn) as pool:
        yield from pool.map(draw, studies)


def draw(study: Study, folder: Path | None = None, command: str | None = None) -> list[Path]:
    """The study's figures and other tables from the published ones in ``folder``, beside these; returns the paths.

    folder: the study's own, if left out; another one is of one's own runs, and what can't be drawn of these is a warning.
    command: what makes it all, for the captions.
    """
    own, folder = folder is None, folder or study.folder
    command = command or f"make study STUDY={study.name} and make publish STUDY={study.name}"
    derived, written = [name for name, table in study.tables.items() if table.runs is None], []
    for name in [*derived, *study.figures]:
        try:
            written += [_write(study, name, folder, [])] if name in derived else _draw(study, name, folder, command)
        except (ResultsError, StudyError) as error:
            if own:
                raise
            warnings.warn(f"{study.name}: no {name}: {error}", stacklevel=2)
    return written


def _draw(study: Study, name: str, folder: Path, command: str) -> list[Path]:
    """The figure ``name``, once for each setting that it shows, from the tables in ``folder``; returns the files' paths."""
    table, latency = results.published(folder / study.table_path.name), folder / "latency.csv"
    if latency.exists():
        table = results.with_latency(table, latency)
    drawn, written = _drawn(study, table, folder, command, *study.figures[name].split()), []
    for setting, figure in drawn.items():
        stem = name if len(drawn) == 1 else figures.slug(f"{name}-{setting}")
        written += figures.save(figure, folder / stem)
    return written


def _drawn(
    study: Study, table: pd.DataFrame, folder: Path, command: str, kind: str, *columns: str
) -> dict[str, Figure]:
    """Title → figure."""
    if kind in figures.OF_STABILITY:
        rows = stability.read(folder / "stability.csv")
        return {study.name: figures.OF_STABILITY[kind](rows, table, study.name, command)}
    if kind in figures.BY_SETTING:
        return {study.name: figures.BY_SETTING[kind](table, list(columns), study.name, command)}
    if kind in figures.OF_SEARCH:
        return {study.name: figures.OF_SEARCH[kind](table, study.name, command)}
    return figures.of_table(table, kind, command)


def draw_runs(root: Path, out: Path, experiments: Path = EXPERIMENTS) -> list[Path]:
    """Every figure of the runs under ``root``; returns the files' paths.

    Those of `figures.draw` in ``out``; in out/<study>, for each study that is declared and has runs there, what `publish` writes of
    all its runs, finished or not as many as declared. Published tables are not read.
    """
    table = results.table(root)
    written, command = figures.draw(root, out, table), f"python -m tnvp.study figures --results {root} --out {out}"
    for name in sorted(set(table["study"].dropna()) & set(study_names(experiments))):
        study, rows, folder = read(name, experiments), table[table["study"] == name].reset_index(drop=True), out / name
        for old in (study.table_path.name, *study.tables):  # of runs that are gone
            (folder / old).unlink(missing_ok=True)
        results.publish(_with_validation(study, rows, root), folder / study.table_path.name)
        written += [folder / study.table_path.name, *measure(study, rows, root, folder, lenient=True)]
        written += draw(study, folder, command)
    return written


def main(arguments: list[str] | None = None) -> int:
    """0; 1 or 2 where something failed, as in run.py; 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tnvp.study", description="Run, publish and draw studies.")
    parser.add_argument("action", choices=["run", "publish", "figures"])
    parser.add_argument("name", nargs="?", help="a folder of experiments/ with a study.yaml; figures: all, if left out")
    parser.add_argument("overrides", nargs="*", help="for every run, as in run.py")
    parser.add_argument("--partial", action="store_true", help="publish although runs are missing")
    parser.add_argument("--results", type=Path, metavar="RUNS", help="figures: of these runs, not of published tables")
    parser.add_argument("--out", type=Path, default=Path("figures"), metavar="DIR", help="where those of --results go")
    parser.add_argument("--wandb", choices=tracking.MODES, default="disabled", help="log what is published to W&B too")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, metavar="DIR", help="folder of the studies")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.results and (options.action != "figures" or options.name):
            raise StudyError("--results is for figures, of all studies that the runs are of: leave the name out")
        if options.results:
            print(*draw_runs(options.results, options.out, options.experiments), sep="\n")
            return 0
        if options.action == "figures":
            names = [options.name] if options.name else study_names(options.experiments)
            studies = [read(name, options.experiments) for name in names]
            for paths in draw_all([study for study in studies if options.name or study.table_path.exists()]):
                print(*paths, sep="\n", flush=True)
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
