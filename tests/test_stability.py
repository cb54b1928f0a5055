"""How early the dead can be told: a row a window, as the single run's figure has it, and means over seeds as scipy has them."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.test_figures import lines, text
from tests.test_results import EVENT, WIDTHS, config, write_run
from tnvp import figures, results, stability, trace_figures
from tnvp.run_directory import ResultsError, RunDirectory


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list:
    root = tmp_path_factory.mktemp("stability")
    return [
        write_run(root / f"{sparsity}-{seed}", config(seed=seed, sparsity=sparsity, pruning__window="ema")).path
        for sparsity in (0.25, 0.5)
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def table(runs, tmp_path_factory) -> pd.DataFrame:
    path = tmp_path_factory.mktemp("table") / "stability.csv"
    assert stability.main([*map(str, runs), "--csv", str(path)]) == 0
    return stability.read(path)


@pytest.fixture(scope="module")
def study_table(runs) -> pd.DataFrame:
    return results.table(runs[0].parent)


def test_rows_are_those_of_each_runs_own_figure(runs, table):
    assert list(table) == stability.COLUMNS and set(table["window"]) == {"ema"} and table["step"].max() == EVENT
    for path in runs:
        run, mine = RunDirectory.open(path), table[table["run"] == path.name]
        theirs = trace_figures.stability(run.traces(), run.events())
        np.testing.assert_allclose(mine["rho"], theirs["correlation"], atol=1e-4)
        np.testing.assert_allclose(mine["overlap"], theirs["overlap"] / 100, atol=1e-4)
        for group, width in WIDTHS.items():
            removed = round(width * mine["sparsity"].iloc[0])
            np.testing.assert_allclose(mine.loc[mine["group"] == group, "chance"], removed / width, atol=1e-4)


def test_epochs_are_the_metrics_own(runs, table):
    metrics = RunDirectory.open(runs[0]).metrics().set_index("step")["epoch"]
    mine = table[table["run"] == runs[0].name].set_index("step")["epoch"]
    both = mine.index.intersection(metrics.index)
    assert len(both)
    np.testing.assert_allclose(mine[both], metrics[both].reindex(mine[both].index), atol=1e-4)


def test_the_figure_shows_means_and_t_intervals_over_seeds(table, study_table):
    figure = figures.stability_over_seeds(table, study_table, "mine", "make it")
    said = text(figure)
    assert "MNIST, MLP 48-24 (study mine)" in said and "6 runs, mnist test data, commit 0123456, some CPU" in said
    with pytest.raises(ResultsError, match=r"lacks 1 of the runs, such as 0\.25-0"):
        figures.stability_over_seeds(table, study_table[1:], "mine", "")
    below = figure.axes[len(WIDTHS)]
    drawn = lines(below)
    assert list(drawn) == ["ema, 25% removed", "ema, 50% removed"] and "n = 3" in text(figure)
    mine = table[(table["group"] == "fc1") & (table["sparsity"] == 0.25)]
    rows = mine[mine["step"] == EVENT]["overlap"]
    _, y = drawn["ema, 25% removed"].get_data()
    assert y[-1] == pytest.approx(100 * rows.mean())
    above = figure.axes[0]
    rho = (
        table[table["group"] == "fc1"].groupby(["step", "seed"])["rho"].mean().loc[100]
    )  # both sparsities have one trunk
    edges = above.collections[0].get_paths()[0].vertices
    edges = edges[np.isclose(edges[:, 0], edges[:, 0].min()), 1]
    low, high = stats.t.interval(0.95, 2, rho.mean(), stats.sem(rho))
    np.testing.assert_allclose([edges.min(), edges.max()], np.clip([low, high], 0, 1))


def test_kinds_of_pruning_are_not_mixed(table, study_table):
    with pytest.raises(ResultsError, match="the table has gradual, one_shot"):
        figures.stability_over_seeds(pd.concat([table, table.assign(pruning="gradual")]), study_table, "mine", "")


def test_what_can_not_be_read_is_told(runs, tmp_path, capsys):
    assert stability.main([str(tmp_path / "none")]) == 2
    assert "no run directory" in capsys.readouterr().err
    unfinished = write_run(tmp_path / "unfinished", config(pruning__window="ema"), finish=False)
    with pytest.raises(ResultsError, match="no finished run"):
        stability.of_run(unfinished.path)
    whole = {**config(), "pruning": {"name": "none", "epochs": 5, "trace_every": 100}}
    none = write_run(tmp_path / "dense", whole)
    with pytest.raises(ResultsError, match="removed no neuron"):
        stability.of_run(none.path)
    with pytest.raises(ResultsError, match=r"there is no .*python -m tnvp\.stability RUNS --csv"):
        stability.read(tmp_path / "stability.csv")
    pd.DataFrame({"run": []}).to_csv(tmp_path / "stability.csv")
    with pytest.raises(ResultsError, match="lacks the columns pruning"):
        stability.read(tmp_path / "stability.csv")
