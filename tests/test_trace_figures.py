"""Merged windows are the moments of all their samples; who died, and how early it could be told, is what the run says."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.test_figures import lines, text
from tests.test_results import EVENT, STEPS, WIDTHS, config, prune_event, traces
from tnvp import figures, trace_figures
from tnvp.results import ResultsError


def windows(ends, per_step=4, neurons=3, seed=0) -> tuple[pd.DataFrame, np.ndarray]:
    """A trace of windows that end at these steps, and the samples that it is of, (steps · per_step, neurons)."""
    samples = np.random.default_rng(seed).normal(5, 2, size=(per_step * max(ends), neurons))
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = samples[per_step * start : per_step * end]
        for neuron in range(neurons):
            values = part[:, neuron]
            rows.append([end, "fc", neuron, values.mean(), values.var(ddof=1), len(values)])
    return pd.DataFrame(rows, columns=["step", "group", "neuron", "mean", "variance", "count"]), samples


@settings(deadline=None, max_examples=50)
@given(st.integers(3, 12), st.integers(2, 12), st.integers(0, 40))
def test_merged_windows_are_the_moments_of_their_samples(every, epoch, event):
    ends = [step for step in range(1, 41) if step % every == 0 or step % epoch == 0]
    trace, samples = windows(ends)
    merged = trace_figures.whole_windows(trace, [{"step": event}])
    kept = sorted(set(merged["step"]))
    assert set(kept) <= set(ends) and kept[-1] == ends[-1]
    last_before = [end for end in ends if end <= event][-1:]
    assert set(last_before) <= set(kept), "no window reaches across an event that ended one"
    for start, end in zip([0, *kept], kept, strict=False):
        part, rows = samples[4 * start : 4 * end], merged[merged["step"] == end].sort_values("neuron")
        np.testing.assert_allclose(rows["mean"], part.mean(0))
        np.testing.assert_allclose(rows["variance"], part.var(0, ddof=1))
        assert (rows["count"] == len(part)).all()
    widest = np.diff(ends, prepend=0).max()
    allowed = {*last_before, ends[-1]}
    assert all(end - start >= widest / 2 or end in allowed for start, end in zip([0, *kept], kept, strict=False))


def test_regular_windows_stay_as_they_are():
    trace, _ = windows([10, 20, 30])
    assert trace_figures.whole_windows(trace, []) is trace


@pytest.fixture
def run() -> tuple[pd.DataFrame, list[dict]]:
    event = prune_event(config(sparsity=0.25))
    later = {"step": EVENT + 500, "groups": [{**event["groups"][0], "removed": event["groups"][0]["kept"][:6]}]}
    return traces(event), [event, later]


def test_survival_shows_each_neuron_until_its_death(run):
    trace, events = run
    figure = figures.survival(trace, events)
    first, later = (set(event["groups"][0]["removed"]) for event in events)
    left, right = figure.axes[:2]
    edge = lines(left)["alive"].get_xydata().tolist()
    assert edge == [[0, 48], [EVENT, 36], [EVENT + 500, 30], [STEPS, 30]]
    cells = left.collections[0].get_array()
    wide = trace[trace["group"] == "fc1"].pivot(index="neuron", columns="step", values="variance")
    assert cells.shape == wide.shape
    lived = (~np.ma.getmaskarray(cells)).sum(1)
    windows = {EVENT: EVENT // 100, EVENT + 500: (EVENT + 500) // 100, None: STEPS // 100}
    assert lived.tolist() == [windows[None]] * 30 + [windows[EVENT + 500]] * 6 + [windows[EVENT]] * 12
    rows = {tuple(row.compressed()) for row in cells}
    until = {**dict.fromkeys(later, EVENT + 500), **dict.fromkeys(first, EVENT)}
    theirs = {tuple(wide.loc[neuron].loc[: until.get(neuron, STEPS)].dropna()) for neuron in wide.index}
    assert rows == theirs, "a row is one neuron's own trace"
    dots = {tuple(dot) for dot in right.lines[0].get_xydata().astype(int)}
    assert dots == {(EVENT, neuron) for neuron in first} | {(EVENT + 500, neuron) for neuron in later}
    assert left.get_title() == "fc1: 48 to 30 neurons"


def test_survival_has_a_row_of_panels_a_group_however_many():
    frames, groups = [], []
    for index in range(7):
        frames += [
            pd.DataFrame(
                {"step": [5, 9], "group": f"g{index}", "neuron": 0, "mean": 0.0, "variance": [1.0, 2.0], "count": 9}
            )
        ]
        groups += [{"name": f"g{index}", "removed": [1], "kept": [0]}]  # neuron 1 went before its first window
    figure = figures.survival(pd.concat(frames, ignore_index=True), [{"step": 4, "groups": groups}])
    shown = [axes.get_title() for axes in figure.axes if axes.get_visible() and axes.get_title()]
    assert sorted(shown) == [f"g{index}: 2 to 1 neurons" for index in range(7)]
    figure.draw_without_rendering()


def test_stability_is_scipys_spearman_and_the_share_found(run):
    trace, events = run
    found = trace_figures.stability(trace, events)
    assert found["step"].max() == EVENT and set(found["group"]) == set(WIDTHS)
    wide = trace[trace["group"] == "fc1"].pivot(index="step", columns="neuron", values="variance").loc[:EVENT]
    removed = set(events[0]["groups"][0]["removed"]) | set(events[1]["groups"][0]["removed"])
    mine = found[found["group"] == "fc1"].set_index("step")
    for step, scores in wide.iterrows():
        assert mine.loc[step, "correlation"] == pytest.approx(stats.spearmanr(scores, wide.loc[EVENT]).statistic)
        least = set(np.argsort(scores.to_numpy())[: len(removed)])
        assert mine.loc[step, "overlap"] == pytest.approx(100 * len(least & removed) / len(removed))
    assert mine.loc[EVENT, "correlation"] == pytest.approx(1)
    figure = figures.rank_stability(trace, events)
    np.testing.assert_allclose(lines(figure.axes[1])["fc1"].get_ydata(), mine["overlap"])
    assert f"first event, step {EVENT}" in text(figure)


def test_equal_variances_have_no_ranking():
    trace = pd.DataFrame(
        {"step": [1, 1, 2, 2], "group": "fc", "neuron": [0, 1] * 2, "mean": 0.0, "variance": [0, 0, 1, 2], "count": 9}
    )
    event = {"step": 2, "groups": [{"name": "fc", "removed": [0], "kept": [1]}]}
    assert np.isnan(trace_figures.stability(trace, [event])["correlation"].iloc[0])
    figures.rank_stability(trace, [event]).draw_without_rendering()
    figures.survival(trace, [event]).draw_without_rendering()


@pytest.mark.parametrize("function", [figures.survival, figures.rank_stability])
def test_what_can_not_be_drawn_is_told(function, run):
    trace, events = run
    with pytest.raises(ResultsError, match="trace is empty"):
        function(trace[:0], events)
    with pytest.raises(ResultsError, match="no neuron was removed"):
        function(trace, [])
    with pytest.raises(ResultsError, match="no window before the first event, at step 50"):
        figures.rank_stability(trace, [{**events[0], "step": 50}])
