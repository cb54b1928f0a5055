"""The state of a run on disk: files of tensors and plain data, checked when they are read.

A trunk is one such file. A run that is at work keeps two in its checkpoint folder, the last good state and the one before,
each named by its step.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from tnvp.files import write_atomically
from tnvp.run_directory import set_aside

FORMAT = "tnvp-run-3"
KEPT = 2  # the last state and the one before
DAMAGED = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, LookupError, TypeError)


def write_state(path: Path, content: dict, form: str) -> None:
    """Write ``content``, tensors and plain data, behind a line of its format and the digest of its bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getbuffer()
    write_atomically(path, lambda file: file.writelines([_head(form, data), data]))


def read_state(path: Path, form: str) -> dict:
    """What `write_state` wrote, tensors on the CPU. Raises one of DAMAGED where it is not that, bit for bit."""
    head, end, data = path.read_bytes().partition(b"\n")
    if head + end != _head(form, data):
        raise ValueError("its format or its checksum is another")
    file = io.BytesIO(data)
    return torch.load(file, map_location="cpu", weights_only=True)


def _head(form: str, data: bytes | memoryview) -> bytes:
    return f"{form} {hashlib.sha256(data).hexdigest()}\n".encode()


class Checkpoints:
    """The states in one folder, named by step."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def last_step(self) -> int | None:
        """The step of the newest file, whole or not."""
        return int(self.paths()[0].stem) if self.paths() else None

    def paths(self) -> list[Path]:
        """The files there, the newest first."""
        named = [path for path in self.folder.glob("*.pt") if path.stem.isdecimal()]
        return sorted(named, key=lambda path: int(path.stem), reverse=True)

    def write(self, step: int, content: dict) -> None:
        """Keep the state of ``step``, and the newest before it. A full disk costs the checkpoint, not the run: a warning."""
        path = self.folder / f"{step:09d}.pt"
        try:
            write_state(path, content, FORMAT)
        except OSError as error:
            warnings.warn(f"the checkpoint {path} can't be kept ({error}): the one before stays the last", stacklevel=2)
            return
        for old in self.paths()[KEPT:]:
            old.unlink(missing_ok=True)

    def newest(self, trouble: Callable[[dict], str]) -> dict | None:
        """The newest state that is whole and has no ``trouble`` with the run's other files; None without one.

        Others are set aside, with a warning.
        """
        for path in self.paths():
            try:
                state = read_state(path, FORMAT)
                if why := trouble(state):
                    raise ValueError(why)
                return state
            except DAMAGED as error:
                aside = set_aside(path)
                warnings.warn(f"the checkpoint {path} can't be used ({error}): set aside as {aside.name}", stacklevel=2)
        return None

    def remove(self) -> None:
        """The run is complete: nothing goes on from here."""
        shutil.rmtree(self.folder, ignore_errors=True)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """12 hex digits that change with any type, shape or byte of the tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:12]


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
