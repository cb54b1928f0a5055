"""What is left of each layer is the mean of what the table says, for each criterion that may choose, at each request."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from scipy import stats

from tests.test_figures import lines, text
from tests.test_results import config, write_run, write_tree
from tnvp import figures, results
from tnvp.results import ResultsError


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pd.DataFrame:
    """Two criteria with a budget for all layers, which leave different widths, and one with a budget a layer."""
    root = tmp_path_factory.mktemp("widths")
    for criterion in ("l2", "variance"):
        for sparsity in (0.25, 0.5):
            for seed in range(3):
                widths = f"{20 + seed + 10 * (criterion == 'l2')}-{round(24 * (1 - sparsity))}"
                whole = config(criterion, sparsity, seed, pruning__scope="global")
                write_run(root / f"{criterion}-{sparsity}-{seed}", whole, streams=False, widths=widths)
    write_tree(root / "layer", ["random"], [0.5], pruning__scope="layer")
    return results.table(root)


def test_lines_are_means_and_bars_intervals_of_the_tables_widths(table):
    ((_, figure),) = figures.of_table(table, "widths_by_criterion", "make it").items()
    assert [axes.get_title() for axes in figure.axes] == ["25% of all neurons removed", "50% of all neurons removed"]
    said = text(figure)
    assert "MNIST, MLP 48-24" in said and "12 runs" in said and "n = 3" in said and "make it" in said
    for axes, second in zip(figure.axes, (75, 50), strict=True):
        drawn = lines(axes)
        assert list(drawn) == ["variance", "l2"], "budgets of single layers leave no choice"
        np.testing.assert_allclose(drawn["variance"].get_ydata(), [100 * 21 / 48, second])
        np.testing.assert_allclose(drawn["l2"].get_ydata(), [100 * 31 / 48, second])
        for name, line in drawn.items():
            assert to_rgb(line.get_color()) == to_rgb(figures.CRITERIA[name][0])
            assert np.round(line.get_xdata()).tolist() == [0, 1] and line.get_marker() == figures.CRITERIA[name][1]
        low, high = stats.t.interval(0.95, 2, 100 * 21 / 48, stats.sem(100 * np.array([20, 21, 22]) / 48))
        np.testing.assert_allclose(axes.collections[1].get_segments()[0][:, 1], [low, high])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1\n(48)", "2\n(24)"]


def test_widths_before_that_are_not_known_leave_neurons(table):
    figure = figures.widths_by_criterion(table.drop(columns="config.model.widths"), "mine")
    np.testing.assert_allclose(lines(figure.axes[0])["l2"].get_ydata(), [31, 18])
    assert figure.axes[0].get_ylabel() == "Neurons left"


def test_tables_without_widths_or_choice_are_told(table):
    old = table.assign(widths=pd.NA)
    for part in (old, table[table["config.pruning.scope"] == "layer"], table[table["criterion"] == "l2"]):
        with pytest.raises(
            ResultsError, match=r"no runs for widths_by_criterion \(several criteria with pruning.scope=global"
        ):
            figures.of_table(part, "widths_by_criterion", "")
    with pytest.raises(ResultsError, match="scope=global"):
        figures.widths_by_criterion(old, "mine")
    longer = table.assign(widths=table["widths"].where(table["criterion"] == "l2", table["widths"] + "-7"))
    with pytest.raises(ResultsError, match="differ in how many layers"):
        figures.widths_by_criterion(longer, "mine")
