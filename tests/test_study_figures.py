"""Cost and differences: what is drawn is what the table says; controls are those that agree."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D
from scipy import stats

from tests.test_figures import lines, text
from tests.test_results import config, write_run, write_tree
from tnvp import controls, figures, results
from tnvp.figure_style import COMPENSATIONS, in_words, subject
from tnvp.results import ResultsError

MOMENTS_AND_COSTS = list(itertools.product(["test_accuracy_pruned", "test_accuracy"], ["parameters", "flops"]))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pd.DataFrame:
    root = write_tree(tmp_path_factory.mktemp("study_figures") / "runs", ["variance", "l2", "random"], [0.3, 0.6])
    return results.table(root)


def test_costs_are_means_over_seeds_and_fall_to_the_right(table):
    figure = figures.accuracy_vs_cost(table)
    parameters, flops = figure.axes[:2]
    panels = [(axes, cost, when) for axes, (when, cost) in zip(figure.axes, MOMENTS_AND_COSTS, strict=True)]
    for axes, column, when in panels:
        groups = table[table["criterion"] == "l2"].groupby("config.pruning.sparsity")
        x, y = lines(axes)["l2"].get_data()
        by_hand = pd.DataFrame({"x": groups[column].mean(), "y": groups[when].mean()}).sort_values("x")
        np.testing.assert_allclose(np.c_[x, y], by_hand.to_numpy(float))
        left, right = axes.get_xlim()
        assert left > right and axes.get_xscale() == "log"
        ring = next(line for line in axes.lines if line.get_fillstyle() == "none")
        assert left > ring.get_xdata()[0] > max(x), "the unpruned network costs most, and is in the panel"
    assert parameters.lines[0].get_xdata()[0] == pytest.approx(40000, rel=1e-3)
    assert flops.lines[0].get_xdata()[0] == pytest.approx(80000, rel=1e-3)


def test_images_of_a_folder_are_named_after_it(table):
    ours = table.assign(**{"config.dataset.name": "image_folder", "config.dataset.folder": "birds"})
    ((title, figure),) = figures.of_table(ours, "accuracy_vs_cost", "").items()
    assert title.startswith("image_folder, ") and "image_folder" not in (said := text(figure))
    assert "cost: birds, MLP" in said and "birds test data" in said


def test_a_cost_that_no_run_has_is_not_drawn(table):
    assert len(figures.accuracy_vs_cost(table.assign(flops=pd.array([None] * len(table), "Int64"))).axes) == 2
    late = figures.accuracy_vs_cost(table.assign(test_accuracy_pruned=math.nan))
    assert [axes.get_ylabel() for axes in late.axes] == ["Test accuracy (%):\nat the end, after fine-tuning", ""]


HOW = {"n": 70, "threads": 2, "hardware": "a clock", "pruned_iqr_ms": 0.25, "dense_iqr_ms": 0.5}


def test_latency_is_drawn_where_it_was_measured(table, tmp_path):
    names = table["run"].str.split("/").str[-1]
    rows = [
        {"run": name, "device": device, "batch": batch, "dense_ms": 9.0 * scale, "pruned_ms": (1 + i) * scale} | HOW
        for i, name in enumerate(names)
        for device, scale in (("cpu", 1), ("cuda", 50))
        for batch in (1, 256)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "latency.csv", index=False)
    timed = results.with_latency(table, tmp_path / "latency.csv")
    assert timed["latency_1"].tolist() == [1 + i for i in range(len(table))] and (timed["latency_256_dense"] == 9).all()
    pd.DataFrame(rows[:2]).to_csv(tmp_path / "latency.csv", index=False)
    shared = results.with_latency(table, tmp_path / "latency.csv")
    alike = table["widths"] == table["widths"].iloc[0]
    assert (shared.loc[alike, "latency_1"].dropna() == 1).all() and shared.loc[alike, "latency_1"].notna().all()
    assert shared.loc[~alike, "latency_1"].isna().all() and 0 < alike.sum() < len(table)
    figure = figures.accuracy_vs_cost(timed)
    assert [axes.get_xlabel().split(",")[0] for axes in figure.axes[6:]] == ["Latency (ms)"] * 2
    said = text(figure)
    assert (
        "median of 70 passes, 2 threads, a clock" in said and "seed 0, 1, 2;" in said and "interquartile range" in said
    )
    bars = [part.get_segments()[0][:, 0] for part in figure.axes[6].collections if part.get_label() == "quartiles"]
    assert len(bars) == len(timed) + 1, "each network that was timed, and the unpruned one"
    np.testing.assert_allclose(bars[0], [0.875, 1.125])
    np.testing.assert_allclose(bars[-1], [8.75, 9.25])
    assert "latency.csv" in text(figure) and "latency.csv" not in text(figures.accuracy_vs_cost(table))
    pd.DataFrame({"run": [1]}).to_csv(tmp_path / "latency.csv")
    with pytest.raises(ResultsError, match=r"latency.csv lack the columns"):
        results.with_latency(table, tmp_path / "latency.csv")


def test_differences_are_scipys_at_each_request_and_panel(table):
    figure = figures.paired_differences(table)
    assert "random" in figure.axes[0].get_xlabel() and "n = 3" in text(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0.3", "0.6"]
    for axes, column in zip(figure.axes, ["test_accuracy_pruned", "test_accuracy"], strict=True):
        drawn = {bar.get_label(): bar for bar in axes.containers}
        assert list(drawn) == ["variance", "l2"]
        for name, bar in drawn.items():
            segments = bar.lines[2][0].get_segments()
            for asked, point, segment in zip((0.3, 0.6), bar.lines[0].get_xdata(), segments, strict=True):
                rows = table[table["config.pruning.sparsity"] == asked].pivot(
                    index="seed", columns="criterion", values=column
                )
                test = stats.ttest_rel(rows[name], rows["random"])
                interval = test.confidence_interval(0.95)
                assert point == pytest.approx((rows[name] - rows["random"]).mean())
                np.testing.assert_allclose(segment[:, 0], [interval.low, interval.high])


def test_differences_with_two_seeds_have_no_bars_but_dots(table):
    figure = figures.paired_differences(table[table["seed"] < 2])
    assert "none where n < 3" in text(figure)
    for axes in figure.axes:
        segments = [segment for bar in axes.containers for segment in bar.lines[2][0].get_segments()]
        assert len(segments) == 4 and not any(map(len, segments))
        assert sum(len(dots.get_offsets()) for dots in axes.collections if len(dots.get_offsets())) >= 8


def test_the_reference_is_random_or_else_the_first(table):
    two = figures.paired_differences(table[table["criterion"] != "random"])
    assert "Differences to variance" in text(two) and [b.get_label() for b in two.axes[0].containers] == ["l2"]
    with pytest.raises(ResultsError, match="need two criteria; the table has l2"):
        figures.paired_differences(table[table["criterion"] == "l2"])
    with pytest.raises(ResultsError, match=r"no runs for paired_differences \(several criteria\)"):
        figures.of_table(table[table["criterion"] == "l2"], "paired_differences", "")


def test_paired_is_the_mean_of_the_differences(table):
    seeds = results.differences(table, "variance", "random")
    assert len(seeds) == 6 and seeds["difference"].notna().all()
    means = seeds.groupby("requested")["difference"].mean()
    np.testing.assert_allclose(results.paired(table, "variance", "random")["difference"], means)


def test_one_run_is_one_run(table):
    assert " 1 run, " in text(figures.accuracy_vs_sparsity(table[:1]))


def test_scratch_is_no_control_where_widths_depend_on_the_criterion(table, tmp_path):
    whole = {**config(), "pruning": {"name": "scratch", "sparsity": 0.3, "dense_epochs": 5, "finetune_epochs": 5}}
    write_run(tmp_path / "scratch", whole, streams=False)
    both = pd.concat([table, results.table(tmp_path)], ignore_index=True)
    assert len(controls.pruned_and_scratch(both)[1]) == 1
    assert len(controls.pruned_and_scratch(both.assign(**{"config.pruning.scope": "global"}))[1]) == 0


def test_controls_are_found_beside_gradual_runs_that_lack_their_fields(table, tmp_path):
    """A column of epochs that one kind of pruning has and another has not is no error."""
    for name, pruning in {
        "gradual": {"name": "gradual", "criterion": "l2", "compensation": "mean", "sparsity": 0.3, "epochs": 10},
        "scratch": {"name": "scratch", "sparsity": 0.3, "dense_epochs": 5, "finetune_epochs": 5},
    }.items():
        write_run(tmp_path / name, {**config(), "pruning": pruning}, streams=False)
    both = pd.concat([table, results.table(tmp_path)], ignore_index=True).astype({"config.pruning.epochs": "Int64"})
    gradual = both[both["config.pruning.name"].isin(["gradual", "scratch"])]
    assert len(controls.pruned_and_scratch(gradual)[1]) == 1
    assert math.isnan(controls.epochs(both.drop(columns="config.pruning.dense_epochs")).iloc[0])


def test_settings_that_differ_beside_the_compensation_have_a_figure_each(table):
    parts = [
        table.assign(**{"config.pruning.compensation": how, "config.pruning.finetune_epochs": epochs})
        for how in ("mean", "affine")
        for epochs in (0, 5)
    ]
    both = pd.concat(parts, ignore_index=True).assign(run=lambda rows: rows.index.astype(str))
    drawn = figures.of_table(both, "accuracy_by_compensation", "make figures")
    assert len(drawn) == 2 and all("finetune_epochs" in title for title in drawn)


def test_compensations_have_fixed_dashes_and_both_moments(table):
    parts = {how: table.assign(**{"config.pruning.compensation": how}) for how in COMPENSATIONS}
    both = figures.accuracy_by_compensation(pd.concat(parts.values(), ignore_index=True))
    two = figures.accuracy_by_compensation(pd.concat([parts["mean"], parts["affine"]], ignore_index=True))
    for figure in (both, two):
        for axes, column in zip(figure.axes, ["test_accuracy_pruned", "test_accuracy"], strict=True):
            for name, line in lines(axes).items():
                criterion, how = name.split(" + ")
                dash = COMPENSATIONS[how]
                assert line._dash_pattern == Line2D([], [], linestyle=dash, linewidth=1)._dash_pattern, name
                means = table[table["criterion"] == criterion].groupby("config.pruning.sparsity")[column].mean()
                np.testing.assert_allclose(line.get_ydata(), means)
    assert [name.split(" + ")[1] for name in lines(both.axes[0])][::3] == list(COMPENSATIONS)


def test_nothing_trained_after_pruning_is_one_panel(table):
    cut = table.assign(test_accuracy=table["test_accuracy_pruned"])
    figure = figures.accuracy_by_compensation(cut)
    assert [axes.get_title() for axes in figure.axes] == ["Right after pruning, which is the end"]


def test_captions_count_and_name_all_that_is_drawn(table, tmp_path):
    control = {"name": "scratch", "sparsity": 0.3, "dense_epochs": 5, "finetune_epochs": 5}
    for seed in range(2):
        whole = {**config(seed=seed), "pruning": control}
        write_run(tmp_path / f"{seed}", whole, streams=False, commit="fedcba9876", hardware="another CPU")
    both = pd.concat([table, results.table(tmp_path)], ignore_index=True)
    for draw in (figures.accuracy_vs_sparsity, figures.accuracy_vs_cost, figures.accuracy_by_compensation):
        said = text(draw(both))
        assert "20 runs" in said and "commit 0123456, fedcba9" in said and "another CPU, some CPU" in said, draw
    assert "18 runs" in text(figures.accuracy_vs_sparsity(table))


def test_titles_are_words(table):
    setting = "mnist, mlp, one_shot, compensation mean, model.widths=[48, 24], pruning.round_to=8"
    assert in_words(table, setting) == "MNIST, MLP 48-24: one shot, mean compensation, widths [48, 24], round to 8"
    assert subject(table.assign(**{"config.model.name": "lenet_300_100"})) == "MNIST, LeNet-300-100"
    mixed = pd.concat([table, table.assign(**{"config.dataset.name": "digits", "config.model.widths": "[9]"})])
    assert subject(mixed) == "MNIST, MLP 48-24; digits (8×8 pixels), MLP 9"
