"""Torchvision's classification networks, made for the data set's images and classes.

Torchvision takes seconds to import: only the functions that use it import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .errors import ModelError

# Networks with heads that only help training; with their old initialisation, which spares a warning.
AUXILIARY = ("googlenet", "inception_v3")


def torchvision_names() -> list[str]:
    """The names of all classification networks of torchvision."""
    from torchvision import models

    return models.list_models(module=models)


def torchvision_model(name: str, shape: Sequence[int], classes: int, pretrained: bool = False,
                      transform_input: bool = False) -> nn.Module:  # fmt: skip
    """Torchvision's network ``name`` for images of ``shape`` (C, H, W).

    The last layer has ``classes`` outputs; where C is not 3, the first convolution is a fresh one with C inputs.
    Auxiliary heads are left out: they need a loss of their own. ``pretrained`` loads torchvision's default weights into
    all layers that kept their shape. ``transform_input``: inputs are brought to the scale that the weights of googlenet
    and inception_v3 were trained on; set by ``pretrained``.

    Raises:
        ModelError: the network can't take such images, or its weights can't be had.
    """
    from torchvision import models

    try:
        model = models.get_model(name, num_classes=classes, **_options(name, shape))
        _read_channels(model, shape[0])
        scores = _one_image(model, shape)
    except (ValueError, RuntimeError, AssertionError) as error:
        why, *_ = str(error).split("\n")
        raise ModelError(
            f"torchvision's {name} can't take images of {shape[1]}×{shape[2]} pixels ({why}): "
            f"choose another network, or images of a size it can take, as with "
            f"dataset=image_folder dataset.image_size=224"
        ) from error
    if scores.shape != (1, classes):
        raise ModelError(f"torchvision's {name} gives {list(scores.shape)} for one image, not {[1, classes]}")
    if pretrained:
        trained = _pretrained(name)
        transform_input = shape[0] == 3 and getattr(trained, "transform_input", False)
        _copy_what_fits(trained, model)
    if name in AUXILIARY:
        model.transform_input = transform_input
    # Rebuilt from a file, it gets its weights there, and must treat its input alike.
    model.built_from = {"pretrained": False, "transform_input": transform_input}
    return model


def _options(name: str, shape: Sequence[int]) -> dict:
    """What ``name`` must be told beyond the number of classes."""
    if name in AUXILIARY:
        return {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):
        return {"image_size": shape[1]}
    if name.startswith("maxvit_"):
        return {"input_size": tuple(shape[1:])}
    return {}


def _read_channels(model: nn.Module, channels: int) -> None:
    """A fresh first convolution, unless it reads ``channels`` already."""
    name, old = next((name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d))
    if old.in_channels != channels:
        bias = old.bias is not None
        model.set_submodule(
            name, nn.Conv2d(channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=bias)
        )


def _one_image(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """Class scores [1, classes] of a black image: whether the network can take the size is found out by trying."""
    model.eval()
    with torch.no_grad():
        scores = model(torch.zeros(1, *shape))
    model.train()
    return scores


def _pretrained(name: str) -> nn.Module:
    """The network as torchvision trained it, built by torchvision itself: it knows how to read its old files."""
    from torchvision import models

    try:
        return models.get_model(name, weights="DEFAULT", progress=False)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"the weights of torchvision's {name} can't be had ({error}): check the network, put the file into "
            f"{torch.hub.get_dir()}/checkpoints, or set model.pretrained=false"
        ) from error


def _copy_what_fits(source: nn.Module, target: nn.Module) -> None:
    """Copy the tensors that have the same name and shape in both."""
    own = target.state_dict()
    fits = {k: v for k, v in source.state_dict().items() if k in own and own[k].shape == v.shape}
    target.load_state_dict(fits, strict=False)
