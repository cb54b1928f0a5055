"""The side-by-side with published architectures: one formula for both, and the smallest of ours that errs no more."""

import importlib.util
import itertools
import math
from pathlib import Path

import pandas as pd
import pytest
from torch import nn

from tnvp.models import build
from tnvp.pruning.cost import parameter_count

FOLDER = Path(__file__).parents[1] / "experiments" / "published"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("published_compare", FOLDER / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def literature() -> pd.DataFrame:
    return pd.read_csv(FOLDER / "literature.csv")


def test_the_formula_counts_what_the_networks_have(script):
    for name, widths in (("lenet_300_100", [300, 100]), ("lenet_5", [20, 50, 500])):
        assert script.COSTS[name](widths)[0] == parameter_count(build(name, shape=(1, 28, 28), classes=10))
    assert script.lenet_5([20, 50, 800, 500]) == script.lenet_5([20, 50, 500])
    assert script.mlp([784, 300, 100]) == script.mlp([300, 100])
    sizes = [97, 71, 33, 10]
    by_hand = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    assert script.mlp(sizes[:-1])[0] == parameter_count(by_hand)


def test_every_published_row_can_be_compared_and_says_whether_it_was_checked(script, literature):
    assert not literature.isna().any(axis=None) and (literature["error_percent"] > 0).all()
    assert literature["note"].str.match("from memory, not checked|checked|numbers checked").all()
    for row in literature.to_dict("records"):
        parameters, flops = script.COSTS[row["network"]]([int(width) for width in row["architecture"].split("-")])
        assert 0 < parameters < 450_000 and flops > parameters


def test_the_smallest_that_errs_no_more_is_chosen(script, literature):
    columns = ["network", "criterion", "scope", "sparsity", "widths", "parameters", "flops", "n", "error", "half"]
    rows = [
        ["lenet_5", "obs", "layer", 0.8, "4-10-100", 18000.0, 9.0, 3, 0.95, 0.1],
        ["lenet_5", "obs", "layer", 0.9, "2-5-50", 5000.0, 9.0, 3, 1.05, 0.1],
        ["lenet_5", "obs", "layer", 0.95, "1-2-25", 900.0, 9.0, 1, 0.5, math.nan],  # one seed alone
        ["lenet_5", "obs", "layer", 0.5, "10-25-250", 90000.0, 9.0, 3, 0.9, 0.1],
    ]
    found = script.compare(literature, pd.DataFrame(rows, columns=columns)).set_index("method")
    lenet_5 = found[found["network"] == "lenet_5"]
    assert (
        lenet_5.loc["BC-GNJ", "ours_widths"] == "4-10-100"
        and lenet_5.loc["Generalized Dropout", "ours_widths"] == "2-5-50"
    )
    assert lenet_5.loc["L0", "ours_widths"] == "10-25-250"
    assert math.isnan(lenet_5.loc["SBP", "ours_error"]) and lenet_5.loc["SBP", "least_error"] == 0.9
    text = script.markdown(found.reset_index())
    assert (
        "none: 0.90 is our least error" in text and "BC-GNJ*" in text and len(text.splitlines()) == 2 + len(literature)
    )
