"""One tidy table of any tree of runs: a row a finished run. Figures and published numbers come from it.

python -m tnvp.results runs --csv results.csv
python -m tnvp.results export --from wandb ENTITY/PROJECT --csv results.csv
"""

import argparse
import io
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from scipy.special import stdtrit  # Student's t quantile; importing scipy.stats for it takes a second

from tnvp import tracking
from tnvp.files import write_atomically
from tnvp.run_directory import ACCURACIES, SUMMARY, ResultsError, RunDirectory, require_columns

MACHINE_PATHS = [
    "config.runs",
    "config.trunks",
    "config.dataset.root",
]  # nobody else's business: left out of a CSV file
YOUNGER = ["training_flops", "widths"]  # of the summary's columns, those that tables published before lack
NOT_RUNS = re.compile(r"^\.|^wandb$|\.old-\d+$")  # folders no run is looked for in
# Columns that name a setting. The other config columns must agree, too, before runs are averaged or drawn
# together: all but the seed, the axes of the figures, and fields that say where or how fast a run is made.
BASE = ["config.dataset.name", "config.model.name", "config.pruning.name", "config.pruning.compensation"]
RANGES = {  # what is outside was not measured; surgery that removes little may add biases
    **dict.fromkeys(ACCURACIES, (0, 100)),
    "neuron_sparsity": (0, 1),
    **dict.fromkeys(["parameter_sparsity", "flops_reduction"], (-1, 1)),
}
REQUESTED = ["config.pruning.sparsity", "config.pruning.threshold"]
NOT_SETTINGS = re.compile(
    r"config\.(seed|name|device|compile|threads|runs|trunks|force|progress|checkpoint_(steps|minutes)|tracking\..*|dataset\.(root|download)"
    r"|pruning\.(criterion|sparsity|threshold))$"
)


def table(root: str | Path) -> pd.DataFrame:
    """Every finished run under `root`, one row each, sorted by `run` (its path relative to root).

    Columns, in this order: run, the summary's keys, the config with dots under `config.` (lists as JSON).
    Unfinished runs are named in one warning; runs set aside, wandb folders and links are not looked at.
    Raises ResultsError if there is no finished run.
    """
    return table_of(_runs(Path(root)), root)


def table_of(runs: Iterable[RunDirectory], root: str | Path) -> pd.DataFrame:
    """The same of these runs alone; `run` is the path relative to root."""
    runs = list(runs)
    unfinished = [str(run.path) for run in runs if not run.is_complete]
    if unfinished:
        names = ", ".join(unfinished[:20]) + (", ..." if len(unfinished) > 20 else "")
        warnings.warn(f"{len(unfinished)} unfinished run(s) left out: {names}", stacklevel=2)
    complete = [run for run in runs if run.is_complete]
    if not complete:
        raise ResultsError(f"no finished run under {root}. Make runs there with: python run.py runs={root}")
    rows, damaged = [], []
    for run in complete:
        try:
            rows.append(_sound(run, run.path.relative_to(root).as_posix()))
        except ResultsError as error:
            damaged.append(str(error))
    if not rows:
        raise ResultsError(damaged[0])
    if damaged:
        warnings.warn(f"{len(damaged)} damaged run(s) left out: {'; '.join(damaged[:20])}", stacklevel=2)
    return _table(rows)


def from_wandb(project: str) -> pd.DataFrame:
    """The same of the finished runs that a W&B server has of ENTITY/PROJECT; it tells 10.0 as 10."""
    rows = []
    for name, config, summary in tracking.fetch(project):
        if "config_hash" in summary:
            rows.append(_row(f"{summary['study']}/{name}-{summary['config_hash']}", summary, config))
    if not rows:
        raise ResultsError(f"{project} has no finished run of tnvp")
    return _table(rows)


def _table(rows: Iterable[dict]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, dtype=object)
    config = sorted(name for name in frame if name.startswith("config."))
    frame = frame[["run", *SUMMARY, *config]].sort_values("run", ignore_index=True)
    dtypes = {"run": "string", **SUMMARY}
    return pd.DataFrame({name: _typed(frame[name], dtypes.get(name)) for name in frame})


def publish(runs: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV, without the paths of this machine."""
    published = runs.drop(columns=MACHINE_PATHS, errors="ignore")
    write_atomically(path, lambda file: published.to_csv(file, index=False))


def published(path: Path) -> pd.DataFrame:
    """The table that `publish` wrote. Raises ResultsError if there is none, or another one."""
    try:
        text = path.read_text(encoding="utf-8")
        frame = pd.read_csv(io.StringIO(text))
    except FileNotFoundError as error:
        raise ResultsError(f"there is no table {path}: make publish writes it, from finished runs") from error
    except ValueError as error:  # pandas' own errors are of this kind
        raise ResultsError(f"{path} is no table: {error}") from error
    if not text.endswith("\n"):
        raise ResultsError(f"{path} is cut short: its last line has no end")
    frame = frame.assign(**{name: pd.NA for name in YOUNGER if name not in frame})
    require_columns(frame, ["run", *SUMMARY, *BASE[:3]], f"rows of {path}")
    for name in ["run", *BASE[:3]]:
        if not frame[name].map(lambda value: isinstance(value, str)).all():
            raise ResultsError(f"{path} is damaged: a {name} is no name")
    for name in [*(name for name, dtype in SUMMARY.items() if dtype != "string"), *REQUESTED]:
        values = pd.to_numeric(frame.get(name, pd.Series(dtype="float64")), errors="coerce")
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if (values.isna() & frame.get(name, values).notna()).any() or not values.dropna().between(low, high).all():
            raise ResultsError(f"{path} is damaged: a {name} is no number, or none it can be")
    return frame.astype({name: dtype for name, dtype in SUMMARY.items() if dtype == "string"})


def folder_names(table: pd.DataFrame) -> pd.Series:
    """The last part of each run's path: the name of its folder, wherever that is."""
    return table["run"].str.rsplit("/", n=1).str[-1]


def with_latency(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The table with what `tnvp.latency` wrote to ``path`` of its runs on the CPU.

    Columns latency_<batch> and latency_<batch>_dense, where they are known each with its interquartile range, <column>_iqr, and
    latency_how: passes, threads and machine, of a run that was timed itself. Runs are known by the last part of their path. Another
    run gets the mean of those of its data set and network that have its widths: latency depends on nothing else. Raises
    ResultsError for a table without those columns.
    """
    times = pd.read_csv(path)
    require_columns(times, ["run", "device", "batch", "dense_ms", "pruned_ms"], f"rows of {path}")
    times = times[times["device"] == "cpu"]
    kinds = {"pruned_ms": "", "dense_ms": "_dense", "pruned_iqr_ms": "_iqr", "dense_iqr_ms": "_dense_iqr"}
    wide = times.pivot_table(index="run", columns="batch", values=[name for name in kinds if name in times])
    wide.columns = [f"latency_{batch}{kinds[kind]}" for kind, batch in wide.columns]
    names = folder_names(table).rename("name")
    table = table.join(wide, on=names)
    like = table.groupby(["config.dataset.name", "config.model.name", "widths"])[list(wide)].transform("mean")
    table = table.assign(**{name: table[name].fillna(like[name]) for name in wide})
    if {"n", "threads", "hardware"} <= set(times):
        how = [
            f"{n} passes, {t} thread{'s' * (t != 1)}, {where}"
            for n, t, where in times[["n", "threads", "hardware"]].values
        ]
        table = table.assign(latency_how=names.map(dict(zip(times["run"], how, strict=True))))
    return table


def _runs(root: Path) -> Iterator[RunDirectory]:
    for folder, folders, files in os.walk(root):  # does not follow links
        started = "config.yaml" in files and {"environment.json", "metrics.jsonl"} & set(files)
        if "summary.json" in files or started:
            yield RunDirectory(folder)
            folders.clear()  # a run holds no other run
        folders[:] = [name for name in folders if not NOT_RUNS.search(name)]


def _row(name: str, summary: dict, config: dict) -> dict[str, Any]:
    return {"run": name, **{key: summary.get(key) for key in SUMMARY}, **dict(_flat(config, "config"))}


def _sound(run: RunDirectory, name: str) -> dict[str, Any]:
    """A run's row, if nothing in it shows that a file was damaged; else a ResultsError that names the file."""
    summary = run.summary
    row = _row(name, summary, run.config)
    wrong = [key for key in SUMMARY if row[key] is not None and not _fits(row[key], SUMMARY[key], RANGES.get(key))]
    wrong += [key for key in SUMMARY if key not in summary and key not in YOUNGER]
    if wrong:
        raise ResultsError(
            f"{run.summary_path} is damaged: {wrong[0]} is {row.get(wrong[0])!r}. Run it again: force=true"
        )
    wrong = [key for key in BASE[:3] if not isinstance(row.get(key), str)]
    wrong += [key for key in REQUESTED if not isinstance(row.get(key), int | float | None)]
    wrong += ["config.seed"] if row.get("config.seed") != row["seed"] else []
    if wrong:
        raise ResultsError(
            f"{run.config_path} is damaged: {wrong[0]} is {row.get(wrong[0])!r}. Run it again: force=true"
        )
    return row


def _fits(value: Any, dtype: str, limits: tuple[float, float] | None) -> bool:
    kinds = {"string": str, "Int64": int, "float64": int | float}
    right = isinstance(value, kinds[dtype]) and not isinstance(value, bool)
    return right and (limits is None or limits[0] <= value <= limits[1])


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    else:
        yield name, json.dumps(value) if isinstance(value, list) else value


def _typed(values: pd.Series, dtype: str | None) -> pd.Series:
    """A column of objects as `dtype`; None: as the narrowest of boolean, Int64, float64, string."""
    kinds = {type(value) for value in values if not pd.isna(value)}
    if dtype is None:
        fits = [({bool}, "boolean"), ({int}, "Int64"), ({int, float}, "float64")]
        dtype = next((name for types, name in fits if kinds and kinds <= types), "string")
    if dtype == "string":
        return values.map(lambda value: pd.NA if pd.isna(value) else str(value)).astype("string")
    try:
        return values.astype(dtype)
    except (TypeError, ValueError) as error:
        raise ResultsError(f"{values.name} is no {dtype} in some run: {list(values.unique())[:5]}") from error


class Interval(NamedTuple):
    """Mean of n values and the half-width of its 95 % t-interval: NaN for n < 2, where no spread is known."""

    n: int
    mean: float
    half: float


def interval(rows: pd.DataFrame, column: str) -> Interval:
    """Mean of `column` over seeds, with its t-interval. A seed run twice counts once, a gap never."""
    pairs = rows[["seed", column]]  # of some sixty columns
    values = pairs.dropna(subset=[column]).groupby("seed")[column].mean().astype(float)
    n = len(values)
    half = stdtrit(n - 1, 0.975) * values.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return Interval(n, float(values.mean()), float(half))


def by_setting(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The table split: rows of a part differ only in criterion, requested sparsity or threshold, and seed.

    Keys say the data set, model, kind of pruning and compensation, and each other config field that tells two
    settings of these apart, such as "mnist, mlp, one_shot, compensation mean, optimizer.lr=0.1".
    """
    require_columns(table, ["run", "criterion", "seed", *BASE[:3]], "table's rows")  # no pruning: no compensation
    settings = {}
    for base, rows in table.groupby([name for name in BASE if name in table], dropna=False):
        words = [*base[:3], *(f"compensation {name}" for name in base[3:] if not pd.isna(name))]
        telling = _telling(rows)
        for values, part in rows.groupby(telling, dropna=False) if telling else [((), rows)]:
            pairs = zip(telling, ("null" if pd.isna(value) else value for value in values), strict=True)
            others = [f"{name.removeprefix('config.')}={value}" for name, value in pairs]
            settings[", ".join([*words, *others])] = part
    return settings


def setting_fields(table: pd.DataFrame) -> list[str]:
    """The config columns in which runs must agree to be averaged or drawn together."""
    return [name for name in table if name.startswith("config.") and not NOT_SETTINGS.match(name)]


def _telling(rows: pd.DataFrame) -> list[str]:
    """The fewest setting fields, names of groups first, that tell apart all rows that differ in any."""
    telling, parts = [], 1
    for name in sorted(setting_fields(rows), key=lambda field: (not field.endswith(".name"), field)):
        more = rows.groupby([*telling, name], dropna=False).ngroups
        if more > parts:
            telling, parts = [*telling, name], more
    return telling


def aggregate(table: pd.DataFrame, columns: Sequence[str] = ("neuron_sparsity",)) -> pd.DataFrame:
    """One row per setting, criterion and requested sparsity or threshold: means, 95 % t-intervals over seeds.

    Columns: setting, criterion, requested, the means of ``columns`` (neuron_sparsity: achieved, 0 to 1), and per test accuracy
    `<name>_n` (seeds), `<name>` (mean, percent), `<name>_half` (percent, NaN for n < 2).
    """
    rows = []
    for setting, part in by_setting(table).items():
        part = part.assign(criterion=part["criterion"].fillna("none"), requested=requested(part))
        for (criterion, asked), runs in part.groupby(["criterion", "requested"], dropna=False):
            row = {"setting": setting, "criterion": criterion, "requested": asked}
            row |= {name: interval(runs, name).mean for name in columns}
            for name in ACCURACIES:
                row[f"{name}_n"], row[name], row[f"{name}_half"] = interval(runs, name)
            rows.append(row)
    return pd.DataFrame(rows)


def paired(
    table: pd.DataFrame, one: str, other: str, accuracy: str = "test_accuracy", by: str = "criterion"
) -> pd.DataFrame:
    """How much better ``one`` is than ``other``, in percentage points, as differences between runs of the same seed.

    ``by``: the column that ``one`` and ``other`` are values of, such as "criterion" or "config.pruning.window". One row per setting,
    requested sparsity and, where ``by`` is another column, criterion. Columns: setting, criterion, requested, n (seeds that
    have both), difference (mean) and half (half-width of its 95 % t-interval, NaN for n < 2).
    """
    return mean_differences(differences(table, one, other, accuracy, by))


def differences(
    table: pd.DataFrame, one: str, other: str, accuracy: str = "test_accuracy", by: str = "criterion"
) -> pd.DataFrame:
    """The same seed by seed: columns setting, criterion, requested, seed, difference (NaN where a seed lacks one of them)."""
    require_columns(table, [by, accuracy], "table's rows")
    table = table.assign(choice=table[by].fillna("none"), requested=requested(table))
    if missing := {one, other} - set(table["choice"]):
        found = ", ".join(sorted(table["choice"].unique()))
        raise ResultsError(f"no run has {by} {', '.join(sorted(missing))}; there are {found}")
    table, parts = table[table["choice"].isin([one, other])], []
    compared = [f"config.pruning.{by}", *([by] if by.startswith("config.") else [])]
    for setting, part in by_setting(table.drop(columns=compared, errors="ignore")).items():
        part = part.assign(criterion="" if by == "criterion" else part["criterion"].fillna("none"))
        for (criterion, asked), runs in part.groupby(["criterion", "requested"], dropna=False):
            means = runs.groupby(["seed", "choice"])[accuracy].mean().unstack().reindex(columns=[one, other])
            both = (means[one] - means[other]).astype(float).rename("difference").reset_index()
            parts.append(both.assign(setting=setting, criterion=criterion, requested=asked))
    return pd.concat(parts, ignore_index=True)[["setting", "criterion", "requested", "seed", "difference"]]


def mean_differences(seeds: pd.DataFrame) -> pd.DataFrame:
    """What `paired` tells, of what `differences` does."""
    keys = ["setting", "criterion", "requested"]
    rows = [[*key, *interval(part, "difference")] for key, part in seeds.groupby(keys, dropna=False, sort=False)]
    return pd.DataFrame(rows, columns=[*keys, "n", "difference", "half"])


def requested(table: pd.DataFrame) -> pd.Series:
    """What each run was asked for: its sparsity, 0 to 1, or its threshold; NaN for runs without pruning."""
    asked = pd.Series(math.nan, index=table.index)
    for name in REQUESTED:
        asked = asked.fillna(table[name].astype("float64")) if name in table else asked
    return asked


def describe(table: pd.DataFrame) -> str:
    """The aggregated table as text to read, one block a setting."""
    blocks = []
    for setting, rows in aggregate(table).groupby("setting", sort=False):
        shown = rows[["criterion", "requested"]].assign(sparsity=rows["neuron_sparsity"])
        counts = rows[[f"{name}_n" for name in ACCURACIES]].to_numpy()
        shown["n"] = [span(min(set(row) - {0}, default=0), max(row)) for row in counts]  # 0 shows as "-"
        for name, title in zip(ACCURACIES, ["before %", "pruned %", "final %"], strict=True):
            shown[title] = list(map(_percent, rows[name], rows[f"{name}_half"], rows[f"{name}_n"]))
        blocks.append(f"{setting}\n{shown.to_string(index=False, float_format='{:.3f}'.format, na_rep='-')}")
    note = """Test accuracy before the first prune event (before), after the last (pruned), at the end (final):
mean over n seeds ± half-width of its 95 % t-interval, none for n < 3. sparsity: neurons removed, achieved."""
    return "\n\n".join([*blocks, note])


def describe_paired(table: pd.DataFrame, one: str, other: str, by: str = "criterion") -> str:
    """`paired` of all test accuracies as text to read."""
    blocks = []
    for name, when in zip(ACCURACIES[1:], ["right after pruning", "at the end"], strict=True):
        rows = paired(table, one, other, name, by)
        shown = rows.drop(columns=["difference", "half"])
        shown["points"] = list(map(_percent, rows["difference"], rows["half"], rows["n"]))
        blocks.append(f"{one} - {other}, {when}\n{shown.to_string(index=False, na_rep='-')}")
    note = "Percentage points of test accuracy: mean of the differences between runs of the same seed ± 95 % t-interval, none for n < 3."
    return "\n\n".join([*blocks, note])


def span(low: int, high: int) -> str:
    """How many: "5", or "3-5" where it differs."""
    return f"{low}" if low == high else f"{low}-{high}"


def _percent(mean: float, half: float, n: int) -> str:
    """An interval of two values is too wide to tell anything."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if n < 3 else f"{mean:.2f} ± {half:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Print a tree of runs as a table, or export one; 0, or 2 for a tree that can't be read."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["export"]:
        return export(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m tnvp.results", description="Means over seeds.")
    parser.add_argument("root", metavar="ROOT", help="folder of runs, such as runs, or a published table")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="also write the table, one row a run")
    parser.add_argument("--paired", metavar=("ONE", "OTHER"), nargs=2, help="differences of two, seed by seed")
    parser.add_argument("--by", metavar="COLUMN", default="criterion", help="what these are, such as compensation")
    options = parser.parse_args(arguments)
    try:
        runs = published(Path(options.root)) if options.root.endswith(".csv") else table(options.root)
        if options.csv:
            publish(runs, options.csv)
        print(describe(runs))
        if options.paired:
            print(f"\n{describe_paired(runs, *options.paired, options.by)}")
    except (ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def export(arguments: list[str]) -> int:
    """Write the table of a tree of runs, or of a W&B project, as CSV; 0, or 2 where it can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m tnvp.results export", description="One row a finished run, as CSV."
    )
    parser.add_argument("source", metavar="ROOT|ENTITY/PROJECT")
    parser.add_argument("--from", dest="kind", choices=SOURCES, default="runs")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="where to; left out: the standard output")
    options = parser.parse_args(arguments)
    try:
        runs = SOURCES[options.kind](options.source)
        if options.csv:
            publish(runs, options.csv)
        else:
            print(runs.drop(columns=MACHINE_PATHS, errors="ignore").to_csv(index=False), end="")
    except (ResultsError, tracking.TrackingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


SOURCES = {"runs": table, "wandb": from_wandb}

if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.exit(main())
