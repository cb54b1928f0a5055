"""A pruned network leaves PyTorch like any other: torch.export and ONNX give what it gives, on inputs they were not traced on."""

import pytest
import torch
from torch import Tensor, nn

import tnvp
from tnvp.pruning.attention import Attention

from .pruning.networks import convnet, mlp, stir


class Residual(nn.Module):
    """Two convolutions beside a skip connection; the classifier reads the stream's mean."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.branch = nn.Sequential(nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head((x + self.branch(x)).relu().mean((2, 3)))


class Attending(nn.Module):
    """Self-attention, [B, T, 16] → [B, 4]."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    """An LSTM reads pruned neurons, [B, T, 5] → [B, 4]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(5, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x).tanh())[0][:, -1])


def group_norm() -> nn.Module:
    convolutions = (nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.GELU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))


NETWORKS = {  # name → how to build it, the shape of one sample
    "convnet_batch_norm": (convnet, (3, 16, 16)),
    "mlp": (mlp, (7,)),
    "residual": (Residual, (3, 8, 8)),
    "attention": (Attending, (6, 16)),
    "group_norm": (group_norm, (3, 8, 8)),
    "lstm": (Recurrent, (7, 5)),
}
BY_DEFAULT = {"convnet_batch_norm", "attention", "lstm"}  # an ONNX export takes seconds
ONNX_CASES = [n if n in BY_DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS]


def samples(name: str, count: int, seed: int) -> Tensor:
    return torch.randn(count, *NETWORKS[name][1], generator=torch.Generator().manual_seed(seed))


def pruned(name: str) -> nn.Module:
    """The network in eval mode with half of its neurons."""
    torch.manual_seed(0)
    model = stir(NETWORKS[name][0]()).eval()
    before = sum(p.numel() for p in model.parameters())
    tnvp.Pruner(model, example_inputs=samples(name, 2, 0)).prune(sparsity=0.5, calibration=samples(name, 32, 1))
    assert sum(p.numel() for p in model.parameters()) < before
    return model


def test_attention_has_lost_heads():
    """What the cases below export is tnvp's own attention, with fewer heads."""
    attention = pruned("attention").attention
    assert type(attention) is Attention
    assert attention.num_heads == 2


@pytest.mark.parametrize("name", NETWORKS)
def test_export_gives_the_same(name):
    """With any batch size, and no parameter more than the pruned network has."""
    model = pruned(name)
    any_batch = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(model, (samples(name, 3, 2),), dynamic_shapes=any_batch).module()
    x = samples(name, 5, 3)
    torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-5)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert {n: p.shape for n, p in exported.named_parameters()} == shapes


@pytest.mark.parametrize("name", ONNX_CASES)
def test_onnx_gives_the_same(name):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install -e '.[dev]'")
    import onnxruntime

    model = pruned(name)
    program = torch.onnx.export(model, (samples(name, 3, 2),), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    proto = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    x = samples(name, 3, 3)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-5, atol=1e-5)
