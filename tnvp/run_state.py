"""The state of a run on disk: files of tensors and plain data, checked when they are read.

A trunk is one such file. A run that is at work keeps two in its checkpoint folder, the last good state and the one before,
each named ``<step>-<digest of its bytes>.pt``.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tnvp.run_directory import set_aside, write_atomically

FORMAT = "tnvp-run-1"
KEPT = 2  # the last state and the one before
DAMAGED = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, LookupError, TypeError)


def write_state(path: Path, content: dict, form: str) -> None:
    """Write ``content``, tensors and plain data, under the name of its format."""
    write_atomically(path, lambda file: torch.save({"format": form, **content}, file))


def read_state(path: Path, form: str) -> dict:
    """What `write_state` wrote, tensors on the CPU. Raises one of DAMAGED where it is not that, whole."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    if content["format"] != form:
        raise ValueError(f"format {content['format']!r}")
    return content


class Checkpoints:
    """The states in one folder, named by step and checksum."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def last_step(self) -> int | None:
        """The step of the newest file, whole or not."""
        return int(self.paths()[0].stem.partition("-")[0]) if self.paths() else None

    def paths(self) -> list[Path]:
        """The files there, the newest first."""
        named = [path for path in self.folder.glob("*.pt") if re.fullmatch(r"\d+-[0-9a-f]+", path.stem)]
        return sorted(named, key=lambda path: int(path.stem.partition("-")[0]), reverse=True)

    def write(self, step: int, content: dict) -> None:
        """Keep the state of ``step``, and the newest before it. A full disk costs the checkpoint, not the run: a warning."""
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **content}, buffer)
        path = self.folder / f"{step:09d}-{_digest(buffer.getbuffer())}.pt"
        try:
            write_atomically(path, lambda file: file.write(buffer.getbuffer()))
        except OSError as error:
            warnings.warn(f"the checkpoint {path} can't be kept ({error}): the one before stays the last", stacklevel=2)
            return
        for old in self.paths()[KEPT:]:
            old.unlink(missing_ok=True)

    def newest(self, fits: Callable[[dict], bool]) -> dict | None:
        """The newest state that is whole and ``fits`` the run's other files; None without one. Others are set aside, with a warning."""
        for path in self.paths():
            try:
                if path.stem.partition("-")[2] != _digest(path.read_bytes()):
                    raise ValueError("its checksum is another")
                state = read_state(path, FORMAT)
                if not fits(state):
                    raise ValueError("records from before it are missing")
                return state
            except DAMAGED as error:
                aside = set_aside(path)
                warnings.warn(f"the checkpoint {path} is damaged ({error}): set aside as {aside.name}", stacklevel=2)
        return None

    def remove(self) -> None:
        """The run is complete: nothing goes on from here."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


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
