"""A study runs what is missing, goes on after a kill, publishes what it declared and draws the same figures again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from datetime import date
from pathlib import Path

import hydra
import matplotlib
import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

import run
from tests.processes import heeding_signals
from tests.test_tracking import of_kind, read_records
from tests.wandb_server import isolate
from tnvp import command_line, declaration, results, study
from tnvp.config import VERSION

PUBLISHED = [name for name in study.study_names() if study.read(name).table_path.exists()]
DRAWN_WITH = "3.11.2"  # matplotlib of the committed figures; pyproject.toml pins it for development
SWEEP = {"base": ["experiment=digits"], "axes": {"seed": [0, 1], "pruning.criterion": ["variance", "random"]}}
STUDY = {"question": "?", "figures": {"accuracy": "accuracy_vs_sparsity"}, "sweeps": [SWEEP]}


def declare(folder: Path, name: str = "mine", **changes) -> Path:
    path = folder / name / "study.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return path


@pytest.fixture
def smoke(tmp_path):
    """Commands on a copy of the study digits_smoke; returns the Popen arguments of one."""
    shutil.copytree(study.EXPERIMENTS / "digits_smoke", tmp_path / "experiments" / "digits_smoke")

    def command(action: str, *more: str) -> list[str]:
        common = [f"runs={tmp_path}/runs", "tracking=none", "--experiments", f"{tmp_path}/experiments"]
        return [sys.executable, "-m", "tnvp.study", action, "digits_smoke", *common, *more]

    return command


def finished(folder: Path) -> dict[str, int]:
    """When each run's summary was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("runs/digits_smoke/*/summary.json")}


def broken_off(command: list[str], folder: Path, runs: int, how: signal.Signals) -> int:
    """Start the study and end it after that many runs; returns its exit status."""
    process = heeding_signals(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(finished(folder)) < runs and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, how)
    return process.wait(timeout=60)


def test_a_study_is_interrupted_twice_goes_on_publishes_and_draws(smoke, tmp_path, capsys, monkeypatch):
    isolate(tmp_path / "home", monkeypatch)
    assert broken_off(smoke("run"), tmp_path, 1, signal.SIGKILL) == -signal.SIGKILL
    first = finished(tmp_path)
    assert 1 <= len(first) < 12
    declared, where = study.read("digits_smoke", tmp_path / "experiments"), [f"runs={tmp_path}/runs"]
    with pytest.raises(study.StudyError, match=f"{12 - len(first)} of 12 runs of digits_smoke are not finished"):
        study.publish(declared, where)
    assert not declared.table_path.exists()

    assert broken_off(smoke("run"), tmp_path, len(first) + 1, signal.SIGINT) == 130
    second = finished(tmp_path)
    assert len(first) < len(second) < 12

    done = subprocess.run(smoke("run"), capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(second)} of 8 runs are finished" in done.stdout
    whole = finished(tmp_path)
    assert len(whole) == 12 and {name: whole[name] for name in second} == second, "no finished run was touched"
    assert len(list(tmp_path.glob("runs/.trunks/*.pt"))) == 2, "one trunk a seed"

    written = study.publish(declared, where, wandb="offline")
    assert [path.name for path in written] == ["results.csv", "accuracy.png", "accuracy.pdf"]
    table = results.published(written[0])
    assert len(table) == 12 and table["config_hash"].is_unique and table["trunk_hash"].nunique() == 2 + 4
    assert table[["commit", "hardware", "seed", "run"]].notna().all(axis=None)
    assert "config.runs" not in table and str(tmp_path) not in written[0].read_text()
    before = [path.read_bytes() for path in written]
    (log,) = tmp_path.glob("runs/digits_smoke/wandb/offline-run-*")
    (record,) = of_kind(read_records(log), "run")
    assert (record.run_group, record.job_type, record.display_name) == (
        "digits_smoke",
        "summary",
        "digits_smoke-summary",
    )
    logged = {path.name.split("_")[0] for path in log.glob("files/media/*/*")}
    assert logged == {"accuracy", "means", "runs"}
    (tmp_path / "runs").rename(tmp_path / "gone")
    assert study.main(["figures", "--experiments", str(tmp_path / "experiments")]) == 0
    assert [path.read_bytes() for path in written] == before, "a table is enough to draw"
    assert str(written[1]) in capsys.readouterr().out


def test_a_part_is_published_only_where_asked_and_said(tmp_path):
    declare(tmp_path)
    mine, where = study.read("mine", tmp_path), [f"runs={tmp_path}/runs", "tracking=none", "progress=false"]
    with pytest.raises(study.StudyError, match="4 of 4 runs of mine are not finished"):
        study.publish(mine, where, partial=True)
    one = mine._replace(
        sweeps=[declaration.Sweep(["experiment=digits"], {"seed": [0], "pruning.criterion": ["random"]})]
    )
    assert study.run(one, where) == 0
    with pytest.raises(study.StudyError, match=r"3 of 4 runs[\s\S]*variance[\s\S]*--partial"):
        study.publish(mine, where)
    with pytest.warns(UserWarning, match="published without them"):
        study.publish(mine, where, partial=True)
    assert len(results.published(mine.table_path)) == 1


def test_a_failed_sweep_leaves_the_next_running_and_an_interrupt_does_not(tmp_path, monkeypatch):
    declare(tmp_path, sweeps=[SWEEP, {**SWEEP, "base": ["experiment=digits", "epochs=2"]}])
    mine, where = study.read("mine", tmp_path), [f"runs={tmp_path}/runs", "+hydra.launcher.n=1", "hydra/launcher=basic"]
    started = []
    for status, expected in ((2, (2, 2)), (1, (1, 2)), (130, (130, 1)), (-9, (-9, 1))):
        started.clear()
        answers = iter([status, 0])

        def start(command, answers=answers):
            started.append(command)
            return next(answers)

        monkeypatch.setattr(study, "attended", start)
        assert (study.run(mine, where), len(started)) == expected
    assert started[0][-2:] == where[-2:], "what is Hydra's goes to every sweep"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_study_is_passed_on_and_the_end_awaited(number):
    """A sweep that is told takes its time: its runs finish their step."""
    slow = "import signal, sys, time; signal.signal({0}, lambda *a: (time.sleep(1), sys.exit(128 + {0}))); print(flush=True); time.sleep(60)"
    program = f"import sys; from tnvp import study; sys.exit(study.attended([sys.executable, '-c', {slow.format(int(number))!r}]))"
    process = heeding_signals([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number


def test_points_are_those_that_hydra_sweeps_over():
    axes = {
        "optimizer.lr": [1e-05],
        "model.widths": [[8, 4], [16]],
        "pruning.ignore": [["fc1"]],
        "dataset.flip": [True],
    }
    axes |= {"name": [None, "a b", "it's"]}
    sweep = declaration.Sweep(["experiment=digits"], axes)
    flags = Namespace(overrides=sweep.overrides(), multirun=True, experimental_rerun=None)
    with hydra.initialize_config_dir(str(run.CONF), version_base=VERSION):
        theirs = [run.resolve(hydra.compose("config", point)) for point in command_line.points(flags)]
        ours = [run.resolve(hydra.compose("config", point)) for point in sweep.points()]
    assert ours == theirs and len(ours) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweeps": [{"base": []}]}, r"sweeps\[0\] needs the keys base, axes; it has base"),
        ({"sweeps": {}}, "sweeps must be a list"),
        ({"extra": 1}, "needs the keys question, figures, sweeps; it has"),
        ({"figures": {"accuracy": "pie"}}, "figure 'pie' is none of accuracy_vs_sparsity"),
        ({"figures": {"accuracy": "accuracy_by_setting"}}, "accuracy_by_setting needs the columns that name a setting"),
        ({"figures": {"accuracy": "accuracy_vs_cost seed"}}, "accuracy_vs_cost takes no columns"),
        ({"sweeps": [{"base": [], "axes": {"seed": 3}}]}, "the axis seed needs a list of values"),
        ({"sweeps": []}, "sweeps is empty"),
        ({"sweeps": [{1: []}]}, r"sweeps\[0\] needs the keys base, axes; it has 1"),
        *(
            ({"sweeps": [{"base": [entry], "axes": {}}]}, f"entry {entry!r} of base")
            for entry in (1, None, {"a": 1}, "-m")
        ),
        ({"sweeps": [{"base": [], "axes": {1: [0]}}]}, "the axis 1 must be a key"),
        ({"sweeps": [{"base": [], "axes": {"seed": [0, {"a": 1}]}}]}, "the axis seed can't take {'a': 1}"),
        (
            {"sweeps": [{"base": [], "axes": {"seed": [[date(2026, 1, 1)]]}}]},
            r"the axis seed can't take \[datetime.date",
        ),
        ({"figures": {"../accuracy": "accuracy_vs_sparsity"}}, "the figure name '../accuracy'"),
        ({"figures": {1: "accuracy_vs_sparsity"}}, "the figure name 1 "),
    ],
)
def test_a_bad_declaration_is_named(changes, message, tmp_path):
    path = declare(tmp_path, **changes)
    with pytest.raises(study.StudyError, match=f"^{path}.*{message}"):
        study.read("mine", tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\tx", b"question: [q", b"question: 2026-06-31"])
def test_a_declaration_that_is_no_yaml_is_named(content, tmp_path):
    path = declare(tmp_path)
    path.write_bytes(content)
    with pytest.raises(study.StudyError, match=f"^{path} is no YAML"):
        study.read("mine", tmp_path)


@pytest.mark.parametrize(
    ("action", "base", "axes", "more", "message"),
    [
        ("run", [], {"sed": [0]}, [], "unknown key sed: did you mean seed?"),
        ("run", [], {"seed": [0, "x", 1]}, [], "experiment=digits seed=x study=mine"),
        ("run", [], {"seed": [float("nan")]}, [], "seed: Value 'nan'"),
        ("run", [], {"seed=1 ": [0]}, [], "'seed=1 =0' can't be read"),
        ("run", [], {"pruning": ["twice"]}, [], "pruning=twice is not one of"),
        ("run", ["model=mlp,tutorial_cnn"], {}, [], "'model=mlp,tutorial_cnn': what varies goes into axes"),
        ("run", ["seed=range(2)"], {}, [], "'seed=range(2)'"),
        ("publish", [], {}, ["seed=0,1"], "'seed=0,1': what varies goes into axes"),
        ("publish", [], {}, ["sed=0"], "unknown key sed"),
    ],
)
def test_a_mistake_that_only_hydra_sees_is_one_message(action, base, axes, more, message, tmp_path, capsys):
    path = declare(tmp_path, sweeps=[{"base": ["experiment=digits", *base], "axes": axes}])
    where = [f"runs={tmp_path}/runs", "--experiments", str(tmp_path)]
    assert study.main([action, "mine", *more, *where]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}, the run experiment=digits") and message in said
    assert said.count("\n") == 1 and "--multirun" not in said
    assert not (tmp_path / "runs").exists()


def test_a_study_that_is_not_there_is_told_with_those_that_are(tmp_path, capsys):
    declare(tmp_path)
    assert study.main(["run", "yours", "--experiments", str(tmp_path)]) == 2
    assert "no study 'yours'" in (said := capsys.readouterr().err) and "there are: mine" in said
    assert study.main(["publish", "--experiments", str(tmp_path)]) == 2
    assert "which study? There are: mine" in capsys.readouterr().err


def test_a_point_that_can_not_be_run_is_found_before_any_is(tmp_path, capsys):
    declare(tmp_path, sweeps=[SWEEP | {"axes": {"pruning.sparsity": [0.5, 50]}}])
    assert study.main(["run", "mine", f"runs={tmp_path}/runs", "--experiments", str(tmp_path)]) == 2
    assert "pruning.sparsity=50.0 must be a number in [0, 1)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", study.study_names())
def test_every_sweep_that_is_declared_can_be_run(name):
    declared = study.read(name)
    points = [tuple(sorted(point)) for sweep in declared.sweeps for point in sweep.points()]
    assert len(set(points)) == len(points)
    lasts = [sweep._replace(axes={key: values[-1:] for key, values in sweep.axes.items()}) for sweep in declared.sweeps]
    assert len(study.runs_of(declared._replace(sweeps=lasts), [])) == len(lasts)


@pytest.mark.skipif(matplotlib.__version__ != DRAWN_WITH, reason=f"the figures were drawn with matplotlib {DRAWN_WITH}")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_are_what_their_tables_draw(name, tmp_path):
    declared = study.read(name)
    copy = declared._replace(folder=tmp_path / name)
    shutil.copytree(declared.folder, copy.folder)
    drawn = [path for path in study.draw(copy) if path.suffix == ".png"]
    assert bool(drawn) == bool(declared.figures)
    for path in drawn:
        with Image.open(path) as new, Image.open(declared.folder / path.name) as committed:
            np.testing.assert_array_equal(np.asarray(new), np.asarray(committed))


def test_another_table_is_no_published_one(tmp_path):
    pd.DataFrame({"a": [1]}).to_csv(tmp_path / "results.csv")
    with pytest.raises(results.ResultsError, match="lack the columns"):
        results.published(tmp_path / "results.csv")
    with pytest.raises(results.ResultsError, match="no table"):
        results.published(tmp_path / "none.csv")
