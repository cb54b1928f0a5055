"""Latency of pruned models beside their dense originals: the two are timed in turns, so that a busy machine slows both.

    python -m tnvp.latency runs/STUDY/*/model.pt --csv experiments/STUDY/latency.csv

The table has a row a model, device and batch size. A latency.csv beside a published results.csv gives figures their latency.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from tnvp import checkpoint, models
from tnvp.files import write_atomically
from tnvp.run_directory import hardware


def measure(networks: Sequence[nn.Module], inputs: Tensor, n: int, warmup: int = 5) -> list[list[float]]:
    """Milliseconds of ``n`` forward passes of each network, in turns, after ``warmup`` that don't count."""
    wait = torch.cuda.synchronize if inputs.device.type == "cuda" else lambda: None
    times: list[list[float]] = [[] for _ in networks]
    with torch.inference_mode():
        for turn in range(warmup + n):
            for network, mine in zip(networks, times, strict=True):
                wait()
                start = time.perf_counter()
                network(inputs)
                wait()
                if turn >= warmup:
                    mine.append(1000 * (time.perf_counter() - start))
    return times


def compare(path: Path, device: str, batch: int, n: int) -> dict:
    """One row: a model against a new one of its original widths; medians and interquartile ranges in ms, ratio of the medians."""
    pruned = checkpoint.load(path)
    dense = models.build(**pruned.built_from).eval()
    inputs = torch.randn(batch, *pruned.built_from["shape"], device=device)
    times = measure([dense.to(device), pruned.to(device)], inputs, n)
    (low, middle, high), (pruned_low, pruned_middle, pruned_high) = (
        pd.Series(mine).quantile([0.25, 0.5, 0.75]) for mine in times
    )
    return {
        "run": path.resolve().parent.name,
        "device": device,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "batch": batch,
        "n": n,
        "dense_ms": middle,
        "dense_iqr_ms": high - low,
        "pruned_ms": pruned_middle,
        "pruned_iqr_ms": pruned_high - pruned_low,
        "ratio": middle / pruned_middle,
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write it where asked; 0, or 2 for a model that can't be read."""
    parser = argparse.ArgumentParser(prog="python -m tnvp.latency", description="Pruned models against dense ones.")
    parser.add_argument("models", metavar="MODEL.pt", nargs="+", type=Path, help="model.pt of runs")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("-n", type=int, default=100, help="passes of each network")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", metavar="FILE", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    try:
        rows = [
            compare(path, device, batch, options.n)
            for path in options.models
            for device in devices
            for batch in options.batch
        ]
        table = pd.DataFrame(rows)
        if options.csv:
            write_atomically(options.csv, lambda file: table.to_csv(file, index=False))
    except (checkpoint.CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table.drop(columns="hardware").to_string(index=False, float_format="{:.3f}".format))
    print("ms: medians and interquartile ranges of n forward passes, dense and pruned in turns; ratio: dense / pruned.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
