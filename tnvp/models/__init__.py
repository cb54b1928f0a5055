"""The model zoo: one builder per name, flat arguments; every model remembers how it was built.

``model.built_from`` holds the builder's name and arguments, so that a pruned model can be loaded from its file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from torch import nn

from .convolutional import lenet_5, resnet20, tutorial_cnn, vgg11_bn
from .errors import ModelError
from .perceptron import ACTIVATIONS, lenet_300_100, mlp
from .torchvision_models import torchvision_model, torchvision_names
from .transformer import vit_tiny

__all__ = ["ACTIVATIONS", "LIBRARIES", "MODELS", "ModelError", "build", "check_name", "how_to_choose"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet_300_100": lenet_300_100,
    "lenet_5": lenet_5,
    "tutorial_cnn": tutorial_cnn,
    "vgg11_bn": vgg11_bn,
    "resnet20": resnet20,
    "vit_tiny": vit_tiny,
}
LIBRARIES: dict[str, tuple[Callable[..., nn.Module], Callable[[], list[str]]]] = {  # builder by name, all names
    "torchvision": (torchvision_model, torchvision_names),
}


def build(name: str, *, shape: Sequence[int], classes: int, library: str | None = None, **arguments) -> nn.Module:
    """A new model for images of ``shape`` (C, H, W): the zoo's, or that of another ``library``.

    ``arguments`` are those of the builder ``MODELS[name]``, or of the library's.

    Raises:
        ModelError: there is no such model, or it can't be built for such images.
    """
    check_name(name, library)
    if library is None:
        model = MODELS[name](tuple(shape), classes, **arguments)
    else:
        model = LIBRARIES[library][0](name, tuple(shape), classes, **arguments)
        arguments = {"library": library, **arguments, **model.built_from}
    model.built_from = {"name": name, "shape": list(shape), "classes": classes, **_plain(arguments)}
    return model


def check_name(name: str, library: str | None = None) -> None:
    """Raises ModelError if the zoo, or ``library``, has no model ``name``; says which was probably meant."""
    if library is not None and library not in LIBRARIES:
        raise ModelError(f"unknown library {library!r}: choose one of {', '.join(LIBRARIES)}")
    names: Iterable[str] = MODELS if library is None else LIBRARIES[library][1]()
    if name in names:
        return
    if how := how_to_choose(name):
        raise ModelError(f"{library or 'the zoo'} has no model {name!r}: choose it with {how}")
    near = get_close_matches(name, names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names)}"
    raise ModelError(f"{library or 'the zoo'} has no model {name!r}: {hint}")


def how_to_choose(name: str) -> str | None:
    """The overrides that choose the model ``name``, the zoo's first; None if there is none."""
    if name in MODELS:
        return f"model={name}"
    return next(
        (f"model={library} model.name={name}" for library in LIBRARIES if name in LIBRARIES[library][1]()), None
    )


def _plain(arguments: dict) -> dict:
    return {key: list(value) if isinstance(value, tuple | list) else value for key, value in arguments.items()}
