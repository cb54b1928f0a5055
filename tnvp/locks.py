"""Locks between processes: a file beside what it guards, held while a block runs.

The system releases a lock when its process dies, however that happens; the file that stays is taken by the next one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: there nobody is kept out
    fcntl = None


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
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if waiting is None:
            raise LockedError(error.errno, "held by another process", str(path)) from None
        print(waiting, file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)


def _is(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one of that name; the last holder may have removed it meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
