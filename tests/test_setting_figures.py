"""Settings that columns of the config name: what is drawn is the mean and interval of their runs, and no setting is mixed."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.test_figures import text
from tests.test_results import config, write_run, write_tree
from tnvp import figures, results
from tnvp.results import ResultsError


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pd.DataFrame:
    """Two windows at two sparsities, and runs without pruning, three seeds each."""
    root = tmp_path_factory.mktemp("settings")
    for window in ("ema", "cumulative"):
        write_tree(root / window, ["variance"], [0.3, 0.6], pruning__window=window)
    for seed in range(3):
        whole = {**config(seed=seed), "pruning": {"name": "none", "epochs": 10, "trace_every": 100}}
        write_run(root / f"none-{seed}", whole, streams=False, test_accuracy_pruned=None)
    return results.table(root)


def test_a_row_a_setting_with_its_mean_and_interval(table):
    figure = figures.accuracy_by_setting(table, ["pruning.name", "pruning.window"], "mine", "make it")
    assert len(figure.axes) == 3 * 2 and "15 runs" in text(figure) and "make it" in text(figure)
    titles = [axes.get_title(loc="left") for axes in figure.axes[::2]]
    assert titles == ["30% of the neurons removed", "60% of the neurons removed", "No sparsity requested"]
    end = figure.axes[3]
    assert [label.get_text() for label in figure.axes[2].get_yticklabels()] == ["one shot, cumulative", "one shot, ema"]
    rows = table[(table["config.pruning.window"] == "ema") & (table["config.pruning.sparsity"] == 0.6)]["test_accuracy"]
    bar = end.containers[1]
    assert bar.lines[0].get_xdata()[0] == pytest.approx(rows.mean())
    interval = stats.t.interval(0.95, 2, rows.mean(), stats.sem(rows))
    np.testing.assert_allclose(bar.lines[2][0].get_segments()[0][:, 0], interval)


def test_what_training_saves_is_against_runs_without_pruning(table):
    figure = figures.accuracy_vs_training(table, ["pruning.name", "pruning.window"], "mine", "make it")
    (axes,) = figure.axes
    drawn = {bar.get_label(): bar.lines[0].get_xdata().astype(float) for bar in axes.containers}
    np.testing.assert_allclose(drawn["one shot, ema"], [15, 30])  # `summary` lets half of the sparsity be saved
    np.testing.assert_allclose(drawn["none"], [0], atol=1e-9)
    with pytest.raises(ResultsError, match="runs with pruning=none"):
        figures.accuracy_vs_training(table[table["config.pruning.name"] != "none"], ["pruning.window"], "mine", "")


def test_mixed_settings_and_unknown_columns_are_named(table):
    with pytest.raises(ResultsError, match=r"one setting \(one shot\) differ in config.pruning.window"):
        figures.accuracy_by_setting(table, ["pruning.name"], "mine", "")
    with pytest.raises(ResultsError, match=r"lack the columns.*pruning\.windows"):
        figures.accuracy_by_setting(table, ["pruning.windows"], "mine", "")


def test_a_number_has_its_name_once(table):
    threshold = table.assign(**{"config.pruning.name": "threshold", "config.pruning.threshold": 0.5})
    columns = ["pruning.name", "pruning.threshold", "pruning.window"]
    figure = figures.accuracy_by_setting(threshold.dropna(subset=["config.pruning.window"]), columns, "mine", "")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["threshold 0.5, cumulative", "threshold 0.5, ema"]


def test_settings_far_apart_at_both_moments_have_panels_of_their_own(table):
    def titles(runs):
        figure = figures.accuracy_by_setting(runs, ["pruning.name", "pruning.window"], "mine", "")
        return [axes.get_title(loc="left") for axes in figure.axes[::2]]

    pruned = table[(table["config.pruning.name"] != "none") & (table["config.pruning.sparsity"] == 0.6)]
    other = pruned.assign(**{"config.pruning.name": "gradual"})
    far = other.assign(
        test_accuracy_pruned=other["test_accuracy_pruned"] - 50, test_accuracy=other["test_accuracy"] - 50
    )
    assert titles(pd.concat([pruned, other])) == ["60% of the neurons removed"]
    assert titles(pd.concat([pruned, far])) == [
        f"60% of the neurons removed, {kind}" for kind in ("gradual", "one shot")
    ]
    late = far.assign(test_accuracy=other["test_accuracy"])
    assert titles(pd.concat([pruned, late])) == ["60% of the neurons removed"], "at the end they are compared"


def test_the_title_names_data_and_network(table):
    assert "MNIST, MLP 48-24 (study mine)" in text(
        figures.accuracy_by_setting(table, ["pruning.window", "pruning.name"], "mine", "")
    )
