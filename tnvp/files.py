"""Files that are whole or not there: written aside, and renamed once they are on the disk."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

ASIDE = re.compile(r"\..+\.\d+\.tmp")


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError that a write gives, such as of a full disk, says the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a file beside `path`, then rename it: readers see the old or the new one, not half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with named(path), open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # else a power failure could leave the new name with nothing in it
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Inside, the folder is there. What was made for that and is still empty goes again, if the block raises."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def remove_leftovers(folder: Path, of: str = "*") -> None:
    """Remove what killed processes wrote aside for the files ``of`` that pattern, which nobody else may be writing now."""
    for path in folder.glob(f".{of}.*.tmp"):
        if ASIDE.fullmatch(path.name):
            path.unlink(missing_ok=True)
