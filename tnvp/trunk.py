"""Trunks: the part of a run before its first prune event, trained once and kept for all runs that share it.

A trunk is a file of plain data, written aside and renamed, and named by everything it depends on. Whoever trains one holds
its lock; others wait for it. The system releases the lock when its process dies.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tnvp.run_directory import set_aside, write_atomically

try:
    import fcntl
except ImportError:  # not on Windows: two processes may train the same trunk twice there, with the same result
    fcntl = None

PACKAGE = Path(__file__).resolve().parent
FORMAT = "tnvp-trunk-1"
DAMAGED = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, LookupError, TypeError)
CODE = (
    "data.py",
    "events.py",
    "experiment.py",
    "journal.py",
    "trunk.py",
    "training.py",
    "image_folder.py",
    "published.py",
)
PACKAGES = ("models", "pruning")


def trunk_path(folder: str | Path, trunk_hash: str, facts: Iterable[object], tensors: Iterable[Tensor]) -> Path:
    """<folder>/<trunk hash>-<digest of what no configuration tells>.pt.

    ``tensors``: initial weights and data. ``facts``: what else decides, such as device and groups, by their repr. The code
    of training and recording and torch's version count too.
    """
    digest = hashlib.sha256(repr((FORMAT, torch.__version__, torch.get_num_threads(), *facts)).encode())
    sources = [
        *(PACKAGE / name for name in CODE),
        *(file for name in PACKAGES for file in (PACKAGE / name).rglob("*.py")),
    ]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    for tensor in tensors:
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return Path(folder) / f"{trunk_hash}-{digest.hexdigest()[:12]}.pt"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same path. It waits for them, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "wb") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for the trunk {path}, which another process has at work", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read(path: Path) -> dict | None:
    """The trunk at ``path``, tensors on the CPU; None where there is none. A damaged one is set aside, with a warning."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return content
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
        write_atomically(path, lambda file: torch.save({"format": FORMAT, **content}, file))
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"the trunk {path} can't be kept ({error}): every run that shares it trains it anew", stacklevel=2
        )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own generators: of the CPU, and of the device where it is another."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state["mps"])
