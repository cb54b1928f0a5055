"""Torn and bit-flipped files: what is before the damage is read, or the file is named; other runs are not touched by it."""

import shutil
import warnings
from collections import Counter
from itertools import product

import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tnvp import figures, results
from tnvp.results import ResultsError, RunDirectory

from .test_results import config, write_run, write_tree

READERS = {
    "config.yaml": lambda run: run.config,
    "environment.json": lambda run: run.environment,
    "summary.json": lambda run: run.summary,
    "metrics.jsonl": lambda run: run.metrics(),
    "events.jsonl": lambda run: run.events(),
    "traces.parquet": lambda run: run.traces(),
}
KINDS = ["cut", "flip", "zeros", "noise"]
DAMAGE = st.tuples(st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
SETTINGS = dict(deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip


def damaged(whole: bytes, damage: tuple[str, float, int]) -> bytes:
    kind, where, bit = damage
    place = int(where * len(whole))
    if kind == "cut":
        return whole[:place]
    if kind == "flip":
        return whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
    if kind == "zeros":
        return whole[:place] + bytes(len(whole[place : place + 64])) + whole[place + 64 :]
    return (
        whole[:place]
        + bytes((i * 151 + bit) % 256 for i in range(len(whole[place : place + 16])))
        + whole[place + 16 :]
    )


def same(one, other) -> bool:
    if isinstance(one, pd.DataFrame):
        return one.empty or one.dropna(axis=1, how="all").equals(other[one.columns].dropna(axis=1, how="all"))
    return repr(one) == repr(other)


def files_of(run: RunDirectory, name: str) -> list:
    """The file of that name; of a folder, its parts."""
    path = run.path / name
    return sorted(path.iterdir()) if path.is_dir() else [path]


def read_damaged(run: RunDirectory, name: str, damage) -> str:
    """Damages one file, reads it by its method, mends it; returns "read", "warned" or "refused"."""
    path = files_of(run, name)[-1]
    whole, before = path.read_bytes(), READERS[name](run)
    path.write_bytes(torn := damaged(whole, damage))
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = READERS[name](run)
    except ResultsError as error:
        assert name in str(error) and str(run.path) in str(error)
        return "refused"
    finally:
        path.write_bytes(whole)
    if name == "traces.parquet":
        assert same(found, before)  # its pages have checksums
    if name.endswith(".jsonl"):
        assert len(found) <= len(before)
        if damage[0] == "cut":
            assert same(found, before[: len(found)])
            assert told or not torn or torn.endswith((b"\n", b"}"))
    assert all(name in str(warning.message) for warning in told)
    return "warned" if told else "read"


def tear(run: RunDirectory, examples: int) -> Counter:
    seen = Counter()
    for name in READERS:

        @settings(max_examples=examples, **SETTINGS)
        @given(st.just(name), DAMAGE)
        def law(name, damage):
            seen[name, read_damaged(run, name, damage)] += 1

        law()
    return seen


def test_a_damaged_file_is_read_up_to_the_damage_or_named(tmp_path):
    run, seen = write_run(tmp_path / "run", config()), Counter()
    for name, kind, where in product(READERS, KINDS, (0.1, 0.6, 0.97)):
        seen[name, read_damaged(run, name, (kind, where, 3))] += 1
    assert all(seen[name, "refused"] + seen[name, "warned"] > 2 for name in READERS)
    assert seen["metrics.jsonl", "warned"] and seen["metrics.jsonl", "refused"]


@pytest.mark.slow
def test_thousands_of_damaged_files_are_read_up_to_the_damage_or_named(tmp_path):
    seen = tear(write_run(tmp_path / "run", config()), 1000)
    print(dict(seen))
    assert sum(seen.values()) > 3000


def table_beside_a_damaged_run(root, examples: int) -> Counter:
    """The law of a tree: the good run's row stays as it was, and a bad run that is left out is named."""
    _, bad = (write_run(root / name, config(seed=seed), streams=False) for seed, name in enumerate(("good", "bad")))
    before, seen = results.table(root), Counter()

    @settings(max_examples=examples, **SETTINGS)
    @given(st.sampled_from(["config.yaml", "summary.json"]), DAMAGE)
    def law(name, damage):
        path = bad.path / name
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, damage))
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                table = results.table(root)
                assert "mlp" in results.describe(table)
        finally:
            path.write_bytes(whole)
        (row,) = table[table["run"] == "good"].to_dict("records")
        assert {key: row[key] for key in results.SUMMARY} == before.query("run == 'good'")[
            list(results.SUMMARY)
        ].to_dict("records")[0]
        left_out = "bad" not in set(table["run"])
        assert left_out == any(
            "damaged run(s) left out" in str(w.message) and str(path) in str(w.message) for w in told
        )
        seen["left out" if left_out else "read"] += 1

    law()
    return seen


def test_the_table_has_the_good_runs_whatever_becomes_of_a_bad_one(tmp_path):
    assert table_beside_a_damaged_run(tmp_path, 20)["left out"] > 10


@pytest.mark.slow
def test_the_table_bears_a_thousand_damages(tmp_path):
    print(dict(table_beside_a_damaged_run(tmp_path, 1000)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"test_accuracy": 190.5}, "test_accuracy is 190.5"),
        ({"neuron_sparsity": -0.25}, "neuron_sparsity is -0.25"),
        ({"parameters": "many"}, "parameters is 'many'"),
        ({"seed": 7}, "config.seed is 0"),
    ],
)
def test_numbers_that_no_run_can_have_are_noticed(change, named, tmp_path):
    write_run(tmp_path / "good", config(), streams=False)
    write_run(tmp_path / "bad", config(), streams=False, **change)
    with pytest.warns(UserWarning, match=f"1 damaged.*bad.*{named}"):
        assert list(results.table(tmp_path)["run"]) == ["good"]
    shutil.rmtree(tmp_path / "good")
    with pytest.raises(ResultsError, match=named):
        results.table(tmp_path)


def damage_published(root, examples: int) -> Counter:
    """The law of a published table: it is read, or its name is in a ResultsError."""
    path, seen = root / "results.csv", Counter()
    results.publish(results.table(write_tree(root / "runs", ["l1"], [0.3], seeds=2)), path)
    whole = path.read_bytes()

    @settings(max_examples=examples, **SETTINGS)
    @given(DAMAGE)
    @example(("cut", 0.8244246943509389, 0))  # in the last row, before the name of its data set
    @example(("cut", 0.99, 0))
    def law(damage):
        path.write_bytes(damaged(whole, damage))
        try:
            results.describe(results.published(path))
            seen["read"] += 1
        except ResultsError as error:
            assert "results.csv" in str(error)
            seen["refused"] += 1

    law()
    return seen


def test_a_damaged_published_table_is_read_or_named(tmp_path):
    assert damage_published(tmp_path, 20)["refused"] > 10


@pytest.mark.slow
def test_five_hundred_damages_of_a_published_table_are_read_or_named(tmp_path):
    print(dict(damage_published(tmp_path, 500)))


def test_the_commands_give_the_good_runs_and_name_the_bad(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda _, path: drawn.append(path.name) or [path])  # files take a minute
    root = write_tree(tmp_path / "runs", ["l1", "variance"], [0.5], seeds=1)
    (root / "l1-0.5-0" / "events.jsonl").write_text('{"step": 1}\n')
    (root / "torn").mkdir()
    for name in ("config.yaml", "summary.json"):
        (root / "torn" / name).write_bytes((root / "l1-0.5-0" / name).read_bytes()[:40])
    with pytest.warns(UserWarning, match=r"1 damaged run.*torn"):
        assert results.main([str(root)]) == 0
    assert "variance" in capsys.readouterr().out
    with pytest.warns(UserWarning) as told:
        assert figures.main([str(root), "--out", str(tmp_path / "figures")]) == 0
    messages = " ".join(str(warning.message) for warning in told)
    assert "no figures of the run l1-0.5-0" in messages and "torn" in messages
    assert {"accuracy", "trace", "curves"} <= {name.partition("-")[0] for name in drawn}
