"""Save and load a pruned model of any widths: tensors and a manifest, never pickled code.

The file is a ``torch.save`` of plain data, written aside and renamed, and read with ``weights_only=True``.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

from tnvp import models
from tnvp.files import write_atomically
from tnvp.pruning.attention import become_explicit, leave_nesting
from tnvp.pruning.layers import ATTENTION, kind_of
from tnvp.pruning.surgery import is_masked

FORMAT = "tnvp-model-2"


class CheckpointError(ValueError):
    """A model file that can't be written, read, or fitted into the network it is loaded into."""


def save(model: nn.Module, path: str | os.PathLike) -> None:
    """Write ``model`` to ``path``: its tensors, and how a zoo model was built. The old file stays until the new is whole.

    Raises:
        CheckpointError: the file can't be written.
    """
    path = Path(path)
    if is_masked(model):
        warnings.warn(
            "the network is masked: the file holds it at full size and without what keeps its rows at zero. "
            "pruner.rebuild() before saving shrinks it",
            stacklevel=2,
        )
    own = model.state_dict()
    state = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in own.items()}
    content = {
        "format": FORMAT,
        "class": type(model).__name__,
        "built_from": getattr(model, "built_from", None),
        "state": state,
        "metadata": dict(own._metadata),  # versions that some layers ask for
        "sizes": sizes_of(model),
    }
    try:
        write_atomically(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError) as error:
        why = error if isinstance(error, OSError) else error.__context__ or error  # torch says less of a full disk
        raise CheckpointError(f"can't write the model to {path}: {why}") from error


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
    resize(into, content["state"], content["sizes"], path)
    state = OrderedDict(content["state"])
    state._metadata = content["metadata"]
    into.load_state_dict(state)
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


def sizes_of(model: nn.Module) -> dict[str, dict[str, int | list[int]]]:
    """Layer → what its attributes say of its widths, groups and heads: not all of that shows in the tensors."""
    sizes = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and kind.attributes:
            values = {attribute: getattr(module, attribute) for attribute in kind.attributes}
            sizes[name] = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return sizes


def resize(model: nn.Module, state: dict[str, Tensor], sizes: dict, source: object) -> None:
    """Give every parameter and buffer the shape it has in ``state``, and every layer the ``sizes`` of `sizes_of`.

    Layers that lack a stored bias get one.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    added = [name for name in state if name not in own and _fold_of(model, name) is not None]
    unknown = [name for name in state if name not in own and name not in added]
    missing = [name for name in own if name not in state]
    if unknown or missing:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: it lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}"
        )
    changed = [n for n in own if (own[n].shape, own[n].dtype) != (state[n].shape, state[n].dtype)]
    for name in changed:
        _check_fit(model, name, own[name], state[name], source)
    made: dict[int, Tensor] = {}  # what is tied stays tied
    for name in changed + added:
        layer, _, tensor = name.rpartition(".")
        module = model.get_submodule(layer)
        like = getattr(module, tensor) if name in own else _fold_of(model, name)
        new = torch.empty_like(state[name], device=like.device)
        new = nn.Parameter(new, like.requires_grad) if isinstance(like, nn.Parameter) else new
        setattr(module, tensor, made.setdefault(id(like), new) if name in own else new)
    for layer, values in sizes.items():
        _set_sizes(model.get_submodule(layer), layer, values, source)
    leave_nesting(model)


def _fold_of(model: nn.Module, name: str) -> nn.Parameter | None:
    """The weight beside which ``name`` is a bias that its layer may lack."""
    layer, _, tensor = name.rpartition(".")
    module = dict(model.named_modules()).get(layer)
    kind = kind_of(module) if module is not None else None
    weights = [weight for weight, bias in kind.folds.items() if bias == tensor] if kind else []
    return getattr(module, weights[0]) if weights else None


def _check_fit(model: nn.Module, name: str, own: Tensor, stored: Tensor, source: object) -> None:
    if own.dim() == stored.dim() and any(new > old for new, old in zip(stored.shape, own.shape, strict=True)):
        raise CheckpointError(
            f"{source} has {name} of shape {list(stored.shape)}, larger than {list(own.shape)} in "
            f"{type(model).__name__}: load it into the class and arguments it was made with"
        )
    module = model.get_submodule(name.rpartition(".")[0])
    if own.shape != stored.shape and (kind_of(module) is None or own.dim() != stored.dim()):
        raise CheckpointError(
            f"{source} has {name} of shape {list(stored.shape)}, {type(model).__name__} {list(own.shape)}: "
            f"a {type(module).__name__} can't be resized"
        )


def _set_sizes(module: nn.Module, layer: str, values: dict, source: object) -> None:
    kind = kind_of(module)
    if kind is None or values.keys() != set(kind.attributes):
        raise CheckpointError(f"{source} has sizes of the layer {layer!r} that a {type(module).__name__} does not have")
    if kind is ATTENTION and values["num_heads"] * values["head_dim"] != values["embed_dim"]:
        become_explicit(module)
    for attribute, value in values.items():
        setattr(module, attribute, tuple(value) if isinstance(value, list) else value)
