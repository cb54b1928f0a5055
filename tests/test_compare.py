"""The side-by-side with torch_pruning, on one small network."""

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

SCRIPT = Path(__file__).parents[1] / "experiments" / "torch_pruning" / "compare.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> pd.DataFrame:
    """One row per library."""
    pytest.importorskip("torch_pruning", reason="torch_pruning is missing: pip install -e '.[dev]'")
    spec = importlib.util.spec_from_file_location("compare", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path_factory.mktemp("compare") / "results.csv"
    script.main(["--models", "resnet18", "--image-size", "32", "--out", str(out)])
    return pd.read_csv(out).set_index("library")


def test_both_start_from_the_same_network(rows):
    before = rows[["channels_before", "parameters_before", "flops_before", "tensors", "image_size", "sparsity"]]
    assert len(rows) == 2
    assert (before.nunique() == 1).all()


def test_both_make_it_smaller(rows):
    for what in ("channels", "parameters", "flops"):
        assert (rows[f"{what}_after"] < rows[f"{what}_before"]).all()


def test_both_leave_the_masked_network(rows):
    """The judge sees a difference where there is one: the output itself changes by far more than the error."""
    assert (rows["output_error"] < 1e-8).all()
    assert (rows["output_change"] > 1e-2).all()


def test_the_optimizer_from_before_goes_on(rows):
    ours, theirs = rows.loc["tnvp"], rows.loc["torch_pruning"]
    assert ours["tensors_trained"] == ours["momenta_kept"] == ours["tensors"]
    assert theirs["tensors_trained"] < theirs["tensors"]
