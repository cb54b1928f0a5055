"""One run on disk: the name of every file it leaves, writers that never leave half a file, and readers.

A run directory is the truth; figures and W&B are drawn from it. Files are written aside and renamed, or only
appended to: a killed run leaves no half file and at most one torn last line. `summary.json` comes last, and a
run that has it is complete.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tnvp.files import named, remove_leftovers, write_atomically

ACCURACIES = ["test_accuracy_dense", "test_accuracy_pruned", "test_accuracy"]
SUMMARY = {  # summary.json keys -> dtype in the table, in column order
    **dict.fromkeys([*ACCURACIES, "neuron_sparsity", "parameter_sparsity", "flops_reduction"], "float64"),
    **dict.fromkeys(["parameters", "flops", "training_flops", "bytes"], "Int64"),
    "widths": "string",  # of the prunable groups, as 60-20
    "seconds": "float64",
    "criterion": "string",
    "compensation": "string",
    "seed": "Int64",
    **dict.fromkeys(["study", "config_hash", "trunk_hash", "commit", "hardware"], "string"),
}
NUMBERS = ["epoch", "learning_rate", "train/loss", "train/accuracy", "validation/loss", "validation/accuracy"]
GROUP = {"name": str, "removed": list, "kept": list, "width_before": int, "width_after": int}  # of a prune event
TRACE_COLUMNS = ["step", "group", "neuron", "mean", "variance", "count"]
CHUNK = 1 << 20  # bytes
PART = "part-{:06d}.parquet"  # of the trace, numbered from 1


class ResultsError(ValueError):
    """A run directory or tree that can't be written or read; the message names the file and the way out."""


class RunningElsewhere(ResultsError):
    """Another process has this run at work."""


def set_aside(path: str | Path) -> Path:
    """Rename a run directory to `<name>.old-<n>`, first free n; returns the new path. Nothing is deleted."""
    path = Path(path)
    n = 1
    while path.with_name(f"{path.name}.old-{n}").exists():
        n += 1
    return path.rename(path.with_name(f"{path.name}.old-{n}"))


class Digest:
    """Of the beginning of a stream, up to ``end``."""

    def __init__(self):
        self.end, self.hash = 0, hashlib.sha256()

    def add(self, data: bytes, length: int) -> None:
        self.hash.update(data)
        self.end += length


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
        self.traces_path = self.path / "traces.parquet"  # a folder of parts; in old runs one file
        self.checkpoint_path = self.path / "checkpoint"
        self.model_path = self.path / "model.pt"
        self.figures_path = self.path / "figures"
        self.summary_path = self.path / "summary.json"
        self.lock_path = self.path.with_name(
            f".{self.path.name}.lock"
        )  # beside: the folder may be set aside while it is held

        self._streams = {path: Digest() for path in (self.metrics_path, self.events_path, self.traces_path)}

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

    @property
    def has_begun(self) -> bool:
        """Whether there is more than what a run writes before it begins."""
        before = {self.config_path, self.environment_path}
        return self.path.is_dir() and any(path not in before for path in self.path.iterdir())

    def remove_leftovers(self) -> None:
        """Remove what killed processes wrote aside. The run is this process's alone: nobody writes there now."""
        for folder in (self.path, self.traces_path, self.checkpoint_path):
            remove_leftovers(folder)

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
        """The next part of traces.parquet: one row per neuron and recording window; columns TRACE_COLUMNS."""
        require_columns(traces, TRACE_COLUMNS, "traces")
        if self.traces_path.is_file():
            raise ResultsError(f"{self.traces_path} is a file, where a folder of parts belongs: move it away")
        path = self.traces_path / PART.format(len(self._parts()) + 1)
        write_atomically(
            path, lambda file: traces[TRACE_COLUMNS].to_parquet(file, index=False, write_page_checksum=True)
        )

    def _parts(self) -> list[Path]:
        return sorted(self.traces_path.glob(PART.format(0).replace("000000", "*")))

    def log(self, record: dict) -> None:
        """Append one record, with its "step", to metrics.jsonl."""
        _append(self.metrics_path, record)

    def event(self, record: dict) -> None:
        """Append one prune event, with its "step", to events.jsonl."""
        _append(self.events_path, record)

    def position(self) -> dict[str, list]:
        """How far each stream is written, bytes or parts of the trace, and the digest of all that. It is on the disk when this returns.

        What was there the last time is not read again: many positions cost no more than one.
        """
        for path in (self.metrics_path, self.events_path):
            if path.exists():
                with named(path), open(path, "ab") as file:
                    os.fsync(file.fileno())
        return {path.name: self._digest(path, self._streams[path]) for path in self._streams}

    def trouble(self, position: dict[str, list]) -> str:
        """What is missing or other than it was at ``position``; "" if nothing is."""
        for path in self._streams:
            end, digest = position[path.name]
            found = self._digest(path, Digest(), end)
            if found != [end, digest]:
                return f"records from before it are {'missing' if found[0] < end else 'damaged'}, in {path.name}"
        return ""

    def cut_back(self, position: dict[str, list]) -> None:
        """Drop what was written after ``position`` (the checkpoint's): a resumed run writes no record twice."""
        for path in (self.metrics_path, self.events_path):
            if path.exists():
                os.truncate(path, position[path.name][0])
        for part in self._parts()[position[self.traces_path.name][0] :]:
            part.unlink()
        self._streams = {path: Digest() for path in self._streams}

    def _digest(self, path: Path, so_far: "Digest", end: int | None = None) -> list:
        """Where the stream at ``path`` ends, at ``end`` at most, and the digest up to there, on from ``so_far``."""
        if path == self.traces_path:
            for part in self._parts()[so_far.end : end]:
                so_far.add(part.read_bytes(), 1)
        elif path.exists():
            with open(path, "rb") as file:
                file.seek(so_far.end)
                while data := file.read(CHUNK if end is None else min(CHUNK, end - so_far.end)):
                    so_far.add(data, len(data))
        return [so_far.end, so_far.hash.hexdigest()]

    @property
    def config(self) -> dict:
        """The resolved config, nested. Raises ResultsError if it is missing or unreadable."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one reads fifty configs in no time
        return _read(self.config_path, lambda: _plain(yaml.load(self.config_path.read_bytes(), loader), "config"))

    @property
    def environment(self) -> dict:
        """environment.json. Raises ResultsError if it is missing or unreadable."""
        return _read(self.environment_path, lambda: json.loads(self.environment_path.read_bytes()))

    @property
    def summary(self) -> dict:
        """summary.json. Raises ResultsError if it is missing (the run is unfinished) or unreadable."""
        return _read(self.summary_path, lambda: json.loads(self.summary_path.read_bytes()))

    def records(self) -> list[dict]:
        """The records of metrics.jsonl in order; [] before the first."""
        return _records(self.metrics_path)

    def metrics(self) -> pd.DataFrame:
        """The same as a table, NaN where a record lacks a key."""
        frame = pd.DataFrame(self.records())
        for name in frame.columns.intersection(NUMBERS):
            if not frame[name].map(lambda value: value is None or isinstance(value, int | float)).all():
                raise ResultsError(f"{self.metrics_path} is damaged: a {name} is no number. Run it again: force=true")
        unknown = [name for name in frame if frame[name].isna().all()]  # all null: pandas would say "object"
        return frame.astype(dict.fromkeys(unknown, "float64"))

    def events(self) -> list[dict]:
        """The prune events in order; [] if there were none."""
        events = _records(self.events_path)
        for event in events:
            groups = event.get("groups")
            if not isinstance(groups, list) or not all(map(_is_group, groups)):
                raise ResultsError(
                    f"{self.events_path} is damaged: the event at step {event['step']} does not say what each group lost "
                    "and kept. Run it again: force=true"
                )
        return events

    def traces(self, columns: Sequence[str] | None = None, groups: Sequence[str] | None = None) -> pd.DataFrame:
        """The trace, one row per neuron and recording window; empty if the run has none.

        columns, groups: those to read, all if None; no other value is held in memory.
        """
        from pyarrow import concat_tables, parquet  # only here: the other readers do without it

        parts = self._parts() or [self.traces_path] * self.traces_path.is_file()
        asked = TRACE_COLUMNS if columns is None else list(columns)
        if not parts:
            return pd.DataFrame(columns=asked)
        chosen = None if groups is None else [("group", "in", list(groups))]

        def parse() -> pd.DataFrame:
            found = [
                parquet.read_table(part, columns=asked, filters=chosen, page_checksum_verification=True)
                for part in parts
            ]
            return concat_tables(found).to_pandas()

        read = _read(self.traces_path, parse)
        require_columns(read, asked, f"rows of {self.traces_path}")
        return read


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
    with named(path), open(path, "a+b", buffering=0) as file:
        file.seek(max(0, file.tell() - 1))
        if file.read(1) in (b"", b"\n"):
            if file.write(line) < len(line):  # the system says so only in the next write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
            if not isinstance(record.get("step"), int):
                raise ValueError("it has no step")
            if records and record["step"] < records[-1]["step"]:
                raise ValueError(f"its step {record['step']} comes after {records[-1]['step']}")
            records.append(record)
        except ValueError as error:  # not JSON, or cut in the middle of a character
            if number != numbered[-1][0]:
                raise ResultsError(f"{path}, line {number} is torn ({error}). Mend or remove it.") from error
            warnings.warn(f"{path}, line {number}, the last, is torn (a killed run); left out", stacklevel=3)
    return records


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and all(isinstance(group.get(key), kind) for key, kind in GROUP.items())


def _read(path: Path, parse: Callable[[], Any]) -> Any:
    try:
        value = parse()
    except FileNotFoundError as error:
        raise ResultsError(f"{path} is missing: this is no run, or an unfinished one") from error
    except Exception as error:  # parsers raise many unrelated types, depending on the damage
        raise ResultsError(f"{path} can't be read: {error}. Set the run aside and run it again.") from error
    if not isinstance(value, dict | pd.DataFrame):
        raise ResultsError(f"{path} holds {value!r}, not named values. Set the run aside and run it again.")
    return value


def require_columns(table: pd.DataFrame, columns: list[str], what: str) -> None:
    missing = [name for name in columns if name not in table]
    if missing:
        raise ResultsError(f"the {what} lack the columns {missing}; there are {list(table.columns)}")


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
        "hardware": hardware(device),
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


def hardware(device: str) -> str:
    """The accelerator's name, or the processor's."""
    if device.startswith("cuda"):
        import torch  # only here: tables and figures of any run are read without it

        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()
