"""What became of each point of a sweep: the note that every job leaves in the sweep's folder, and the table at the end.

A launcher runs jobs in processes of its own, some are killed, and another sweep may have the same runs at work. So nothing
is handed back in memory: a job notes what it began and how that ended, and run directories say which runs are complete.
All processes must see the same folders: on one machine, or through a shared file system.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import NamedTuple

from tnvp.locks import LockedError, locked
from tnvp.resume import Stopped
from tnvp.run_directory import RunDirectory, write_atomically

NOTE = "outcome.json"
AT_WORK = "at-work.lock"  # beside the note, held while the job's process has it at work
STOPPED = "stopped"  # in the sweep's folder: the host on which no job begins any more
POLL_SECONDS = 0.5
PATIENCE = 60.0  # seconds that a step and its checkpoint may take once a sweep is interrupted


class Point(NamedTuple):
    """One run of a sweep: what the command line says of it, and its directory."""

    overrides: list[str]
    path: Path


class Row(NamedTuple):
    """How a point stands at the end. ``status`` is its part in the exit status: 0 done, 1 a bug or missing, 2 bad input."""

    state: str
    overrides: list[str]
    why: str
    status: int


def own_folder(wanted: str | Path) -> Path:
    """Make a folder that no other sweep has: as wanted, or with -2, -3, … where the name is taken. Raises OSError if none can be made."""
    path, n = Path(wanted).absolute(), 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not os.path.lexists(path):  # it is a parent that exists, as a link that leads nowhere
                raise
            n += 1
            path = path.with_name(f"{Path(wanted).name}-{n}")


def running_elsewhere(path: Path) -> bool:
    """True while a process has the run at ``path`` at work."""
    return is_held(RunDirectory(path).lock_path)


def is_held(lock: Path) -> bool:
    """True while a process is inside `locked` for this file."""
    if not lock.exists():
        return False
    try:
        with locked(lock):
            return False
    except LockedError:
        return True


def note(folder: str | Path, **facts: object) -> None:
    """Write a job's note into the job's folder: number, overrides, path, state ("begun", "done", "failed", …), why, status.

    Where that fails it is told, and no more: the run and those after it go on, and their directories say what is complete.
    """
    text = json.dumps(facts, indent=2) + "\n"
    try:
        write_atomically(Path(folder) / NOTE, lambda file: file.write(text.encode()))
    except OSError as error:
        print(f'the note "{facts.get("state")}" of a run can\'t be written: {error}', file=sys.stderr)


def notes(folder: Path) -> list[dict]:
    """What the jobs of the sweep noted so far, in their order."""
    found = [json.loads(path.read_text()) for path in folder.rglob(NOTE)]
    return sorted(found, key=lambda facts: facts["number"])


@contextmanager
def at_work(folder: str | Path) -> Iterator[None]:
    """Inside, this process has the job of that folder at work."""
    with ExitStack() as stack:
        with suppress(OSError):  # as on a full disk, of which the run itself will tell
            stack.enter_context(locked(Path(folder) / AT_WORK))
        yield


def stop(folder: Path) -> None:
    """Let the jobs that other processes of this host have at work finish their step, and let none begin any more.

    Waits for them, PATIENCE seconds at most. Launchers kill their workers, or leave them alone, when a signal ends them. Jobs on
    other hosts are left to their scheduler. No print: it may be called from a signal's handler.
    """
    with suppress(OSError):
        (folder / STOPPED).write_text(gethostname())
    told: set[Path] = set()
    end = time.monotonic() + PATIENCE
    while (jobs := elsewhere_at_work(folder)) and time.monotonic() < end:
        if new := jobs.keys() - told:
            os.write(2, f"\nwaiting for {len(jobs)} runs to finish their step; once more stops at once\n".encode())
            for job in new:
                with suppress(OSError):  # it has just ended
                    os.kill(jobs[job], signal.SIGTERM)  # not SIGINT: Ray's workers never get that
            told |= new
        time.sleep(POLL_SECONDS / 5)


def elsewhere_at_work(folder: Path) -> dict[Path, int]:
    """The jobs that other processes of this host have at work: folder → process. A process that ended has none, whoever has its number now."""
    found = {path.parent: json.loads(path.read_text()) for path in folder.rglob(NOTE)}
    return {
        job: facts["pid"]
        for job, facts in found.items()
        if facts["state"] == "begun" and facts["host"] == gethostname() and facts["pid"] != os.getpid()
        if is_held(job / AT_WORK)
    }


def require_going_on(folder: Path) -> None:
    """Raises Stopped where the sweep was told to `stop` on this host: some launchers still begin what they had queued."""
    with suppress(OSError):
        if (folder / STOPPED).read_text() == gethostname():
            raise Stopped(signal.SIGTERM)


def complete(points: Iterable[Point]) -> set[Path]:
    """The runs that are complete now."""
    return {point.path for point in points if RunDirectory(point.path).is_complete}


def wait(points: Iterable[Point]) -> None:
    """Wait for the runs that other processes have at work, and say so."""
    points, said = list(points), None
    while busy := [point.path.name for point in points if running_elsewhere(point.path)]:
        if busy != said:
            print(
                f"waiting for {len(busy)} that other processes run (Ctrl-C leaves them to it):", *busy, file=sys.stderr
            )
            said = busy
        time.sleep(POLL_SECONDS)


def rows(points: Sequence[Point], found: Sequence[dict], before: set[Path]) -> list[Row]:
    """How every point stands: of those that were planned and those that a search drew.

    Args:
        points: what was planned; of a search, nothing is known before.
        found: the notes of the jobs.
        before: the runs that were complete when the sweep began.
    """
    made = {Path(facts["path"]) for facts in found if facts["state"] == "done"}
    noted = {Path(facts["path"]): facts for facts in found if facts["path"]}
    table = [row(point, noted.get(point.path, {}), made, before) for point in points]
    planned = {point.path for point in points}
    for facts in found:
        if not facts["path"]:  # its configuration was refused
            table.append(Row("failed", facts["overrides"], facts["why"], facts["status"]))
        elif Path(facts["path"]) not in planned:
            table.append(row(Point(facts["overrides"], Path(facts["path"])), facts, made, before))
    return table


def row(point: Point, facts: dict, made: set[Path], before: set[Path]) -> Row:
    """How one point stands; ``facts`` is its note, empty if it has none."""
    if RunDirectory(point.path).is_complete and facts.get("state") != "failed":
        by_another = "" if point.path in made else "before" if point.path in before else "by another process"
        return Row(f"done {by_another}".strip(), point.overrides, "", 0)
    if facts.get("state") == "failed":
        return Row("failed", point.overrides, facts["why"], facts["status"])
    if running_elsewhere(point.path):
        return Row("running elsewhere", point.overrides, "another process has it at work", 1)
    why = "not started" if not facts else "broken off: its process ended" if facts["state"] == "begun" else facts["why"]
    return Row("not finished", point.overrides, why, 1)


def describe(table: Sequence[Row]) -> str:
    """A line that counts the states, and one for each point with what varies between them."""
    states = list(dict.fromkeys(row.state for row in table))
    counts = ", ".join(f"{sum(row.state == state for row in table)} {state}" for state in states)
    everywhere = set.intersection(*(set(row.overrides) for row in table)) if len(table) > 1 else set()
    width = max(map(len, states), default=0)
    lines = [f"{len(table)} runs: {counts}"]
    for row in table:
        own = " ".join(override for override in row.overrides if override not in everywhere)
        why = row.why.strip().splitlines()
        lines.append(f"  {row.state:{width}}  {own}" + (f"  ({why[0]})" if why else ""))
    return "\n".join(lines)


def status(table: Sequence[Row]) -> int:
    """The exit status: 1 if a bug or a run that is missing is among them, else 2 if bad input is, else 0."""
    found = {row.status for row in table}
    return 1 if 1 in found else max(found, default=0)


def objectives(path: Path, count: int) -> float | tuple[float, int]:
    """What a search looks at: the validation accuracy of the network that the run ends with; its FLOPs as the second.

    Not the test accuracy: the best of many runs by that would no longer be a fair measurement.
    """
    directory = RunDirectory(path)
    events, metrics = directory.events(), directory.metrics()
    since = events[-1]["step"] if events else 0
    after = metrics[metrics["step"] > since]["validation/accuracy"].dropna()
    if len(after):  # each phase ends at its best epoch since the last event
        accuracy = float(after.max())
    else:
        accuracy = events[-1].get("accuracy_recalibrated", events[-1]["accuracy_after"])
    return accuracy if count == 1 else (accuracy, directory.summary["flops"])
