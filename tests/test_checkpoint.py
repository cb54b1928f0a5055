"""A pruned model survives save and load bit for bit; a bad file is refused by name, and no code is unpickled."""

import errno
import io
import os
import pickle

import pytest
import torch
from torch import nn

import tnvp
from tnvp import models
from tnvp.checkpoint import CheckpointError

SHAPE = (3, 16, 16)


class Own(nn.Module):
    """A user's class; its second layer has no bias until compensation gives it one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc1 = nn.Linear(8 * 14 * 14, 12, bias=False)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(torch.relu(self.norm(self.conv(x))).flatten(1))))


ZOO = {
    "mlp": {"name": "mlp", "widths": (20, 12), "batch_norm": True, "dropout": 0.1, "activation": "gelu"},
    "lenet_300_100": {"name": "lenet_300_100"},
    "lenet_5": {"name": "lenet_5"},
    "tutorial_cnn": {"name": "tutorial_cnn"},
    "vgg11_bn": {"name": "vgg11_bn", "width": 0.1},
    "resnet20": {"name": "resnet20", "width": 4},
    "vit_tiny": {"name": "vit_tiny", "dim": 12, "depth": 2},
    "torchvision": {"name": "resnet18", "library": "torchvision"},
}


def pruned(model: nn.Module, sparsity: float = 0.5) -> nn.Module:
    x = torch.randn(8, *SHAPE)
    pruner = tnvp.Pruner(model, example_inputs=x)
    with pruner.record():
        model(x)
    pruner.prune(sparsity=sparsity)
    return model


def same(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name
    x = torch.randn(5, *SHAPE, dtype=next(a.parameters()).dtype)
    assert torch.equal(a.eval()(x), b.eval()(x))


@pytest.mark.parametrize("arguments", ZOO.values(), ids=ZOO)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_a_pruned_zoo_model_loads_alone(arguments, sparsity, tmp_path):
    model = pruned(models.build(**arguments, shape=SHAPE, classes=4), sparsity)
    tnvp.save(model, tmp_path / "model.pt")
    same(model, tnvp.load(tmp_path / "model.pt"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_pruned_model_of_ones_own_loads_into_a_fresh_instance(dtype, tmp_path):
    model = pruned(Own()).to(dtype)
    assert model.fc1.bias is not None
    tnvp.save(model, tmp_path / "model.pt")
    fresh = Own()
    loaded = tnvp.load(tmp_path / "model.pt", into=fresh)
    assert loaded is fresh
    same(model, loaded)
    assert (loaded.fc1.in_features, loaded.norm.num_features) == (4 * 14 * 14, 4)


def test_a_loaded_model_trains_on_and_can_be_pruned_again(tmp_path):
    tnvp.save(pruned(Own()), tmp_path / "model.pt")
    model = tnvp.load(tmp_path / "model.pt", into=Own()).train()
    model(torch.randn(4, *SHAPE)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    again = pruned(model, 0.5)
    assert again.conv.out_channels == 2


def test_the_old_file_stays_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    tnvp.save(Own(), path)
    before = path.read_bytes()

    def full(content, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        tnvp.save(Own(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a power failure could leave a complete run with an empty model."""
    synced, real = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    monkeypatch.setattr(os, "replace", lambda aside, path: synced.append(os.stat(aside)) or real(aside, path))
    tnvp.save(Own(), tmp_path / "model.pt")
    on_disk, renamed = synced
    assert os.path.samestat(on_disk, renamed) and on_disk.st_size == renamed.st_size > 0


def test_a_full_disk_is_told_in_its_own_words(tmp_path, monkeypatch):
    """torch meets the error a second time, and then says where in its code."""
    real = torch.save

    def save(content, file):
        class Full(io.RawIOBase):
            writable = lambda self: True  # noqa: E731

            def write(self, data):
                if file.tell() > 200:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return file.write(data)

        real(content, Full())

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointError, match=r"model\.pt: .*No space left on device"):
        tnvp.save(Own(), tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_a_model_of_ones_own_needs_an_instance(tmp_path):
    tnvp.save(Own(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"into=Own\(\)"):
        tnvp.load(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "there is no model file"),
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_text("import os"), "damaged"),
        (lambda path: torch.save({"weights": 1}, path), "not written by tnvp.save"),
        (lambda path: torch.save(nn.Linear(2, 2), path), "damaged or no file"),
    ],
    ids=["missing", "truncated", "empty", "a text", "another format", "a pickled module"],
)
def test_a_bad_file_is_refused_by_name(damage, message, tmp_path):
    path = tmp_path / "model.pt"
    tnvp.save(Own(), path)
    damage(path)
    with pytest.raises(CheckpointError, match=message) as error:
        tnvp.load(path, into=Own())
    assert str(path) in str(error.value)


class Malicious:
    def __reduce__(self):
        return print, ("code ran",)


def test_a_malicious_file_runs_nothing(tmp_path, capsys):
    path = tmp_path / "model.pt"
    torch.save({"format": "tnvp-model-1", "class": "Own", "built_from": None, "state": Malicious()}, path)
    with pytest.raises(CheckpointError):
        tnvp.load(path, into=Own())
    path.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError):
        tnvp.load(path, into=Own())
    assert "code ran" not in capsys.readouterr().out


def test_another_network_is_refused_by_the_names_that_differ(tmp_path):
    tnvp.save(Own(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="fc1"):
        tnvp.load(tmp_path / "model.pt", into=nn.Sequential(nn.Linear(2, 2)))


def test_a_smaller_network_is_not_grown(tmp_path):
    tnvp.save(nn.Sequential(nn.Linear(20, 15), nn.ReLU(), nn.Linear(15, 2)), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"0\.weight of shape \[15, 20\], larger than \[10, 20\]"):
        tnvp.load(tmp_path / "model.pt", into=nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 2)))
