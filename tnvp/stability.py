"""How early a run's variances tell which neurons it will remove: one tidy table of many runs.

    python -m tnvp.stability runs/STUDY/* --csv experiments/STUDY/stability.csv

The table has a row a run, group and window up to the first event. A study's figure `rank_stability` is drawn from it.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from tnvp.files import write_atomically
from tnvp.run_directory import ResultsError, RunDirectory
from tnvp.trace_figures import deaths, stability

COLUMNS = ["run", "pruning", "window", "sparsity", "seed", "group", "step", "epoch", "rho", "overlap", "chance"]


def of_run(path: Path) -> pd.DataFrame:
    """Rows of COLUMNS, a group and window each.

    rho: Spearman's correlation of the window's variances with those of the last window before the first event. overlap: of the k
    neurons that vary least in the window, the share that is removed by the end, k being how many are. chance: that share if
    the k were drawn at random. window: what the run's scores look at; sparsity: what it was asked for, NaN for a threshold.
    Raises ResultsError for a run that isn't finished, has no trace, or removed nothing.
    """
    run = RunDirectory.open(path)
    if not run.is_complete:
        raise ResultsError(f"{path} is no finished run: it has no {run.summary_path.name}")
    traces, events, metrics, pruning = run.traces(), run.events(), run.metrics(), run.config["pruning"]
    if not any(group["removed"] for event in events for group in event["groups"]):
        raise ResultsError(f"{path} removed no neuron: leave it out")
    if not len(traces):
        raise ResultsError(f"{path} recorded no window: lower pruning.trace_every")
    born = traces[traces["step"] == traces["step"].min()].groupby("group")["neuron"].nunique()
    found = stability(traces, events).rename(columns={"correlation": "rho"})
    return found.assign(
        run=path.resolve().name,
        pruning=pruning["name"],
        window=pruning["window"],
        sparsity=pruning.get("sparsity", np.nan),
        seed=run.summary["seed"],
        epoch=np.interp(found["step"], metrics["step"], metrics["epoch"]),
        overlap=found["overlap"] / 100,
        chance=[len(deaths(events, group)) / born[group] for group in found["group"]],
    )[COLUMNS]


def read(path: Path) -> pd.DataFrame:
    """The table that was written to ``path``. Raises ResultsError if there is none, or another one."""
    if not path.exists():
        raise ResultsError(f"there is no {path}. Write it: python -m tnvp.stability RUNS --csv {path}")
    table = pd.read_csv(path)
    if missing := [name for name in COLUMNS if name not in table]:
        raise ResultsError(
            f"{path} lacks the columns {', '.join(missing)}: write it anew with python -m tnvp.stability"
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Print the table's means over runs, and write it where asked; 0, or 2 for a run that can't be read."""
    parser = argparse.ArgumentParser(prog="python -m tnvp.stability", description="How early the dead can be told.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directories")
    parser.add_argument("--csv", metavar="FILE", type=Path)
    options = parser.parse_args(arguments)
    try:
        table = pd.concat([of_run(path) for path in options.runs], ignore_index=True)
        if options.csv:
            write = lambda file: table.to_csv(file, index=False, float_format="%.4f")  # noqa: E731
            write_atomically(options.csv, write)
    except (ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    keys = ["pruning", "window", "sparsity", "group", "epoch"]
    print(table.groupby(keys, dropna=False)[["rho", "overlap", "chance"]].mean().round(3).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
