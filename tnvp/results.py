"""Runs on disk: the name of every file a run leaves, and one tidy table of any tree of runs.

A run directory is the truth; figures and W&B are drawn from it. Files are written aside and renamed, or only
appended to: a killed run leaves no half file and at most one torn last line. `summary.json` comes last, and a
run that has it is complete. The table has one row a finished run; figures and published numbers come from it.

    python -m tnvp.results runs --csv results.csv
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pandas as pd
import yaml
from scipy.special import stdtrit  # Student's t quantile; importing scipy.stats for it takes a second

ACCURACIES = ["test_accuracy_dense", "test_accuracy_pruned", "test_accuracy"]
SUMMARY = {  # summary.json keys -> dtype in the table, in column order
    **dict.fromkeys([*ACCURACIES, "neuron_sparsity", "parameter_sparsity", "flops_reduction"], "float64"),
    **dict.fromkeys(["parameters", "flops", "bytes"], "Int64"),
    "seconds": "float64",
    "criterion": "string",
    "compensation": "string",
    "seed": "Int64",
    **dict.fromkeys(["study", "config_hash", "trunk_hash", "commit", "hardware"], "string"),
}
TRACE_COLUMNS = ["step", "group", "neuron", "mean", "variance", "count"]
NOT_RUNS = re.compile(r"^\.|^wandb$|\.old-\d+$")  # folders no run is looked for in

# Columns that name a setting. The other config columns must agree, too, before runs are averaged or drawn
# together: all but the seed, the axes of the figures, and fields that say where or how fast a run is made.
BASE = ["config.dataset.name", "config.model.name", "config.pruning.name", "config.pruning.compensation"]
REQUESTED = ["config.pruning.sparsity", "config.pruning.threshold"]
NOT_SETTINGS = re.compile(
    r"config\.(seed|name|device|compile|threads|runs|force|progress|tracking\..*|dataset\.(root|download)"
    r"|pruning\.(criterion|sparsity|threshold))$"
)


class ResultsError(ValueError):
    """A run directory or tree that can't be written or read; the message names the file and the way out."""


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a file beside `path`, then rename it: readers see the old or the new one, not half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def set_aside(path: str | Path) -> Path:
    """Rename a run directory to `<name>.old-<n>`, first free n; returns the new path. Nothing is deleted."""
    path = Path(path)
    n = 1
    while path.with_name(f"{path.name}.old-{n}").exists():
        n += 1
    return path.rename(path.with_name(f"{path.name}.old-{n}"))


class RunDirectory:
    """One run's folder: writers that never leave half a file, and readers of what they wrote.

    Make one with `create` (a new run, or an unfinished one to go on with) or `open` (one that is there).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.environment_path = self.path / "environment.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.traces_path = self.path / "traces.parquet"
        self.checkpoint_path = self.path / "checkpoint"
        self.model_path = self.path / "model.pt"
        self.figures_path = self.path / "figures"
        self.summary_path = self.path / "summary.json"

    @classmethod
    def create(cls, path: str | Path, aside: bool = False) -> "RunDirectory":
        """The directory for a run about to start. An unfinished one comes back as it is: `cut_back`, go on.

        aside: rename what is there first (see `set_aside`). Otherwise a complete run there is a ResultsError.
        """
        run = cls(path)
        if run.path.exists() and not run.path.is_dir():
            raise ResultsError(f"{run.path} is a file; a run needs a folder of that name. Move it away.")
        if aside and run.path.exists() and any(run.path.iterdir()):
            set_aside(run.path)
        elif run.is_complete:
            raise ResultsError(f"{run.path} holds a complete run. Read it, or set it aside: force=true")
        run.path.mkdir(parents=True, exist_ok=True)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """The run at `path`, finished or not. Raises ResultsError if there is no such folder."""
        if not Path(path).is_dir():
            raise ResultsError(f"no run directory at {path}. Make runs with: python run.py")
        return cls(path)

    @property
    def is_complete(self) -> bool:
        """True once the summary is there: it is written last."""
        return self.summary_path.is_file()

    def write_config(self, config: dict) -> None:
        """config.yaml: the resolved config, nested."""
        text = yaml.safe_dump(_plain(config, "config"), sort_keys=False, allow_unicode=True)
        write_atomically(self.config_path, lambda file: file.write(text.encode()))

    def write_environment(self, environment: dict) -> None:
        """environment.json: what `environment` returns."""
        _write_json(self.environment_path, environment)

    def write_summary(self, summary: dict) -> None:
        """summary.json: write it last, it declares the run complete. Keys: design.md, section 6."""
        _write_json(self.summary_path, summary)

    def write_traces(self, traces: pd.DataFrame) -> None:
        """traces.parquet: one row per neuron and recording window; columns TRACE_COLUMNS."""
        _require(traces, TRACE_COLUMNS, "traces")
        write_atomically(self.traces_path, lambda file: traces[TRACE_COLUMNS].to_parquet(file, index=False))

    def log(self, record: dict) -> None:
        """Append one record, with its "step", to metrics.jsonl."""
        _append(self.metrics_path, record)

    def event(self, record: dict) -> None:
        """Append one prune event, with its "step", to events.jsonl."""
        _append(self.events_path, record)

    def cut_back(self, step: int) -> None:
        """Drop metrics and events after `step` (the checkpoint's): a resumed run writes no record twice."""
        for path in (self.metrics_path, self.events_path):
            if path.exists():
                _rewrite(path, [record for record in _records(path) if record["step"] <= step])

    @property
    def config(self) -> dict:
        """The resolved config, nested. Raises ResultsError if it is missing or unreadable."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one reads fifty configs in no time
        return _read(self.config_path, lambda data: yaml.load(data, loader))

    @property
    def environment(self) -> dict:
        """environment.json. Raises ResultsError if it is missing or unreadable."""
        return _read(self.environment_path, json.loads)

    @property
    def summary(self) -> dict:
        """summary.json. Raises ResultsError if it is missing (the run is unfinished) or unreadable."""
        return _read(self.summary_path, json.loads)

    def metrics(self) -> pd.DataFrame:
        """One row a record of metrics.jsonl, NaN where a record lacks a key; empty before the first."""
        frame = pd.DataFrame(_records(self.metrics_path))
        unknown = [name for name in frame if frame[name].isna().all()]  # all null: pandas would say "object"
        return frame.astype(dict.fromkeys(unknown, "float64"))

    def events(self) -> list[dict]:
        """The prune events in order; [] if there were none."""
        return _records(self.events_path)

    def traces(self) -> pd.DataFrame:
        """The trace, one row per neuron and recording window; empty if the run has none."""
        if not self.traces_path.exists():
            return pd.DataFrame(columns=TRACE_COLUMNS)
        return _read(self.traces_path, lambda _: pd.read_parquet(self.traces_path))


def _plain(value: Any, where: str) -> Any:
    """`value` in JSON's own types: arrays and tensors as lists, NaN and infinity as null."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int):  # numpy's and enum's subclasses become the plain type, for yaml
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return _plain(value.tolist(), where)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ResultsError(f"{where}: {value!r} is a {type(value).__name__}; runs hold numbers, text, lists")


def _write_json(path: Path, value: dict) -> None:
    text = json.dumps(_plain(value, path.name), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def _line(record: dict, where: str) -> bytes:
    if "step" not in record:
        raise ResultsError(f'{where}: a record needs its "step", got only {sorted(record)}')
    return json.dumps(_plain(record, where), allow_nan=False).encode() + b"\n"


def _append(path: Path, record: dict) -> None:
    """One line, one write: a kill tears at most this line. A line torn by an earlier kill goes first."""
    line = _line(record, path.name)
    with open(path, "a+b", buffering=0) as file:
        file.seek(max(0, file.tell() - 1))
        if file.read(1) in (b"", b"\n"):
            file.write(line)
            return
    _rewrite(path, [*_records(path), record])


def _rewrite(path: Path, records: list[dict]) -> None:
    lines = b"".join(_line(record, path.name) for record in records)
    write_atomically(path, lambda file: file.write(lines))


def _records(path: Path) -> list[dict]:
    """The records of a jsonl file. A torn last line is left out with a warning; one before it is an error."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    records = []
    for number, line in numbered:
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"an object was expected, not {record!r}")
            records.append(record)
        except ValueError as error:  # not JSON, or cut in the middle of a character
            if number != numbered[-1][0]:
                raise ResultsError(f"{path}, line {number} is torn ({error}). Mend or remove it.") from error
            warnings.warn(f"{path}, line {number}, the last, is torn (a killed run); left out", stacklevel=3)
    return records


def _read(path: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        value = parse(path.read_bytes())
    except FileNotFoundError as error:
        raise ResultsError(f"{path} is missing: this is no run, or an unfinished one") from error
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise ResultsError(f"{path} can't be read: {error}. Set the run aside and run it again.") from error
    if not isinstance(value, dict | pd.DataFrame):
        raise ResultsError(f"{path} holds {value!r}, not named values. Set the run aside and run it again.")
    return value


def _require(table: pd.DataFrame, columns: list[str], what: str) -> None:
    missing = [name for name in columns if name not in table]
    if missing:
        raise ResultsError(f"the {what} lack the columns {missing}; there are {list(table.columns)}")


def table(root: str | Path) -> pd.DataFrame:
    """Every finished run under `root`, one row each, sorted by `run` (its path relative to root).

    Columns, in this order: run, the summary's keys, the config with dots under `config.` (lists as JSON).
    Unfinished runs are named in one warning; runs set aside, wandb folders and links are not looked at.
    Raises ResultsError if there is no finished run.
    """
    runs = list(_runs(Path(root)))
    unfinished = [str(run.path) for run in runs if not run.is_complete]
    if unfinished:
        names = ", ".join(unfinished[:20]) + (", ..." if len(unfinished) > 20 else "")
        warnings.warn(f"{len(unfinished)} unfinished run(s) left out: {names}", stacklevel=2)
    rows = [_row(run, Path(root)) for run in runs if run.is_complete]
    if not rows:
        raise ResultsError(f"no finished run under {root}. Make runs there with: python run.py runs={root}")
    frame = pd.DataFrame(rows, dtype=object)
    config = sorted(name for name in frame if name.startswith("config."))
    frame = frame[["run", *SUMMARY, *config]].sort_values("run", ignore_index=True)
    dtypes = {"run": "string", **SUMMARY}
    return pd.DataFrame({name: _typed(frame[name], dtypes.get(name)) for name in frame})


def _runs(root: Path) -> Iterator[RunDirectory]:
    for folder, folders, files in os.walk(root):  # does not follow links
        started = "config.yaml" in files and {"environment.json", "metrics.jsonl"} & set(files)
        if "summary.json" in files or started:
            yield RunDirectory(folder)
            folders.clear()  # a run holds no other run
        folders[:] = [name for name in folders if not NOT_RUNS.search(name)]


def _row(run: RunDirectory, root: Path) -> dict[str, Any]:
    summary = run.summary
    return {
        "run": run.path.relative_to(root).as_posix(),
        **{name: summary.get(name) for name in SUMMARY},
        **dict(_flat(run.config, "config")),
    }


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
    values = rows.dropna(subset=[column]).groupby("seed")[column].mean().astype(float)
    n = len(values)
    half = stdtrit(n - 1, 0.975) * values.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return Interval(n, float(values.mean()), float(half))


def by_setting(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The table split: rows of a part differ only in criterion, requested sparsity or threshold, and seed.

    Keys say the data set, model, kind of pruning and compensation, and each other config field that tells two
    settings of these apart, such as "mnist, mlp, one_shot, compensation mean, optimizer.lr=0.1".
    """
    _require(table, ["run", "criterion", "seed", *BASE[:3]], "table's rows")  # no pruning: no compensation
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


def aggregate(table: pd.DataFrame) -> pd.DataFrame:
    """One row per setting, criterion and requested sparsity or threshold: means, 95 % t-intervals over seeds.

    Columns: setting, criterion, requested, neuron_sparsity (mean achieved, 0 to 1), and per test accuracy
    `<name>_n` (seeds), `<name>` (mean, percent), `<name>_half` (percent, NaN for n < 2).
    """
    rows = []
    for setting, part in by_setting(table).items():
        part = part.assign(criterion=part["criterion"].fillna("none"), requested=requested(part))
        for (criterion, asked), runs in part.groupby(["criterion", "requested"], dropna=False):
            row = {"setting": setting, "criterion": criterion, "requested": asked}
            row["neuron_sparsity"] = interval(runs, "neuron_sparsity").mean
            for name in ACCURACIES:
                row[f"{name}_n"], row[name], row[f"{name}_half"] = interval(runs, name)
            rows.append(row)
    return pd.DataFrame(rows)


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
        for name, title in zip(ACCURACIES, ["dense %", "pruned %", "final %"], strict=True):
            shown[title] = list(map(_percent, rows[name], rows[f"{name}_half"]))
        blocks.append(f"{setting}\n{shown.to_string(index=False, float_format='{:.3f}'.format, na_rep='-')}")
    note = """Test accuracy before the first prune event (dense), after the last (pruned), at the end (final):
mean over n seeds ± half-width of its 95 % t-interval, none for n = 1. sparsity: neurons removed, achieved."""
    return "\n\n".join([*blocks, note])


def span(low: int, high: int) -> str:
    """How many: "5", or "3-5" where it differs."""
    return f"{low}" if low == high else f"{low}-{high}"


def _percent(mean: float, half: float) -> str:
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if math.isnan(half) else f"{mean:.2f} ± {half:.2f}"


def environment(device: str, seed: int, config_hash: str, trunk_hash: str) -> dict[str, Any]:
    """What a run needs to be repeated besides its config: commit, versions, hardware, seed, hashes.

    device: resolved ("cpu", "cuda:0"). Commit and dirty flag are those of the repository that tracks this
    package, None where there is none; so is the version of a package that is not installed.
    """
    versions = {name: _version(name) for name in ["torch", "torchvision", "numpy", "wandb", "tnvp"]}
    versions |= {"python": platform.python_version(), "hydra": _version("hydra-core")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    changes = _git("status", "--porcelain", "--untracked-files=no")
    # A package installed inside somebody else's repository is not tracked there: its commit says nothing.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    return {
        "commit": _git("rev-parse", "HEAD") if tracked else None,
        "dirty": bool(changes) if tracked and changes is not None else None,
        "versions": versions,
        "device": device,
        "hardware": _hardware(device),
        "cores": cores,
        "seed": seed,
        "config_hash": config_hash,
        "trunk_hash": trunk_hash,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git prints about the package's folder; None where git or a repository is missing."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware(device: str) -> str:
    """The accelerator's name, or the processor's."""
    if device.startswith("cuda"):
        import torch  # only here: tables and figures of any run are read without it

        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()


def main(arguments: list[str] | None = None) -> int:
    """Print a tree of runs as a table; 0, or 2 for a tree that can't be read."""
    parser = argparse.ArgumentParser(prog="python -m tnvp.results", description="Means over seeds.")
    parser.add_argument("root", metavar="ROOT", help="folder of runs, such as runs")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="also write the table, one row a run")
    options = parser.parse_args(arguments)
    try:
        runs = table(options.root)
        if options.csv:
            write_atomically(options.csv, lambda file: runs.to_csv(file, index=False))
        print(describe(runs))
    except (ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.exit(main())
