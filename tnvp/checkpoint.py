"""Save and load a pruned model of any widths: tensors and a manifest, never pickled code.

The file is a ``torch.save`` of plain data, written aside and renamed, and read with ``weights_only=True``.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from tnvp import models
from tnvp.pruning.layers import kind_of, synchronise_sizes

FORMAT = "tnvp-model-1"


class CheckpointError(ValueError):
    """A model file that can't be written, read, or fitted into the network it is loaded into."""


def save(model: nn.Module, path: str | os.PathLike) -> None:
    """Write ``model`` to ``path``: its tensors, and how a zoo model was built. The old file stays until the new is whole."""
    path = Path(path)
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    content = {
        "format": FORMAT,
        "class": type(model).__name__,
        "built_from": getattr(model, "built_from", None),
        "state": state,
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"can't write the model to {path}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def load(path: str | os.PathLike, into: nn.Module | None = None) -> nn.Module:
    """Read a model: a zoo model alone, any other ``into`` a fresh instance of its class, which is shrunk and filled.

    Returns the model (``into`` itself where given), on the CPU or on ``into``'s device, in eval mode.

    Raises:
        CheckpointError: the file is missing, damaged, of another format, or does not fit ``into``.
    """
    content = _read(Path(path))
    if into is None:
        built_from = content["built_from"]
        if built_from is None:
            raise CheckpointError(
                f"{path} holds a {content['class']}, which is no model of the zoo: "
                f"load it with tnvp.load({str(path)!r}, into={content['class']}())"
            )
        into = models.build(**built_from)
    resize(into, content["state"], path)
    into.load_state_dict(content["state"])
    return into.eval()


def _read(path: Path) -> dict:
    if not path.is_file():
        raise CheckpointError(f"there is no model file {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, LookupError) as error:
        raise CheckpointError(f"{path} is damaged or no file of tnvp.save ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by tnvp.save (format {FORMAT})")
    return content


def resize(model: nn.Module, state: dict[str, Tensor], source: object) -> None:
    """Give every parameter and buffer the shape it has in ``state``; layers that lack a stored bias get one."""
    own = dict(model.state_dict())
    added = [name for name in state if name not in own and name.endswith(".bias")]
    unknown = [name for name in state if name not in own and name not in added]
    missing = [name for name in own if name not in state]
    if unknown or missing:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: it lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}"
        )
    changed = [n for n in own if (own[n].shape, own[n].dtype) != (state[n].shape, state[n].dtype)]
    for name in changed + added:
        layer, _, tensor = name.rpartition(".")
        module = model.get_submodule(layer)
        old = getattr(module, tensor)
        reshaped = old is None or old.shape != state[name].shape
        if old is not None and any(new > own for new, own in zip(state[name].shape, old.shape, strict=False)):
            raise CheckpointError(
                f"{source} has {name} of shape {list(state[name].shape)}, larger than {list(old.shape)} in "
                f"{type(model).__name__}: load it into the class and arguments it was made with"
            )
        if (reshaped and kind_of(module) is None) or (old is not None and old.dim() != state[name].dim()):
            raise CheckpointError(
                f"{source} has {name} of shape {list(state[name].shape)}, {type(model).__name__} "
                f"{list(old.shape) if old is not None else None}: a {type(module).__name__} can't be resized"
            )
        like = old if old is not None else module.weight
        new = torch.empty_like(state[name], device=like.device)
        setattr(module, tensor, nn.Parameter(new, like.requires_grad) if isinstance(like, nn.Parameter) else new)
    for module in model.modules():
        if kind_of(module) is not None:
            synchronise_sizes(module)
