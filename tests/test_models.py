"""The zoo builds what its sources describe, for any images; torchvision's networks come in the data set's shape."""

from dataclasses import fields
from itertools import pairwise
from urllib.error import URLError

import pytest
import torch
from torch import nn

import tnvp
from tnvp import models
from tnvp.models import MODELS, ModelError, build
from tnvp.schema import SCHEMAS

DIGITS, MNIST, CIFAR, OBLONG = (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 20, 12)
SMALL = {  # name → arguments that make a network of a few thousand parameters
    "mlp": {"widths": (12, 8), "batch_norm": True, "dropout": 0.1, "activation": "gelu"},
    "lenet_300_100": {},
    "lenet_5": {},
    "tutorial_cnn": {},
    "vgg11_bn": {"width": 0.05},
    "resnet20": {"width": 4},
    "vit_tiny": {"patch_size": 2, "dim": 12, "depth": 2, "heads": 3, "mlp_ratio": 1.5, "dropout": 0.1},
}
TORCHVISION = ["resnet18", "mobilenet_v2", "densenet121", "squeezenet1_1", "regnet_x_400mf", "googlenet"]


def torchvision(name, shape=CIFAR, classes=7, **arguments):
    return build(name, library="torchvision", shape=shape, classes=classes, **arguments)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def survives_its_file(model, shape, path):
    """Saved and loaded alone, the model gives the same scores; statistics of a training step included."""
    model.train()(torch.randn(4, *shape))
    tnvp.save(model, path)
    loaded = tnvp.load(path)
    assert loaded.built_from == model.built_from and type(loaded) is type(model)
    x = torch.randn(3, *shape)
    torch.testing.assert_close(loaded(x), model.eval()(x), rtol=0, atol=0)


# The zoo.


@pytest.mark.parametrize(
    "key", ["vgg11_bn.width", "resnet20.width", "vit_tiny.dim", "vit_tiny.depth", "vit_tiny.mlp_ratio"]
)
def test_the_largest_network_that_may_be_asked_for_fails_for_lack_of_memory_alone(key):
    """On a device without memory it can be built: no size is beyond what can be counted."""
    name, _, argument = key.partition(".")
    (metadata,) = [f.metadata for f in fields(SCHEMAS["model"][name]) if f.name == argument]
    largest = float(metadata["interval"][1:-1].split(",")[1])
    assert largest < float("inf"), "models and images have sizes with bounds"
    more = {"heads": 4} if argument == "dim" else {}
    with torch.device("meta"):
        model = build(name, shape=CIFAR, classes=7, **{argument: int(largest), **more})
    assert parameters(model) > 10**8


def test_the_small_settings_cover_the_zoo():
    assert set(SMALL) == set(MODELS)


@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR, OBLONG], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_a_zoo_model_scores_images_and_lives_in_its_file(name, shape, tmp_path):
    if name in ("lenet_5", "tutorial_cnn") and min(shape[1:]) < 16:
        with pytest.raises(ModelError, match="16×16"):
            build(name, shape=shape, classes=7)
        return
    model = build(name, shape=shape, classes=7, **SMALL[name])
    scores = model(torch.randn(4, *shape))
    assert scores.shape == (4, 7)
    scores.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    survives_its_file(model, shape, tmp_path / "model.pt")


def test_lenet_5_has_caffes_parameters():
    by_hand = (20 * 25 + 20) + (50 * 20 * 25 + 50) + (500 * 800 + 500) + (10 * 500 + 10)
    assert parameters(build("lenet_5", shape=MNIST, classes=10)) == by_hand == 431_080


def test_vgg11_has_the_published_parameters():
    channels = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    convolutions = sum(9 * a * b for a, b in pairwise(channels))
    by_hand = convolutions + 2 * sum(channels[1:]) + 512 * 10 + 10
    assert parameters(build("vgg11_bn", shape=CIFAR, classes=10)) == by_hand == 9_228_362  # 9.23 M


@pytest.mark.parametrize(("side", "pools"), [(1, 0), (8, 3), (15, 3), (28, 4), (32, 5), (64, 5)])
def test_vgg11_pools_while_there_is_something_to_pool(side, pools):
    model = build("vgg11_bn", shape=(1, side, side), classes=3, width=0.05).eval()
    assert sum(isinstance(m, nn.MaxPool2d) for m in model.modules()) == pools
    assert model.features(torch.zeros(1, 1, side, side)).shape[2:] == (side >> pools,) * 2


def test_a_width_multiplies_all_channels():
    model = build("vgg11_bn", shape=CIFAR, classes=10, width=0.25)
    widths = [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert widths == [16, 32, 64, 64, 128, 128, 128, 128]
    assert build("vgg11_bn", shape=CIFAR, classes=10, width=0.001).features.conv1.out_channels == 1


def test_resnet20_has_the_published_parameters():
    """0.27 M in the paper with parameterless shortcuts (269,722); two 1×1 shortcuts with BatchNorm add to that."""
    option_b = 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    assert parameters(build("resnet20", shape=CIFAR, classes=10)) == 269_722 + option_b == 272_474


def test_resnet20_has_twenty_layers_and_convolves_its_shortcuts_only_where_the_shape_changes():
    model = build("resnet20", shape=CIFAR, classes=10)
    shortcuts = [
        name for name, m in model.named_modules() if name.endswith("shortcut.conv") and m.kernel_size == (1, 1)
    ]
    assert shortcuts == ["stages.stage2.block1.shortcut.conv", "stages.stage3.block1.shortcut.conv"]
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) - len(shortcuts) == 20
    assert model.stages(torch.zeros(1, 16, 32, 32)).shape == (1, 64, 8, 8)


def test_vit_tiny_has_the_parameters_of_its_layers():
    d, tokens, patch = 192, 64, 3 * 4 * 4
    block = 2 * 2 * d + (4 * d * d + 4 * d) + (8 * d * d + 5 * d)  # norms, attention, MLP
    by_hand = (patch * d + d) + tokens * d + 6 * block + 2 * d + (10 * d + 10)
    assert parameters(build("vit_tiny", shape=CIFAR, classes=10)) == by_hand


def test_vit_tiny_tells_patches_apart_by_their_positions_alone():
    model = build("vit_tiny", shape=(1, 4, 8), classes=3, patch_size=4, dim=12, depth=2, heads=2).eval()
    x = torch.randn(2, 1, 4, 8)
    swapped = torch.cat([x[..., 4:], x[..., :4]], dim=-1)
    assert not torch.allclose(model(x), model(swapped), atol=1e-6)
    nn.init.zeros_(model.positions)
    torch.testing.assert_close(model(x), model(swapped))


@pytest.mark.parametrize("name", SMALL)
def test_a_zoo_model_can_be_traced(name):
    model = build(name, shape=CIFAR, classes=7, **SMALL[name]).eval()
    traced = torch.fx.symbolic_trace(model)
    for batch in (1, 3):
        x = torch.randn(batch, *CIFAR)
        torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit_tiny", {"patch_size": 5}, r"patch_size=5 does not divide images of 20×12 pixels: choose one of 1, 2, 4$"),
        ("vit_tiny", {"dim": 10, "heads": 3}, r"model\.dim=10 is no multiple of model\.heads=3"),
        ("resnet21", {}, "the zoo has no model 'resnet21': did you mean resnet20"),
        ("qqq", {}, "the zoo has no model 'qqq': choose one of mlp, "),
        ("resnet18", {}, r"choose it with model=torchvision model\.name=resnet18$"),
        ("mlp", {"library": "torchvision"}, "torchvision has no model 'mlp': choose it with model=mlp"),
        ("resnte50", {"library": "torchvision"}, "torchvision has no model 'resnte50': did you mean .*resnet50"),
        ("mlp", {"library": "timm"}, "unknown library 'timm': choose one of torchvision"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(name, arguments, message):
    with pytest.raises(ModelError, match=message):
        build(name, shape=OBLONG, classes=7, **arguments)


# Torchvision's.


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_torchvision_model_scores_images_and_lives_in_its_file(name, tmp_path):
    model = torchvision(name)
    assert model.training and model.built_from["library"] == "torchvision"
    assert model(torch.randn(2, *CIFAR)).shape == (2, 7)
    survives_its_file(model, CIFAR, tmp_path / "model.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("vit_b_16", CIFAR), ("inception_v3", (1, 75, 75)), ("swin_t", CIFAR)])
def test_a_large_torchvision_model_does_too(name, shape, tmp_path):
    survives_its_file(torchvision(name, shape=shape), shape, tmp_path / "model.pt")


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_every_torchvision_model_can_be_built(channels, recwarn):
    """Without memory for weights: on the meta device, where regnets can't draw theirs."""
    names = [name for name in models.LIBRARIES["torchvision"][1]() if not name.startswith("regnet")]
    assert len(names) > 60
    with torch.device("meta"):
        for name in names:
            assert torchvision(name, shape=(channels, 224, 224)).built_from["name"] == name
    assert not recwarn.list


def test_the_first_convolution_reads_the_images_channels_and_nothing_else_changes():
    gray, colour = torchvision("resnet18", shape=(1, 32, 32)), torchvision("resnet18")
    differ = [k for k, v in gray.state_dict().items() if v.shape != colour.state_dict()[k].shape]
    assert differ == ["conv1.weight"] and gray.conv1.weight.shape == (64, 1, 7, 7)
    assert (gray.conv1.stride, gray.conv1.padding, gray.conv1.bias) == ((2, 2), (3, 3), None)


def test_a_name_that_both_have_is_the_librarys_where_it_is_asked_for():
    zoo, other = build("vgg11_bn", shape=CIFAR, classes=7), torchvision("vgg11_bn")
    assert type(zoo).__module__.startswith("tnvp") and type(other).__module__.startswith("torchvision")


def test_networks_are_built_without_auxiliary_heads_and_without_a_warning(recwarn):
    with torch.device("meta"):
        for name in ("googlenet", "inception_v3"):
            model = torchvision(name, shape=(3, 75, 75))
            assert not any("aux" in part.lower() for part, _ in model.named_modules())
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("alexnet", CIFAR),
        ("inception_v3", (3, 74, 74)),
        ("vit_b_16", MNIST),
        ("vit_b_16", (3, 32, 48)),
        ("maxvit_t", CIFAR),
        ("squeezenet1_1", DIGITS),
    ],
    ids=str,
)
def test_images_that_do_not_fit_are_refused_with_the_way_out(name, shape):
    size = f"{shape[1]}×{shape[2]}"
    with torch.device("meta"), pytest.raises(ModelError, match=f"{name} can't take images of {size}.*image_size=224"):
        torchvision(name, shape=shape)


@pytest.fixture
def published(monkeypatch):
    """Stands in for torchvision's server: hands out the file last put into `published.state`, and counts."""
    from torchvision.models import _api

    class Server:
        state, error, calls = None, None, 0

    def answer(url, **options):
        Server.calls += 1
        if Server.error:
            raise Server.error
        return {name: tensor.clone() for name, tensor in Server.state.items()}

    monkeypatch.setattr(_api, "load_state_dict_from_url", answer)
    return Server


def test_pretrained_weights_fill_all_layers_that_fit_and_are_fetched_once(published, tmp_path):
    from torchvision.models import get_model

    published.state = get_model("mobilenet_v3_small").state_dict()
    own = torchvision("mobilenet_v3_small", shape=(1, 32, 32), pretrained=True)
    differ = [k for k, v in own.state_dict().items() if not torch.equal(v, published.state[k])]
    assert differ == ["features.0.0.weight", "classifier.3.weight", "classifier.3.bias"]
    survives_its_file(own, (1, 32, 32), tmp_path / "model.pt")
    assert published.calls == 1


def test_pretrained_weights_see_images_on_the_scale_they_were_trained_on(published, tmp_path):
    from torchvision.models import get_model

    published.state = get_model("googlenet", init_weights=True).state_dict()
    published.state = {k: v for k, v in published.state.items() if "num_batches" not in k}  # as in the old file
    model = torchvision("googlenet", pretrained=True)
    assert model.transform_input and not torchvision("googlenet").transform_input
    survives_its_file(model, CIFAR, tmp_path / "model.pt")
    assert not torchvision("googlenet", shape=MNIST, pretrained=True).transform_input  # it is for three channels


@pytest.mark.parametrize("error", [URLError("no route to host"), RuntimeError("invalid hash value")], ids=repr)
def test_weights_that_cannot_be_had_are_a_message(published, error):
    published.error = error
    with pytest.raises(ModelError, match=r"weights of torchvision's squeezenet1_1 can't be had .*pretrained=false"):
        torchvision("squeezenet1_1", pretrained=True)
