"""Locks between processes: a file beside what it guards, held while a block runs.

The system releases a lock when its process dies, however that happens; the file that stays is taken by the next one.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: there nobody is kept out
    fcntl = None


ATTEMPTS, PAUSE = 20, 0.005  # seconds; `is_held` keeps others out for an instant, which is not to be taken for a holder


class LockedError(OSError):
    """Another process holds the lock; its path is ``filename``."""


@contextmanager
def locked(path: Path, waiting: str | None = None) -> Iterator[None]:
    """Inside, no other process is inside for the same lock file ``path``, which is gone afterwards.

    Where one is, the message ``waiting`` is printed and it waits; without a message LockedError is raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _taken(path, waiting):
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()  # before the lock is released: whoever has opened it sees that it is another file


@contextmanager
def _taken(path: Path, waiting: str | None) -> Iterator[None]:
    while True:
        with open(path, "wb") as file:
            _lock(file, path, waiting)
            if _is(path, file.fileno()):
                yield
                return


def _lock(file, path: Path, waiting: str | None) -> None:
    if fcntl is None:
        return
    for _ in range(ATTEMPTS):
        if _try(file, fcntl.LOCK_EX):
            return
        time.sleep(PAUSE)
    if waiting is None:
        raise LockedError(errno.EWOULDBLOCK, "held by another process", str(path))
    print(waiting, file=sys.stderr)
    fcntl.flock(file, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether a process is inside for the lock file ``path``. Whoever only looks keeps nobody out."""
    if fcntl is None:
        return False
    try:
        while True:
            with open(path, "rb") as file:
                held = not _try(file, fcntl.LOCK_SH)  # which any number of processes may have at once
                if held or _is(path, file.fileno()):
                    return held
    except FileNotFoundError:
        return False


def _try(file, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one of that name; the last holder may have removed it meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
