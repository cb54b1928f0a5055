"""Controls: the runs of a table that a pruned run is compared with, because they agree in all but the pruning."""

import math

import pandas as pd

from tnvp import results

CONTROLS = ["none", "scratch"]  # kinds of pruning that remove nothing from a trained network
SHAPING = ["min_neurons", "round_to", "approximate", "ignore"]  # fields of pruning that the final widths depend on


def pruned_and_scratch(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The runs that pruned, and of those from scratch the ones to compare them with.

    None where scope is not "layer": widths then depend on the criterion, and scratch has those of equal sparsity.
    """
    kinds = table["config.pruning.name"]
    pruned, scratch = table[~kinds.isin(CONTROLS)], table[kinds == "scratch"]
    if len(pruned) and len(scratch):
        scope = pruned.get("config.pruning.scope", pd.Series("layer")).fillna("layer")
        scratch = alike(scratch, pruned) if (scope == "layer").all() else scratch[:0]
    return pruned, scratch


def alike(controls: pd.DataFrame, pruned: pd.DataFrame) -> pd.DataFrame:
    """The controls that agree with the first of the pruned runs in all but the pruning, and train as many epochs."""
    run = pruned.iloc[0]
    for name in results.setting_fields(controls):
        if not name.startswith("config.pruning."):
            same = controls[name].isna() if pd.isna(run[name]) else controls[name].eq(run[name]).fillna(False)
            controls = controls[same]
    for name in (f"config.pruning.{field}" for field in SHAPING):
        if name in controls and not pd.isna(run[name]):
            controls = controls[controls[name].isna() | controls[name].eq(run[name]).fillna(False)]
    return controls[epochs(controls) == epochs(pruned).iloc[0]]


def epochs(table: pd.DataFrame) -> pd.Series:
    """Training epochs of each run, before and after its events."""
    total, dense, finetune = (
        table.get(f"config.pruning.{name}", pd.Series(math.nan, table.index)).astype("float64")
        for name in ("epochs", "dense_epochs", "finetune_epochs")
    )
    return total.fillna(dense + finetune)


def dense_accuracy(table: pd.DataFrame, pruned: pd.DataFrame) -> tuple[results.Interval, str, pd.DataFrame]:
    """Accuracy to compare with, what it is - the trunk's, or of runs trained as long without pruning - and these runs, if any.

    n is 0 where there is neither: a network that is pruned while it trains was no trained one before the first event.
    """
    if "config.pruning.dense_epochs" in pruned and pruned["config.pruning.dense_epochs"].notna().all():
        return results.interval(pruned, "test_accuracy_dense"), "the trained network before pruning", table[:0]
    rows = alike(table[table["config.pruning.name"] == "none"], pruned)
    if len(rows):
        return results.interval(rows, "test_accuracy"), "trained as long without pruning", rows
    return results.Interval(0, math.nan, math.nan), "", table[:0]
