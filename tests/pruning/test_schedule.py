"""The laws of schedules: events fall where they should, targets only rise, the last is what was asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tnvp.pruning.errors import PruningError
from tnvp.pruning.schedule import Cubic, Iterative

few = settings(max_examples=60, deadline=None, derandomize=True)
sparsities = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 0.95])


def events(schedule, steps: int) -> dict[int, float]:
    return {step: target for step in range(steps) if (target := schedule.target(step)) is not None}


@few
@given(sparsity=sparsities, start=st.integers(0, 20), length=st.integers(1, 60), every=st.integers(1, 70))
def test_cubic_rises_to_the_sparsity_at_its_end_and_then_rests(sparsity, start, length, every):
    found = events(Cubic(sparsity, start, start + length, every), start + length + 50)
    expected = sorted({*range(start + every, start + length, every), start + length})
    assert list(found) == expected
    targets = list(found.values())
    assert targets == sorted(set(targets)) and targets[0] > 0
    assert targets[-1] == sparsity


def test_cubic_is_the_published_formula():
    found = events(Cubic(0.8, 10, 50, 10), 100)
    assert found == pytest.approx({20: 0.8 * (1 - 0.75**3), 30: 0.8 * (1 - 0.5**3), 40: 0.8 * (1 - 0.25**3), 50: 0.8})


@few
@given(sparsity=sparsities, start=st.integers(0, 20), every=st.integers(1, 9), number=st.integers(1, 7))
def test_iterative_takes_equal_steps_to_exactly_the_sparsity(sparsity, start, every, number):
    found = events(Iterative(sparsity, start, every, number), start + every * number + 20)
    assert list(found) == [start + i * every for i in range(number)]
    targets = list(found.values())
    assert targets == pytest.approx([sparsity * (i + 1) / number for i in range(number)])
    assert targets[-1] == sparsity, "not nearly: 0.7 of 5 neurons rounds to 4, a hair less to 3"


def test_one_shot_is_one_event():
    assert events(Iterative(0.6, start=5), 50) == {5: 0.6}


BAD = {
    "ends before it starts": lambda: Cubic(0.5, 10, 10, 1),
    "starts before 0": lambda: Cubic(0.5, -1, 10, 1),
    "every 0 steps": lambda: Cubic(0.5, 0, 10, 0),
    "sparsity in percent": lambda: Cubic(50, 0, 10, 1),
    "sparsity NaN": lambda: Cubic(float("nan"), 0, 10, 1),
    "iterative, sparsity in percent": lambda: Iterative(50, 0),
    "iterative, every 0 steps": lambda: Iterative(0.5, 0, every=0),
    "iterative, no events": lambda: Iterative(0.5, 0, events=0),
    "iterative, starts before 0": lambda: Iterative(0.5, -1),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_a_schedule_that_could_never_work_is_refused_at_once(make):
    with pytest.raises(PruningError):
        make()
