"""Half of every layer's neurons, removed by tnvp and by torch_pruning: what goes, what is left, does it still train?

    python experiments/torch_pruning/compare.py    # two minutes; with --models resnet18 --image-size 32 seconds

Both libraries get the same random network and both rank by L2 magnitude within a layer. README.md has the answer.
"""

import argparse
import copy
import time
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
import torch_pruning
import torchvision
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tnvp
from tnvp.pruning.calibration import outputs, relative_error
from tnvp.pruning.cost import parameter_count
from tnvp.run_directory import environment

MODELS = ("resnet18", "vgg11_bn", "vit_b_16", "densenet121", "mobilenet_v2")
Kept = dict[str, Tensor]  # layer → the positions of its original input that are left


def build(name: str) -> nn.Module:
    """A torchvision network with random weights. Norms and a zero head get random values, so that no mistake hides behind a 0."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
        if isinstance(module, nn.Linear) and not module.weight.any():  # torchvision's ViT starts with a head of zeros
            nn.init.normal_(module.weight, 0, 0.02)
    return model.eval()


# The libraries: each prunes in place and says how many groups it cut, and what each layer still reads.


def with_tnvp(model: nn.Module, optimizer, x: Tensor, sparsity: float) -> tuple[int, Kept]:
    pruner = tnvp.Pruner(model, optimizer=optimizer, example_inputs=x, criterion="l2", compensation="none")
    report = pruner.prune(sparsity=sparsity, scope="layer")
    kept = {layer: stays for (layer, side), stays in report.cuts.items() if side == "in"}
    return sum(bool(group.removed) for group in report.groups), kept


def with_torch_pruning(model: nn.Module, optimizer, x: Tensor, sparsity: float) -> tuple[int, Kept]:
    """Its README's recipe; on torchvision's ViT that of its own benchmark of torchvision. It takes no optimizer."""
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    classifier = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1000]
    pruner = torch_pruning.pruner.BasePruner(
        model,
        x,
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        global_pruning=False,
        pruning_ratio=sparsity,
        ignored_layers=classifier + [m.out_proj for m in attentions],
        round_to=attentions[0].num_heads if attentions else None,
        in_channel_groups={},  # the defaults of these two are dictionaries that all pruners of a process share
        out_channel_groups={},
    )
    kept: Kept = {}
    for groups, group in enumerate(pruner.step(interactive=True), start=1):  # noqa: B007
        note_inputs(kept, group, pruner.DG)
        group.prune()
    if attentions:
        model.hidden_dim = model.conv_proj.out_channels  # torchvision's forward reshapes by this attribute
    return groups, kept


LIBRARIES = {"tnvp": with_tnvp, "torch_pruning": with_torch_pruning}


def note_inputs(kept: Kept, group, graph) -> None:
    """Before ``group`` is pruned: which inputs of its layers it removes, in the numbers of the original network."""
    names = {module: name for name, module in graph.model.named_modules()}
    for dependency, indices in group:
        module = dependency.target.module
        reads = isinstance(module, nn.Conv2d | nn.Linear | nn.MultiheadAttention)
        carries = getattr(module, "groups", 1) > 1  # depthwise
        if reads and not carries and graph.is_in_channel_pruning_fn(dependency.handler):
            alive = torch.ones(graph.get_in_channels(module), dtype=torch.bool)
            alive[[getattr(i, "idx", i) for i in indices]] = False
            kept[names[module]] = kept.get(names[module], torch.arange(len(alive)))[alive]


# The judge, the same for both.


@torch.no_grad()
def masked(original: nn.Module, kept: Kept) -> nn.Module:
    """The full-size network in which no layer reads what was removed."""
    model = copy.deepcopy(original)
    for name, stays in kept.items():
        module = model.get_submodule(name)
        attention = isinstance(module, nn.MultiheadAttention)
        weight = module.in_proj_weight if attention else module.weight
        gone = torch.ones(weight.shape[1], dtype=torch.bool)
        gone[stays] = False
        weight[:, gone] = 0
        if attention:  # torch_pruning removes the same positions of queries, keys, values and of what the heads give
            weight[gone.repeat(3)] = 0
            module.in_proj_bias[gone.repeat(3)] = 0
            module.out_proj.weight[:, gone] = 0
    return model


def channels(model: nn.Module) -> int:
    """Output channels of all layers: the rows of their weight matrices."""
    return sum(len(p) for name, p in model.named_parameters() if name.endswith("weight") and p.dim() > 1)


def flops(model: nn.Module, x: Tensor) -> int:
    """Of one forward pass. Gradients stay on and attention is plain products: the counter doesn't see into fused ones."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops()


def errors(original: nn.Module, pruned: nn.Module, kept: Kept, x: Tensor) -> dict[str, float]:
    """In float64: the pruned network's output against the masked original's, and against the untouched original's."""
    reference, after = (copy.deepcopy(model).double() for model in (original, pruned))
    batches = [(x.double(),)]
    found, twin = outputs(after, batches), outputs(masked(reference, kept), batches)
    change = relative_error(outputs(reference, batches), found)
    return {"output_error": relative_error(twin, found), "output_change": change}


def training(model: nn.Module, optimizer, x: Tensor) -> dict[str, int]:
    """One step of the optimizer from before: how many of the model's tensors move, and how many have the momentum they had."""
    model.train()
    before = [(p, p.detach().clone()) for p in model.parameters()]
    momenta = [optimizer.state.get(p, {}).get("momentum_buffer") for p in model.parameters()]
    kept = sum(m is not None and torch.equal(m, p) for m, p in zip(momenta, model.parameters(), strict=True))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), torch.arange(len(x))).backward()
    optimizer.step()
    moved = sum(not torch.equal(p, old) for p, old in before)
    return {"tensors": len(before), "tensors_trained": moved, "momenta_kept": kept}


def compare(name: str, library: str, sparsity: float, image_size: int) -> dict:
    """One row of the table."""
    model, x = build(name), torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for p in model.parameters():  # momentum equal to its parameter: cut with the same indices, it still is
        optimizer.state[p]["momentum_buffer"] = p.detach().clone()
    original = copy.deepcopy(model)
    started = time.perf_counter()
    groups, kept = LIBRARIES[library](model, optimizer, x, sparsity)
    seconds = time.perf_counter() - started
    row = {"model": name, "library": library, "version": version(library), "sparsity": sparsity}
    row |= {"image_size": image_size, "groups": groups}
    for when, network in (("before", original), ("after", model)):
        row |= {f"channels_{when}": channels(network), f"parameters_{when}": parameter_count(network)}
        row[f"flops_{when}"] = flops(network, x)
    row |= errors(original, model, kept, x) | training(model, optimizer, x)
    row |= {"seconds": round(seconds, 2), "n": 1, "threads": torch.get_num_threads(), "torch": torch.__version__}
    return row | {key: environment("cpu", 0, "", "")[key] for key in ("commit", "hardware")}


def table(rows: pd.DataFrame) -> str:
    """What a reader wants to see, as Markdown: percentages are of the original, counts of the parameter tensors."""
    names = ["model", "library", "groups", "channels", "parameters", "FLOPs", "error", "trained", "momentum", "s"]
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for row in rows.to_dict("records"):
        removed = [f"−{1 - row[f'{k}_after'] / row[f'{k}_before']:.1%}" for k in ("channels", "parameters", "flops")]
        counts = [f"{row[k]}/{row['tensors']}" for k in ("tensors_trained", "momenta_kept")]
        cells = [row["model"], row["library"], row["groups"], *removed, f"{row['output_error']:.1e}", *counts]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['seconds']:.1f}"])) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--image-size", type=int, default=224, help="pixels; vit_b_16 takes 224 only")
    parser.add_argument("--out", type=Path, help="CSV file; default: results.csv here, if nothing else was chosen")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = [(name, library) for name in options.models for library in LIBRARIES]
    frame = pd.DataFrame([compare(*case, options.sparsity, options.image_size) for case in cases])
    print(table(frame))
    whole = options.models == MODELS and options.sparsity == 0.5 and options.image_size == 224
    out = options.out or (Path(__file__).with_name("results.csv") if whole else None)
    if out is not None:
        frame.to_csv(out, index=False)
    print(f"\n{out} written" if out else "\nno file written: a part is not the published table (--out FILE keeps it)")


if __name__ == "__main__":
    main()
