"""Figures show what the table says, in one style, and are the same bytes each time they are drawn."""

import itertools
import math
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from scipy import stats

from tests.test_results import EVENT, STEPS, WIDTHS, config, prune_event, traces, write_run, write_tree
from tnvp import figures, results
from tnvp.figure_style import spread_out
from tnvp.results import ResultsError


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_tree(tmp_path_factory.mktemp("figures") / "runs", ["variance", "random"], [0.3, 0.6])


@pytest.fixture(scope="module")
def table(root) -> pd.DataFrame:
    return results.table(root)


def lines(axes) -> dict:
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def text(figure) -> str:
    """All that is written at the head and foot of a figure, on one line."""
    return f"{figure.get_suptitle()} {figure.get_supxlabel()}".replace("\n", " ")


def bands(axes) -> list[PolyCollection]:
    return [part for part in axes.collections if isinstance(part, PolyCollection)]


def pruning(kind: str, **fields) -> dict:
    return {"name": kind, "criterion": "variance", "compensation": "mean", "epochs": 9, **fields}


def test_one_line_a_criterion_in_its_own_colour_marker_and_dash(table):
    renamed = [table.assign(criterion=name) for name in figures.CRITERIA]
    figure = figures.accuracy_vs_sparsity(pd.concat(renamed, ignore_index=True))
    for axes in figure.axes:
        drawn = lines(axes)
        assert list(drawn) == list(figures.CRITERIA)
        for name, (colour, marker, _) in figures.CRITERIA.items():
            assert to_rgb(drawn[name].get_color()) == to_rgb(colour) and drawn[name].get_marker() == marker


def test_styles_are_those_of_the_design_and_tell_criteria_apart():
    assert " ".join(figures.CRITERIA) == (
        "variance variance_preactivation variance_out obs l1 l2 bn_scale taylor apoz random"
    )
    for part in zip(*figures.CRITERIA.values(), strict=True):  # colours, markers, dashes
        assert len(set(part)) == len(figures.CRITERIA)


def test_means_and_bands_equal_scipy_by_hand(table):
    figure = figures.accuracy_vs_sparsity(table)
    for axes, column in zip(figure.axes, ["test_accuracy_pruned", "test_accuracy"], strict=True):
        groups = table[table["criterion"] == "variance"].groupby("config.pruning.sparsity")
        x, y = lines(axes)["variance"].get_data()
        np.testing.assert_allclose(x, 100 * groups["neuron_sparsity"].mean())
        np.testing.assert_allclose(y, groups[column].mean())
        half = stats.t.ppf(0.975, 2) * groups[column].sem()
        band = bands(axes)[0]  # variance's
        corners = {tuple(corner) for corner in band.get_paths()[0].vertices.round(6)}
        edges = np.c_[[*x, *x], [*(y - half), *(y + half)]]
        assert corners == {tuple(corner) for corner in edges.round(6)}


def test_single_runs_are_dots_and_the_trunk_is_the_reference(table):
    axes = figures.accuracy_vs_sparsity(table).axes[1]
    dots = np.concatenate([part.get_offsets() for part in axes.collections if len(part.get_offsets()) > 1])
    by_hand = table.sort_values("criterion", ascending=False)[["neuron_sparsity", "test_accuracy"]]
    np.testing.assert_allclose(np.sort(dots[:, 1]), np.sort(by_hand["test_accuracy"]))
    dense = table.groupby("seed")["test_accuracy_dense"].first().mean()
    assert any(np.allclose(line.get_ydata(), dense) for line in axes.lines)


def test_the_figure_says_n_spread_data_and_command(table):
    said = text(figures.accuracy_vs_sparsity(table, command="python -m tnvp.figures some/runs"))
    for words in (
        "MNIST, MLP 48-24: one shot, mean compensation",
        "n = 3 a point",
        "95 % t-interval",
        "12 runs",
        "mnist test data",
        "commit 0123456",
        "some CPU",
        "python -m tnvp.figures some/runs",
    ):
        assert words in said


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_have_no_band_and_say_so(seeds, table):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = figures.accuracy_vs_sparsity(table[table["seed"] < seeds])
    assert "none where n < 3" in text(figure) and f"n = {seeds} a point" in text(figure)
    for axes in figure.axes:
        assert np.isfinite([*axes.get_xlim(), *axes.get_ylim()]).all() and len(lines(axes)) == 2
        assert not any(path.vertices.size for band in bands(axes) for path in band.get_paths())


def test_bands_are_within_what_an_accuracy_can_be(table):
    wild = table.assign(test_accuracy=50.0 + 49 * (table["seed"] - 1))
    corners = np.concatenate(
        [band.get_paths()[0].vertices for band in bands(figures.accuracy_vs_sparsity(wild).axes[1])]
    )
    assert corners[:, 1].min() == 0 and corners[:, 1].max() == 100


def test_lines_of_one_point_are_named_in_a_legend_without_leaders(table):
    one = figures.accuracy_vs_sparsity(table[table["config.pruning.sparsity"] == 0.3])
    assert [entry.get_text() for entry in one.axes[0].get_legend().get_texts()] == ["variance", "random", "unpruned"]
    assert not one.axes[0].texts
    both = figures.accuracy_vs_sparsity(table)
    assert both.axes[0].get_legend() is None and len(both.axes[0].texts) == 3


def test_many_lines_have_bars_side_by_side_and_single_points_no_line(table):
    renamed = [table.assign(criterion=name) for name in figures.CRITERIA]
    many = pd.concat(renamed, ignore_index=True)
    figure = figures.accuracy_vs_sparsity(many)
    assert "Bars: 95 %" in text(figure) and "moved sideways" in text(figure)
    for axes in figure.axes:
        bars = [part for part in axes.collections if isinstance(part, LineCollection)]
        assert len(bars) == len(figures.CRITERIA) and len(bands(axes)) == 0
        places = {round(part.get_transform().transform([50, 90])[0], 3) for part in bars}
        assert len(places) == len(figures.CRITERIA), "no bar hides another"
        x, y = lines(axes)["variance"].get_data()
        left, right = axes.get_xlim()
        low, high = axes.get_ylim()
        assert left < min(x) and max(x) < right and low < min(y) and max(y) < high, "the axes see what is moved"
    assert "Bands: 95 %" in text(figures.accuracy_vs_sparsity(table))
    one = figures.accuracy_vs_sparsity(table[table["config.pruning.sparsity"] == 0.3])
    assert all(line.get_linestyle() == "None" for line in lines(one.axes[0]).values())
    assert all(line.get_linestyle() != "None" for line in lines(figures.accuracy_vs_sparsity(table).axes[0]).values())


def test_a_bar_is_the_interval(table):
    one = table[(table["config.pruning.sparsity"] == 0.3) & (table["criterion"] == "random")]
    axes = figures.accuracy_vs_sparsity(one).axes[1]
    (bar,) = [part for part in axes.collections if isinstance(part, LineCollection)]
    interval = stats.t.interval(0.95, 2, one["test_accuracy"].mean(), stats.sem(one["test_accuracy"]))
    np.testing.assert_allclose(bar.get_segments()[0][:, 1], interval)


def test_missing_numbers_are_left_out_and_counted(table):
    holed = table.copy()
    holed.loc[holed["run"] == "variance-0.3-1", "test_accuracy"] = math.nan
    holed.loc[holed["run"].str.startswith("random-0.6"), "test_accuracy"] = math.nan
    figure = figures.accuracy_vs_sparsity(holed)
    assert "4 runs lack a number" in text(figure) and "n = 0-3 a point" in text(figure)
    assert len(lines(figure.axes[1])["random"].get_xdata()) == 1
    two = holed[holed["run"].isin(["variance-0.3-0", "variance-0.3-2"])]["test_accuracy"].mean()
    assert lines(figure.axes[1])["variance"].get_ydata()[0] == pytest.approx(two)


def test_settings_are_never_mixed(table):
    other = table.assign(**{"config.pruning.compensation": "affine"})
    with pytest.raises(ResultsError, match=r"2: .*compensation affine; .*compensation mean.*by_setting"):
        figures.accuracy_vs_sparsity(pd.concat([table, other], ignore_index=True))
    with pytest.raises(ResultsError, match="the table has 0"):
        figures.accuracy_vs_sparsity(table[:0])


def test_pruning_while_training_is_compared_with_training_as_long_without(tmp_path):
    for seed in range(2):
        for name, fields in {
            "gradual": {"sparsity": 0.5},
            "iterative": {"sparsity": 0.5},
            "threshold": {"threshold": 0.6},
        }.items():
            whole = {**config(seed=seed), "pruning": pruning(name, **fields)}
            write_run(tmp_path / f"{name}{seed}", whole, streams=False, test_accuracy_dense=20.0)
        for epochs, accuracy in ((9, 90.0 + seed), (3, 50.0)):
            whole = {**config(seed=seed), "pruning": {"name": "none", "epochs": epochs}}
            write_run(tmp_path / f"dense{epochs}-{seed}", whole, streams=False, test_accuracy=accuracy)
    runs = results.table(tmp_path)
    for kind in ("gradual", "iterative", "threshold"):
        chosen = runs[runs["config.pruning.name"].isin([kind, "none"])]
        figure = figures.accuracy_vs_sparsity(chosen)
        assert "trained as long without pruning, n = 2" in text(figure)
        assert any(np.allclose(line.get_ydata(), 90.5) for line in figure.axes[0].lines)
        alone = figures.accuracy_vs_sparsity(chosen[chosen["config.pruning.name"] == kind])
        assert "npruned" not in text(alone), "what is pruned while it trains was no trained network before"


def test_scratch_is_drawn_where_it_trained_as_long_at_the_same_settings(table, root, tmp_path):
    control = {"name": "scratch", "sparsity": 0.3, "dense_epochs": 5, "finetune_epochs": 5}
    for seed in range(2):
        for sparsity, accuracy in ((0.3, 90.0), (0.6, 80.0)):
            whole = {**config(seed=seed), "pruning": control | {"sparsity": sparsity}}
            write_run(tmp_path / f"{sparsity}-{seed}", whole, streams=False, test_accuracy=accuracy + seed)
        for name, whole in {
            "short": {**config(seed=seed), "pruning": control | {"finetune_epochs": 0}},
            "other": {**config(seed=seed, batch_size=64), "pruning": control},
            "rounded": {**config(seed=seed), "pruning": control | {"round_to": 8}},
        }.items():
            write_run(tmp_path / f"{name}-{seed}", whole, streams=False, test_accuracy=10.0)
    pruned = table.assign(**{"config.pruning.round_to": 1})
    figure = figures.accuracy_vs_sparsity(pd.concat([pruned, results.table(tmp_path)], ignore_index=True))
    right_after, end = figure.axes
    assert "from scratch" not in lines(right_after), "it was trained to the end, its neighbours were not yet"
    assert lines(end)["from scratch"].get_ydata().tolist() == [90.5, 80.5]
    assert "networks of the same widths trained as many epochs from random weights, n = 2 a point" in text(figure)
    assert "16 runs" in text(figure) and "from scratch" not in text(figures.accuracy_vs_sparsity(table)).lower()


def test_a_published_table_draws_the_same_figure(table, tmp_path):
    table.to_csv(tmp_path / "results.csv", index=False)
    again = figures.accuracy_vs_sparsity(pd.read_csv(tmp_path / "results.csv"))
    for old, new in zip(figures.accuracy_vs_sparsity(table).axes, again.axes, strict=True):
        np.testing.assert_allclose(lines(old)["random"].get_data(), lines(new)["random"].get_data())


def test_the_heatmap_shows_each_variance_and_greys_the_dead():
    event = prune_event(config())
    trace = traces(event)
    figure = figures.trace_heatmap(trace, [event])
    for axes, group in zip(figure.axes, event["groups"], strict=False):
        cells = axes.collections[0].get_array()
        part = trace[trace["group"] == group["name"]]
        assert np.isclose(cells.sum(), part["variance"].sum()) and cells.count() == len(part)
        assert cells.shape == (group["width_before"], STEPS // 100)
        last = np.array([row.compressed()[-1] for row in cells])
        assert (np.diff(last) >= 0).all()
        dead = cells.mask[:, -1]
        assert dead.sum() == len(group["removed"]) and not cells.mask[:, : EVENT // 100].any()
        assert len(axes.collections[1].get_segments()) == len(group["removed"])
        widths = f"{group['width_before']} to {group['width_after']}"
        assert axes.get_title() == f"{group['name']}: {widths} neurons"


def test_the_heatmap_bears_odd_traces():
    """Never-active neurons, one window, and a neuron removed before its first window."""
    trace = pd.DataFrame({"step": 10, "group": "fc", "neuron": [0, 2], "mean": 0.0, "variance": 0.0})
    event = {"step": 4, "groups": [{"name": "fc", "removed": [1], "kept": [0, 2]}]}
    figure = figures.trace_heatmap(trace, [event])
    assert figure.axes[0].collections[0].get_array().mask.tolist() == [[True], [False], [False]]
    figure.draw_without_rendering()
    with pytest.raises(ResultsError, match="trace is empty"):
        figures.trace_heatmap(trace[:0], [])


def test_widths_step_down_at_the_event(root):
    run = results.RunDirectory.open(root / "variance-0.6-0")
    axes = figures.widths_over_time(run.metrics(), run.events()).axes[0]
    for group in run.events()[0]["groups"]:
        line = lines(axes)[group["name"]]
        before, after = group["width_before"], group["width_after"]
        assert line.get_xydata().tolist() == [[0, before], [EVENT, after], [STEPS, after]]
        assert line.get_drawstyle() == "steps-post"
    flat = lines(figures.widths_over_time(run.metrics()[:50], []).axes[0])  # no event yet: from the metrics
    assert {name: set(line.get_ydata()) for name, line in flat.items()} == {n: {w} for n, w in WIDTHS.items()}
    with pytest.raises(ResultsError, match="no widths"):
        figures.widths_over_time(pd.DataFrame({"step": [1]}), [])


def test_training_curves_hold_every_record_and_mark_each_event(root):
    run = results.RunDirectory.open(root / "variance-0.6-0")
    metrics = run.metrics()
    loss, accuracy = figures.training_curves(metrics, run.events()).axes
    epochs = metrics[metrics["validation/loss"].notna()]
    np.testing.assert_allclose(lines(loss)["validation"].get_ydata(), epochs["validation/loss"])
    np.testing.assert_allclose(lines(accuracy)["training, epoch"].get_ydata(), epochs["train/accuracy"])
    assert len(lines(loss)["training"].get_xdata()) == len(metrics) - len(epochs)
    assert list(lines(accuracy)["prune event (1)"].get_xdata()) == [EVENT, EVENT]
    after = {**run.events()[0], "accuracy_after": 61.5}
    (point,) = lines(figures.training_curves(metrics, [after]).axes[1])["validation, right after an event"].get_xydata()
    assert point.tolist() == [EVENT, 61.5] and "validation, right after an event" not in lines(accuracy)
    with pytest.raises(ResultsError, match="no metrics"):
        figures.training_curves(metrics[:0], [])


@settings(deadline=None)
@given(st.lists(st.floats(-0.5, 1.5), max_size=12))
def test_labels_never_overlap_and_move_only_if_they_must(heights):
    heights, gap = sorted(heights), 0.05
    places = spread_out(heights, gap)
    assert all(high - low >= gap - 1e-9 for low, high in itertools.pairwise(places))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert spread_out(places, gap) == pytest.approx(places)


def build(noun: str, root: Path, table: pd.DataFrame):
    run = results.RunDirectory.open(root / "variance-0.6-0")
    return {
        "accuracy": lambda: figures.accuracy_vs_sparsity(table),
        "cost": lambda: figures.accuracy_vs_cost(table),
        "differences": lambda: figures.paired_differences(table),
        "trace": lambda: figures.trace_heatmap(run.traces(), run.events()),
        "survival": lambda: figures.survival(run.traces(), run.events()),
        "stability": lambda: figures.rank_stability(run.traces(), run.events()),
        "by criterion": lambda: figures.widths_by_criterion(table.assign(**{"config.pruning.scope": "global"}), "mine"),
        "curves": lambda: figures.training_curves(run.metrics(), run.events()),
    }[noun]()


NOUNS = ["accuracy", "cost", "differences", "trace", "survival", "stability", "by criterion", "curves"]


@pytest.mark.parametrize("noun", NOUNS)
def test_two_drawings_are_the_same_bytes_and_leave_matplotlib_as_it_was(noun, root, table, tmp_path):
    before = dict(matplotlib.rcParams)
    first = {path: path.read_bytes() for path in figures.save(build(noun, root, table), tmp_path / "lr=0.1")}
    assert [path.name for path in first] == ["lr=0.1.png", "lr=0.1.pdf"]
    assert len(list(tmp_path.iterdir())) == 2
    second = {path: path.read_bytes() for path in figures.save(build(noun, root, table), tmp_path / "lr=0.1")}
    assert first == second and dict(matplotlib.rcParams) == before
    for data, head in zip(first.values(), (b"\x89PNG", b"%PDF"), strict=True):
        assert data.startswith(head) and b"CreationDate" not in data


@pytest.mark.parametrize("noun", NOUNS)
def test_nothing_written_is_cut_off(noun, root, table):
    figure = build(noun, root, table)
    figure.draw_without_rendering()
    whole, drawn = figure.bbox, figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert drawn.x0 >= -1 and drawn.y0 >= -1 and drawn.x1 <= whole.x1 + 1 and drawn.y1 <= whole.y1 + 1


def test_draw_makes_each_figure_once(root, tmp_path, monkeypatch):
    titles = {}

    def keep(figure, path):
        titles[path.name] = text(figure)
        return []

    monkeypatch.setattr(figures, "save", keep)
    figures.draw(root, tmp_path)
    names = [
        "accuracy-mnist-mlp-one_shot-compensation-mean",
        "cost-mnist-mlp-one_shot-compensation-mean",
        "differences-mnist-mlp-one_shot-compensation-mean",
        "trace-mnist-mlp-one_shot-variance",
        "survival-mnist-mlp-one_shot-variance",
        "stability-mnist-mlp-one_shot-variance",
        "widths-mnist-mlp-one_shot-variance",
        "curves-mnist-mlp-one_shot-variance",
        "trace-mnist-mlp-one_shot-random",
    ]
    assert list(titles) == names
    command = f"python -m tnvp.figures {root} --out {tmp_path}".replace(" ", "")
    assert all(command in title.replace(" ", "") for title in titles.values()), "whatever the lines' breaks"
    for name in names[3:]:  # which run it is, and that it is one
        assert "0.3 requested, seed 0" in titles[name] and "0.3-0: n = 1, no spread" in titles[name]


def test_the_command_prints_the_paths_it_wrote(tmp_path, capsys):
    write_run(tmp_path / "runs" / "one", config(), streams=False)
    assert figures.main([str(tmp_path / "runs"), "--out", str(tmp_path / "new")]) == 0
    stems = [f"{tmp_path}/new/{noun}-mnist-mlp-one_shot-compensation-mean" for noun in ("accuracy", "cost")]
    paths = [f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf")]
    assert capsys.readouterr().out.split() == paths
    assert sorted(map(str, (tmp_path / "new").iterdir())) == sorted(paths)


def test_a_tree_that_cannot_be_drawn_is_told(tmp_path, capsys):
    assert figures.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"no finished run under {tmp_path}" in capsys.readouterr().err and not (tmp_path / "out").exists()
