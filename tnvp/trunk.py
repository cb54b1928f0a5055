"""Trunks: the part of a run before its first prune event, trained once and kept for all runs that share it.

A trunk is the state of a run, as in its checkpoints, and its records so far: a file of plain data, written aside and renamed, and
named by everything it depends on. Whoever trains one holds its lock; others wait for it. The system releases the lock when
its process dies.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tnvp import locks
from tnvp.files import remove_leftovers
from tnvp.run_directory import set_aside
from tnvp.run_state import DAMAGED, digest_of, read_state, write_state
from tnvp.training import Callback, Fit

PACKAGE = Path(__file__).resolve().parent
FORMAT = "tnvp-trunk-4"
CODE = (
    "data.py",
    "events.py",
    "experiment.py",
    "journal.py",
    "run_state.py",
    "setup.py",
    "trunk.py",
    "training.py",
    "image_folder.py",
    "published.py",
)
PACKAGES = ("models", "pruning")


def trunk_path(folder: str | Path, trunk_hash: str, facts: Iterable[object], tensors: Iterable[Tensor]) -> Path:
    """<folder>/<trunk hash>-<digest of what no configuration tells>.pt.

    ``tensors``: initial weights. ``facts``: what else decides, such as data, device and groups, by their repr. The code of
    training and recording and torch's version count too.
    """
    digest = hashlib.sha256(repr((FORMAT, torch.__version__, torch.get_num_threads(), *facts)).encode())
    sources = [
        *(PACKAGE / name for name in CODE),
        *(file for name in PACKAGES for file in (PACKAGE / name).rglob("*.py")),
    ]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    digest.update(digest_of(tensors).encode())
    return Path(folder) / f"{trunk_hash}-{digest.hexdigest()[:12]}.pt"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same trunk. It waits for them, and says so."""
    with locks.locked(
        path.with_suffix(".lock"), waiting=f"waiting for the trunk {path}, which another process has at work"
    ):
        remove_leftovers(path.parent, of=path.name)  # of a process that was killed while it wrote it
        yield


def read(path: Path) -> dict | None:
    """The trunk at ``path``, tensors on the CPU; None where there is none. A damaged one is set aside, with a warning."""
    if not path.exists():
        return None
    try:
        return read_state(path, FORMAT)
    except DAMAGED as error:
        aside = set_aside(path)
        warnings.warn(
            f"the trunk {path} is damaged ({type(error).__name__}) and was set aside as {aside.name}: it is trained anew",
            stacklevel=2,
        )
        return None


def write(path: Path, content: dict) -> None:
    """Keep ``content``: plain data and tensors. A full disk costs the trunk, not the run: a warning."""
    try:
        write_state(path, content, FORMAT)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"the trunk {path} can't be kept ({error}): every run that shares it trains it anew", stacklevel=2
        )


class LastStep(Callback):
    """Calls ``end(fit)`` after a trunk's last ``step``, or after the epoch that ends with it. The last but a checkpoint's callback."""

    def __init__(self, step: int, end: Callable[[Fit], None]):
        self.step, self.end = step, end

    def on_step(self, fit: Fit) -> None:
        if fit.step == self.step and not fit.ends_epoch:
            self.end(fit)

    def on_epoch(self, fit: Fit) -> None:
        if fit.step == self.step:
            self.end(fit)
