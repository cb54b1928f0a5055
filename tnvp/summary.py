"""What a run comes to: its cost, its copy for the tracker, and the lines that a person reads."""

from __future__ import annotations

from itertools import pairwise

from tnvp.config import Config
from tnvp.run_directory import RunDirectory
from tnvp.setup import label
from tnvp.tracking import Tracker


def training_flops(dense: int, events: list[dict], last_step: int, images: float) -> int:
    """FLOPs of the forward passes of all training steps, each of the size that the network had then.

    ``dense``: FLOPs of one image before the first event. ``images`` a step, on average: an epoch's last batch is smaller.
    """
    sizes = [dense, *(event["flops"] for event in events)]
    steps = [0, *(event["step"] for event in events), last_step]
    return round(images * sum(size * (b - a) for size, (a, b) in zip(sizes, pairwise(steps), strict=True)))


def publish(summary: dict, config: Config, directory: RunDirectory, tracker: Tracker) -> None:
    """The tracker's copy of what the run directory has at the end."""
    tracker.summary(summary)
    tracker.artifact(directory.model_path, f"{label(config)}-model", "model")
    if tracker.where and len(traces := directory.traces()):
        from tnvp import figures  # matplotlib takes a second to load, and only the tracker's copy has pictures

        figure = figures.trace_heatmap(traces, directory.events(), label(config))
        (png,) = figures.save(figure, directory.figures_path / "trace_heatmap", kinds=["png"])
        tracker.image("trace_heatmap", png)


def describe(summary: dict, kind: str, directory: RunDirectory, tracker: Tracker) -> str:
    """What a person wants to know when a run ends."""
    dense, pruned, final = (summary[key] for key in ("test_accuracy_dense", "test_accuracy_pruned", "test_accuracy"))
    story = f"test accuracy {final:.2f} %"
    if pruned is not None:
        when = "dense" if kind == "one_shot" else "before the first event"
        story = (
            f"test accuracy {dense:.2f} % {when}, {pruned:.2f} % pruned, {final:.2f} % at the end; "
            f"{summary['neuron_sparsity']:.1%} of the neurons and {summary['parameter_sparsity']:.1%} of the parameters removed"
        )
    lines = [f"{directory.path}: {story} ({summary['seconds']:.1f} s)"]
    if tracker.where.startswith("http"):
        lines.append(f"W&B: {tracker.where}")
    return "\n".join(lines)
