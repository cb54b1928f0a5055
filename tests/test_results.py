"""Runs come back as they were written; means and intervals are pandas' and scipy's; bad files are named."""

import importlib.util
import json
import math
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tnvp import results, run_directory
from tnvp.results import ResultsError, RunDirectory

STEPS, EVENT, WIDTHS = 2000, 1000, {"fc1": 48, "fc2": 24}


def config(criterion="variance", sparsity=0.5, seed=0, **changes) -> dict:
    """A resolved config; `changes` are dotted names, dots written as two underscores."""
    whole = {
        "study": "default",
        "name": None,
        "seed": seed,
        "device": "auto",
        "batch_size": 128,
        "runs": "runs",
        "dataset": {"name": "mnist", "root": "data", "mean": None},
        "model": {"name": "mlp", "widths": [48, 24], "batch_norm": True},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "pruning": {
            "name": "one_shot",
            "criterion": criterion,
            "compensation": "mean",
            "sparsity": sparsity,
            "dense_epochs": 5,
            "finetune_epochs": 5,
            "trace_every": 100,
        },
        "tracking": {"name": "wandb", "mode": "offline"},
    }
    for name, value in changes.items():
        group, _, field = name.rpartition("__")
        (whole[group] if group else whole)[field] = value
    return whole


def summary(whole: dict, **changes) -> dict:
    """A plausible summary: accuracy falls with sparsity, less so for variance criteria; seeds scatter."""
    pruning, seed = whole["pruning"], whole["seed"]
    name, sparsity = pruning.get("criterion"), pruning.get("sparsity", 0.0)
    noise = np.random.default_rng([seed, int(100 * sparsity), *(name or "none").encode()]).normal(size=3)
    loss = {"random": 60, "l1": 40, "l2": 35}.get(name, 12 + sum((name or "").encode()) % 20) * sparsity**3
    dense = 97.8 + 0.1 * np.random.default_rng(seed).normal()
    return {
        "test_accuracy_dense": dense,
        "test_accuracy_pruned": dense - loss + noise[0] * (0.1 + loss / 15),
        "test_accuracy": dense - 0.06 * loss + 0.12 * noise[1],
        "neuron_sparsity": round(72 * sparsity) / 72,
        "parameter_sparsity": sparsity,
        "flops_reduction": sparsity,
        "parameters": int(40000 * (1 - sparsity)),
        "flops": int(80000 * (1 - sparsity)),
        "training_flops": int(80000 * 500 * (1 - sparsity / 2)),
        "bytes": 160000,
        "widths": "-".join(str(round(width * (1 - sparsity))) for width in WIDTHS.values()),
        "seconds": 31.5,
        "criterion": name,
        "compensation": pruning.get("compensation"),
        "seed": seed,
        "study": whole["study"],
        "config_hash": f"c{seed}{name}{sparsity}",
        "trunk_hash": f"t{seed}",
        "commit": "0123456789abcdef",
        "hardware": "some CPU",
        **changes,
    }


def prune_event(whole: dict) -> dict:
    order = np.random.default_rng(whole["seed"]).permutation
    groups = []
    for name, width in WIDTHS.items():
        removed = sorted(order(width)[: round(width * whole["pruning"]["sparsity"])].tolist())
        kept = sorted(set(range(width)) - set(removed))
        groups.append(
            {
                "name": name,
                "removed": removed,
                "kept": kept,
                "threshold": 0.1,
                "width_before": width,
                "width_after": len(kept),
            }
        )
    pruning = whole["pruning"]
    return {
        "step": EVENT,
        "epoch": 5.0,
        "criterion": pruning["criterion"],
        "compensation": "mean",
        "requested": {"sparsity": pruning["sparsity"]},
        "neuron_sparsity": pruning["sparsity"],
        "accuracy_before": 97.0,
        "accuracy_after": math.nan,
        "groups": groups,
    }


def traces(event: dict) -> pd.DataFrame:
    rng, frames = np.random.default_rng(0), []
    for group in event["groups"]:
        neurons = np.arange(group["width_before"])
        level = 10 ** np.where(
            np.isin(neurons, group["removed"]), rng.normal(-2.5, 0.4, len(neurons)), rng.normal(-0.5, 0.5, len(neurons))
        )
        for step in range(100, STEPS + 1, 100):
            alive = neurons if step <= EVENT else np.array(group["kept"])
            variance = level[alive] * (1 - np.exp(-step / 400)) * 10 ** rng.normal(0, 0.05, len(alive))
            frames.append(
                pd.DataFrame(
                    {
                        "step": step,
                        "group": group["name"],
                        "neuron": alive,
                        "mean": 0.1,
                        "variance": variance,
                        "count": step * 128,
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def write_run(path: Path, whole: dict, streams: bool = True, finish: bool = True, **changes) -> RunDirectory:
    """One run written as an experiment would; `changes` go to the summary."""
    run = RunDirectory.create(path)
    run.write_config(whole)
    run.write_environment({"commit": None, "seed": whole["seed"]})
    event = prune_event(whole) if {"criterion", "sparsity"} <= whole["pruning"].keys() else None
    for step in range(20, STEPS + 1, 20) if streams else ():
        pruned = event is not None and step > EVENT
        fall = math.exp(-step / 300) + (0.4 * math.exp(-(step - EVENT) / 100) if pruned else 0)
        record = {
            "step": step,
            "epoch": step / 200,
            "phase": "dense" if step <= EVENT else "finetune",
            "train/loss": 0.05 + 2.2 * fall + 0.02 * (step % 7),
            "train/accuracy": 99 - 85 * fall - step % 3,
            "learning_rate": 0.1,
        }
        if step % 200 == 0:
            widths = {g["name"]: g["width_after"] for g in event["groups"]} if pruned else WIDTHS
            record |= {f"widths/{name}": width for name, width in widths.items()}
            record |= {"validation/loss": 0.1 + 2.2 * fall, "validation/accuracy": 97.5 - 85 * fall}
        run.log(record)
    if streams and event:
        run.event(event)
        run.write_traces(traces(event))
    if finish:
        run.write_summary(summary(whole, **changes))
    return run


def write_tree(root: Path, criteria=("variance", "l1"), sparsities=(0.3, 0.6), seeds=3, **changes) -> Path:
    """A sweep; streams for its first seed only, to be quick."""
    for criterion in criteria:
        for sparsity in sparsities:
            for seed in range(seeds):
                whole = config(criterion, sparsity, seed, **changes)
                write_run(root / f"{criterion}-{sparsity}-{seed}", whole, streams=seed == 0)
    return root


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return write_run(tmp_path / "run", config())


def test_a_run_comes_back_as_it_was_written(run):
    event = prune_event(config())
    assert run.is_complete and RunDirectory.open(run.path).config == config()
    assert run.summary == summary(config())
    assert run.events() == [{**event, "accuracy_after": None}]  # NaN is no JSON
    pd.testing.assert_frame_equal(run.traces(), traces(event), check_dtype=False)
    metrics = run.metrics()
    assert len(metrics) == STEPS // 20 and metrics["validation/loss"].notna().sum() == STEPS // 200
    assert metrics["widths/fc1"].iloc[-1] == 24 and set(metrics["phase"]) == {"dense", "finetune"}


def test_every_file_is_strict_json_and_nothing_is_left_beside(run):
    run.log({"step": np.int64(3), "a": np.float32("inf"), "b": np.array([1.0, math.nan]), "path": Path("x")})

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    for path in run.path.glob("*.json*"):
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=no_constant)
    assert json.loads(run.metrics_path.read_text().splitlines()[-1]) == {
        "step": 3,
        "a": None,
        "b": [1.0, None],
        "path": "x",
    }
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.none() | st.booleans() | st.text() | NUMBERS


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), PLAIN | st.lists(PLAIN, max_size=3), max_size=4))
def test_any_record_survives_the_line_it_is_written_on(tmp_path_factory, record):
    run = RunDirectory.create(tmp_path_factory.mktemp("run"))
    run.event(first := {**record, "step": 1, "groups": []})
    run.event(second := {"step": 2, "groups": []})
    assert run.events() == [first, second]


def test_what_has_no_place_in_a_file_is_named(tmp_path):
    run = RunDirectory.create(tmp_path)
    with pytest.raises(ResultsError, match=r"metrics\.jsonl\.loss.*complex"):
        run.log({"step": 1, "loss": 1j})
    with pytest.raises(ResultsError, match='needs its "step"'):
        run.event({"epoch": 1})
    with pytest.raises(ResultsError, match=r"lack the columns.*'count'"):
        run.write_traces(pd.DataFrame({"step": [1]}))
    assert not any(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(run):
    before = run.summary_path.read_bytes()

    def fail(file):
        file.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run_directory.write_atomically(run.summary_path, fail)
    assert run.summary_path.read_bytes() == before and len(list(run.path.glob(".*"))) == 0


@pytest.mark.parametrize("torn", [b'{"step": 7, "train/lo', b'{"step": 7, "name": "\xc3', b"{", b"12"])
def test_a_torn_last_line_is_left_out_and_gone_after_the_next_record(run, torn):
    whole = run.metrics()
    with open(run.metrics_path, "ab") as file:
        file.write(torn)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 101.*torn"):
        pd.testing.assert_frame_equal(run.metrics(), whole)
    with pytest.warns(UserWarning, match="torn"):
        run.log({"step": 2020})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(run.metrics()["step"]) == [*whole["step"], 2020]


def test_a_torn_line_in_the_middle_is_an_error_that_names_file_and_line(run):
    lines = run.metrics_path.read_bytes().split(b"\n")
    lines[41] = lines[41][:9]
    run.metrics_path.write_bytes(b"\n".join(lines))
    with pytest.raises(ResultsError, match=r"metrics\.jsonl, line 42 is torn"):
        run.metrics()


def test_a_resumed_run_holds_no_record_twice(run):
    whole, events, traces = run.metrics(), run.events(), run.traces()
    position = run.position()
    run.log({"step": STEPS})  # at the step of the record before it
    run.event({"step": STEPS})
    run.write_traces(traces)
    assert run.trouble(position) == ""
    end, digest = position["metrics.jsonl"]
    assert (
        run.trouble({**position, "metrics.jsonl": [10**9, digest]})
        == "records from before it are missing, in metrics.jsonl"
    )
    assert (
        run.trouble({**position, "metrics.jsonl": [end - 1, digest]})
        == "records from before it are damaged, in metrics.jsonl"
    )
    run.cut_back(position)
    pd.testing.assert_frame_equal(run.metrics(), whole)
    pd.testing.assert_frame_equal(run.traces(), traces)
    assert run.events() == events and run.position() == position


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "traces.parquet"])
def test_a_changed_bit_of_what_was_written_is_noticed(name, run):
    position, path = run.position(), run.path / name
    path = next(path.iterdir()) if path.is_dir() else path
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    assert RunDirectory(run.path).trouble(position) == f"records from before it are damaged, in {name}"
    path.write_bytes(whole)
    assert RunDirectory(run.path).trouble(position) == ""


def test_positions_of_a_long_run_read_every_record_once(tmp_path, monkeypatch):
    read, real = [], run_directory.Digest.add
    monkeypatch.setattr(run_directory.Digest, "add", lambda *a: read.append(len(a[1])) or real(*a))
    monkeypatch.setattr(run_directory, "CHUNK", 1000)
    run = RunDirectory.create(tmp_path)
    for step in range(200):
        run.log({"step": step, "train/loss": 0.5})
        if step % 50 == 0:
            run.write_traces(pd.DataFrame([[step, "fc1", 0, 0.0, 1.0, 9]], columns=run_directory.TRACE_COLUMNS))
        position = run.position()
    parts = sorted(run.traces_path.iterdir())
    assert len(parts) == 4 and sum(read) == sum(path.stat().st_size for path in (run.metrics_path, *parts))
    assert RunDirectory(tmp_path).trouble(position) == "", "whatever the pieces it was read in"


def test_a_trace_is_read_in_parts_by_column_and_group_and_as_one_folder(run):
    whole = run.traces()
    half = len(whole) // 2
    run.cut_back({**run.position(), "traces.parquet": [0, ""]})
    assert run.traces().empty
    for part in (whole[:half], whole[half:]):
        run.write_traces(part)
    pd.testing.assert_frame_equal(run.traces(), whole)
    pd.testing.assert_frame_equal(pd.read_parquet(run.traces_path), whole)
    group = whole["group"].iloc[-1]
    expected = whole[whole["group"] == group][["step", "variance"]].reset_index(drop=True)
    pd.testing.assert_frame_equal(run.traces(columns=["step", "variance"], groups=[group]), expected)
    assert 0 < len(expected) < len(whole)


@pytest.mark.slow
def test_of_a_million_rows_of_a_trace_no_more_is_held_than_was_asked_for(tmp_path):
    """In ten parts, as a run writes them; twenty groups. What counts is the peak of what pyarrow allocates while it reads."""
    import pyarrow

    run, names = RunDirectory.create(tmp_path / "run"), [f"layer{n}" for n in range(20)]
    for part in range(10):
        steps, groups, neurons = np.meshgrid(np.arange(100) + 100 * part, names, np.arange(50), indexing="ij")
        values = np.random.default_rng(part).normal(size=(2, steps.size))
        columns = (steps.ravel(), groups.ravel(), neurons.ravel(), *values, steps.ravel())
        run.write_traces(pd.DataFrame(dict(zip(run_directory.TRACE_COLUMNS, columns, strict=True))))

    def read(**asked) -> tuple[int, int]:
        return len(run.traces(**asked)), pool.max_memory()

    before, pool = pyarrow.default_memory_pool(), pyarrow.system_memory_pool()
    assert pool.max_memory() == 0, (
        "the peak is that of the process: nothing else may have used this pool, and the smallest comes first"
    )
    pyarrow.set_memory_pool(pool)
    try:
        (group, for_group), (column, for_column), (whole, for_all) = (
            read(groups=["layer7"]),
            read(columns=["step"]),
            read(),
        )
    finally:
        pyarrow.set_memory_pool(before)
    assert (group, column, whole) == (50_000, 1_000_000, 1_000_000)
    print(
        f"MB at most: {for_group / 1e6:.1f} a group of 20, {for_column / 1e6:.1f} a column of 6, {for_all / 1e6:.1f} all"
    )
    assert for_group < for_all / 4 and for_column < for_all / 3


def test_the_one_file_of_an_old_trace_is_read(run):
    whole = run.traces()
    run.cut_back({**run.position(), "traces.parquet": [0, ""]})
    run.traces_path.rmdir()
    whole.to_parquet(run.traces_path, index=False)
    pd.testing.assert_frame_equal(run.traces(), whole)


def test_streams_of_a_run_just_begun_are_empty(tmp_path):
    run = RunDirectory.create(tmp_path / "new")
    assert run.events() == [] and run.metrics().empty and run.traces().empty and not run.is_complete
    with pytest.raises(ResultsError, match=r"summary\.json is missing"):
        _ = run.summary
    with pytest.raises(ResultsError, match="no run directory at"):
        RunDirectory.open(tmp_path / "none")


def test_a_complete_run_is_neither_overwritten_nor_deleted(run):
    with pytest.raises(ResultsError, match="holds a complete run"):
        RunDirectory.create(run.path)
    for number in (1, 2):
        new = RunDirectory.create(run.path, aside=True)
        assert not any(new.path.iterdir())
        assert RunDirectory.open(run.path.with_name(f"run.old-{number}")).is_complete
        new.write_summary({})
    unfinished = write_run(run.path.with_name("other"), config(), finish=False)
    assert len(RunDirectory.create(unfinished.path).metrics()) == len(unfinished.metrics())


def test_the_table_of_a_mixed_tree(tmp_path):
    write_tree(tmp_path / "b", ["l1"], [0.5], seeds=2)
    other = config("variance", 0.3, model__widths=[8], optimizer__lr=1)
    write_run(tmp_path / "a" / "tnvp", other, streams=False)
    write_run(tmp_path / "a" / "unfinished", config(), finish=False)
    write_run(tmp_path / "b" / "wandb" / "copy", config())
    write_run(tmp_path / "b" / ".hidden" / "copy", config())
    RunDirectory.create(tmp_path / "b" / "l1-0.5-0", aside=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("seed: 0")
    with pytest.warns(UserWarning, match=r"1 unfinished run.*unfinished$"):
        table = results.table(tmp_path)
    assert list(table["run"]) == ["a/tnvp", "b/l1-0.5-1"]
    names = list(table)
    first = ["run", *run_directory.SUMMARY]
    assert names[: len(first)] == first and names[len(first) :] == sorted(names[len(first) :])
    assert list(table["config.model.widths"]) == ["[8]", "[48, 24]"]
    assert list(table["config.optimizer.lr"]) == [1, 0.1]
    dtypes = {
        "run": "string",
        "config.optimizer.lr": "float64",
        "config.seed": "Int64",
        "config.model.batch_norm": "boolean",
        "config.name": "string",
    }
    assert {name: str(table[name].dtype) for name in dtypes} == dtypes


def test_summary_dtypes_hold_without_values(tmp_path):
    write_run(tmp_path / "run", config(), streams=False, test_accuracy=math.nan, flops=None, hardware=None)
    table = results.table(tmp_path)
    assert {name: str(table[name].dtype) for name in run_directory.SUMMARY} == run_directory.SUMMARY
    assert table[["test_accuracy", "flops", "hardware"]].isna().all(axis=None)
    assert results.table(tmp_path / "run")["run"].item() == "."


def test_an_empty_tree_says_how_to_fill_it(tmp_path):
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ResultsError, match=f"no finished run under {root}.*python run.py runs="):
            results.table(root)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=2, max_size=9))
def test_interval_is_the_t_interval_of_scipy(values):
    n, mean, half = results.interval(pd.DataFrame({"seed": range(len(values)), "x": values}), "x")
    assert n == len(values) and mean == pytest.approx(np.mean(values), abs=1e-9)
    if np.std(values) > 1e-9:
        low, high = stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=stats.sem(values))
        assert (mean - half, mean + half) == pytest.approx((low, high), abs=1e-6)


def test_interval_counts_seeds_not_rows_and_skips_gaps():
    rows = pd.DataFrame({"seed": [0, 0, 1, 2], "x": [1.0, 3.0, 4.0, math.nan]})  # 0 ran twice, 2 has no value
    assert results.interval(rows, "x")[:2] == (2, 3.0)
    one = results.interval(rows[rows["seed"] == 1], "x")
    assert one[:2] == (1, 4.0) and math.isnan(one.half)
    none = results.interval(rows[rows["seed"] == 2], "x")
    assert none.n == 0 and math.isnan(none.mean) and math.isnan(none.half)


def test_seeds_are_never_averaged_across_settings(tmp_path):
    different = [
        {},
        {"optimizer__lr": 0.01},
        {"model__widths": [9]},
        {"study": "other"},
        {"pruning__compensation": "none"},
    ]
    for seed in range(2):
        for place, changes in enumerate(different):
            whole = config(seed=seed, device=f"cuda:{seed}", **changes)
            write_run(tmp_path / f"{place}-{seed}", whole, streams=False)
    table = results.table(tmp_path)
    parts = results.by_setting(table)
    assert len(parts) == 5 and all(len(rows) == 2 for rows in parts.values())
    assert "mnist, mlp, one_shot, compensation none" in parts
    assert any("optimizer.lr=0.01" in name for name in parts)
    assert (results.aggregate(table)["test_accuracy_n"] == 2).all()


def test_aggregate_equals_pandas_by_hand(tmp_path):
    table = results.table(write_tree(tmp_path, seeds=3))
    means = results.aggregate(table).set_index(["criterion", "requested"])
    by_hand = table.groupby(["criterion", "config.pruning.sparsity"])["test_accuracy"]
    assert means["test_accuracy"].to_dict() == pytest.approx(by_hand.mean().to_dict())
    halves = stats.t.ppf(0.975, 2) * by_hand.std() / math.sqrt(3)
    assert means["test_accuracy_half"].to_dict() == pytest.approx(halves.to_dict())


def test_the_command_prints_means_and_writes_the_table(tmp_path, capsys):
    write_tree(tmp_path / "runs", ["variance"], [0.5], seeds=2)
    unpruned = {**config(), "pruning": {"name": "none", "epochs": 3}}
    write_run(tmp_path / "runs" / "dense", unpruned, streams=False, test_accuracy_pruned=None)
    assert results.main([str(tmp_path / "runs"), "--csv", str(tmp_path / "new" / "table.csv")]) == 0
    text = capsys.readouterr().out
    assert "mnist, mlp, one_shot, compensation mean" in text and "±" in text and "mnist, mlp, none" in text
    table = results.table(tmp_path / "runs")
    again = pd.read_csv(tmp_path / "new" / "table.csv")
    assert list(again) == [name for name in table if name not in results.MACHINE_PATHS]
    assert str(tmp_path) not in (tmp_path / "new" / "table.csv").read_text()
    pd.testing.assert_frame_equal(results.aggregate(again), results.aggregate(table), check_dtype=False)
    assert results.main([str(tmp_path / "nothing")]) == 2
    assert "no finished run" in capsys.readouterr().err


def test_environment_names_what_made_the_run():
    here = run_directory.environment("cpu", 3, "abc", "def")
    assert {"commit", "dirty", "device", "hardware", "seed", "config_hash", "trunk_hash"} <= set(here)
    assert set(here["versions"]) == {"python", "torch", "torchvision", "numpy", "hydra", "wandb", "tnvp"}
    assert here["versions"]["numpy"] == np.__version__ and here["hardware"] and here["cores"] >= 1


def test_environment_without_git_is_null(monkeypatch):
    monkeypatch.setenv("PATH", "")
    here = run_directory.environment("cpu", 0, "", "")
    assert here["commit"] is None and here["dirty"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_and_dirty_flag_follow_the_repository(tmp_path):
    """In a repository of its own: null while untracked, then the commit, clean and dirty."""
    module = tmp_path / "run_directory.py"
    module.write_text(Path(run_directory.__file__).read_text())
    spec = importlib.util.spec_from_file_location("elsewhere", module)
    elsewhere = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elsewhere)

    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    def ask():
        here = elsewhere.environment("cpu", 0, "", "")
        return here["commit"], here["dirty"]

    git("init")
    assert ask() == (None, None)
    git("add", "run_directory.py")
    git("-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-m", "m")
    commit, dirty = ask()
    assert len(commit) == 40 and dirty is False
    module.write_text(module.read_text() + "\n")
    assert ask() == (commit, True)


# Differences of two, seed by seed.


def test_paired_differences_are_scipys_over_the_seeds_that_have_both(tmp_path):
    table = results.table(write_tree(tmp_path, ("variance", "l1"), (0.3, 0.6), seeds=4))
    table = table[table["run"] != "l1-0.6-2"]
    found = results.paired(table, "variance", "l1").set_index("requested")
    for asked, seeds in ((0.3, [0, 1, 2, 3]), (0.6, [0, 1, 3])):
        rows = table[(table["config.pruning.sparsity"] == asked) & table["seed"].isin(seeds)].sort_values("seed")
        one, other = (rows[rows["criterion"] == name]["test_accuracy"].to_numpy() for name in ("variance", "l1"))
        low, high = stats.ttest_rel(one, other).confidence_interval()
        row = found.loc[asked]
        assert row["n"] == len(seeds) and row["difference"] == pytest.approx((low + high) / 2)
        assert row["half"] == pytest.approx((high - low) / 2)


def test_what_two_seeds_share_does_not_widen_their_difference(tmp_path):
    """The reason to pair: seeds differ by points, the methods by the same tenth on each."""
    for seed, level in enumerate([50.0, 70.0, 90.0]):
        for name, gain in (("variance", 0.5), ("l1", 0.0)):
            write_run(tmp_path / f"{name}{seed}", config(name, seed=seed), streams=False, test_accuracy=level + gain)
    (row,) = results.paired(results.table(tmp_path), "variance", "l1").itertuples()
    assert row.difference == pytest.approx(0.5) and row.half == pytest.approx(0, abs=1e-9)
    assert results.paired(results.table(tmp_path), "l1", "variance")["difference"][0] == pytest.approx(-0.5)


def test_other_columns_are_paired_too_each_criterion_apart(tmp_path, capsys):
    for criterion in ("variance", "l1"):
        for seed in range(3):
            for how, accuracy in (("affine", 95.0), ("mean", 90.0 + seed)):
                whole = config(criterion, seed=seed, pruning__compensation=how)
                path = tmp_path / "runs" / f"{criterion}{seed}{how}"
                write_run(path, whole, streams=False, test_accuracy=accuracy, compensation=how)
    runs = tmp_path / "runs"
    found = results.paired(results.table(runs), "affine", "mean", by="compensation")
    assert found[["criterion", "n", "difference"]].values.tolist() == [["l1", 3, 4.0], ["variance", 3, 4.0]]
    again = results.paired(results.table(runs), "affine", "mean", by="config.pruning.compensation")
    pd.testing.assert_frame_equal(found, again)
    assert results.main([str(runs), "--paired", "affine", "mean", "--by", "compensation"]) == 0
    assert "affine - mean, at the end" in (said := capsys.readouterr().out) and "4.00 ± 2.48" in said
    two = results.table(runs).query("seed < 2")
    assert "4.50" in (said := results.describe_paired(two, "affine", "mean", "compensation")) and "0 ± " not in said
    assert results.main([str(runs), "--csv", str(tmp_path / "all.csv")]) == 0
    assert results.main([str(tmp_path / "all.csv"), "--paired", "affine", "nonsense", "--by", "compensation"]) == 2
    assert "no run has compensation nonsense; there are affine, mean" in capsys.readouterr().err


def test_a_file_where_the_folder_of_the_trace_belongs_is_named(tmp_path):
    run = write_run(tmp_path / "a", config(), streams=False)
    run.traces_path.write_bytes(b"as another version wrote it")
    with pytest.raises(ResultsError, match=r"traces\.parquet is a file"):
        run.write_traces(pd.DataFrame(columns=run_directory.TRACE_COLUMNS))
    assert run.traces_path.read_bytes() == b"as another version wrote it"


# What a W&B server has.


def test_runs_of_a_server_make_the_same_table_as_their_directories(tmp_path, monkeypatch, capsys):
    root, runs = tmp_path / "runs", []
    for seed in range(3):
        whole = config(seed=seed)
        written = summary(whole)
        write_run(root / "default" / f"mine-{written['config_hash']}", whole, streams=False)
        stored = json.loads(json.dumps(written)) | {"_step": 7, "train/loss": 0.1}
        runs.append(SimpleNamespace(name="mine", job_type="one_shot", config=whole, summary=stored))
    unfinished = SimpleNamespace(name="broken", job_type="one_shot", config=config(), summary={"_step": 3})
    of_study = SimpleNamespace(name="s", job_type="summary", config={}, summary={"config_hash": "x", "study": "s"})
    asked = []

    class Api:
        def __init__(self, timeout):
            pass

        def runs(self, project, lazy):
            asked.append(project)
            return [*runs, unfinished, of_study]

    monkeypatch.setattr("wandb.Api", Api)
    pd.testing.assert_frame_equal(results.from_wandb("me/tnvp"), results.table(root))
    assert results.main(["export", "--from", "wandb", "me/tnvp", "--csv", str(tmp_path / "a.csv")]) == 0
    assert results.main(["export", str(root)]) == 0
    assert capsys.readouterr().out == (tmp_path / "a.csv").read_text() and asked == ["me/tnvp"] * 2


def test_a_server_that_can_not_be_read_is_told(monkeypatch, capsys):
    def fail(timeout):
        raise RuntimeError("no key")

    monkeypatch.setattr("wandb.Api", fail)
    assert results.main(["export", "--from", "wandb", "me/tnvp"]) == 2
    assert "the runs of me/tnvp can't be read from W&B (RuntimeError: no key)" in capsys.readouterr().err
