"""A study runs what is missing, goes on after a kill, publishes what it declared and draws the same figures again."""

import functools
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
from tests.test_results import config, write_run
from tests.test_tracking import of_kind, read_records
from tests.wandb_server import isolate
from tnvp import command_line, declaration, results, search_figure, study
from tnvp.config import VERSION

SOURCES = {"published": {"literature.csv", "compare.py"}}  # what people wrote and is read beside the results
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
        ({"search": ["hydra/sweeper=optuna"]}, "needs the keys question, figures, search; it has"),
        ({"tables": []}, "tables must be a dict"),
        ({"tables": {"a/b.csv": {"command": "tnvp.latency"}}}, "a/b.csv: the name must be text"),
        ({"tables": {"results.csv": {"command": "tnvp.latency"}}}, "and not results.csv"),
        ({"tables": {"a.csv": "tnvp.latency"}}, "a.csv needs the keys command; it has 'tnvp.latency'"),
        ({"tables": {"a.csv": {"command": "rm -r {out}"}}}, "a.csv: a command begins with a module"),
        ({"tables": {"a.csv": {"command": "{folder}/../a.py"}}}, "a.csv: a command begins with a module"),
        ({"tables": {"a.csv": {"command": "tnvp.latency {rnus}"}}}, "a.csv: {rnus} is none of {folder}, {out}, {runs}"),
        ({"tables": {"a.csv": {"command": "tnvp.latency {runs}"}}}, "a.csv: {runs} in the command and the key runs"),
        ({"tables": {"a.csv": {"command": "tnvp.latency", "runs": {}}}}, "a.csv: {runs} in the command and the key"),
        ({"tables": {"a.csv": {"command": "tnvp.latency {runs}", "runs": {"seed": 0}}}}, "runs needs lists of values"),
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
    if declared.search:
        pytest.skip("its points are the sweeper's")
    lasts = [sweep._replace(axes={key: values[-1:] for key, values in sweep.axes.items()}) for sweep in declared.sweeps]
    assert len(study.runs_of(declared._replace(sweeps=lasts), [])) == len(lasts)


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory):
    """Study → a folder with its published tables, and the files that `make figures` makes of these; drawn once for all tests."""

    @functools.cache
    def draw(name: str) -> tuple[Path, list[Path]]:
        declared, folder = study.read(name), tmp_path_factory.mktemp("redrawn") / name
        shutil.copytree(declared.folder, folder)
        for path in folder.iterdir():
            if path.suffix in (".png", ".pdf") or path.name in made_of_tables(declared):
                path.unlink()
        return folder, study.draw(declared._replace(folder=folder))

    return draw


def made_of_tables(declared: study.Study) -> set[str]:
    return {name for name, table in declared.tables.items() if table.runs is None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tables_draw_all_that_stands_beside_them(name, redrawn):
    declared = study.read(name)
    folder, written = redrawn(name)
    given = {path.name for path in folder.iterdir() if path.is_file()} - {path.name for path in written}
    measured = {"results.csv", *(name for name, table in declared.tables.items() if table.runs is not None)}
    assert given - SOURCES.get(name, set()) == {"README.md", "study.yaml"} | measured
    assert {path.name for path in written} == {
        path.name for path in declared.folder.iterdir() if path.is_file()
    } - given
    for path in written:
        if path.name in made_of_tables(declared):
            assert path.read_bytes() == (declared.folder / path.name).read_bytes()


def test_no_figure_stands_elsewhere():
    files = {path for path in study.EXPERIMENTS.rglob("*") if path.suffix in (".png", ".pdf", ".svg")}
    assert {path.parent for path in files} <= {study.EXPERIMENTS / name for name in PUBLISHED}


@pytest.mark.skipif(
    matplotlib.__version__ != DRAWN_WITH,
    reason=f"the figures were drawn with matplotlib {DRAWN_WITH}, here is {matplotlib.__version__}: pixels may differ",
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_are_what_their_tables_draw(name, redrawn):
    declared = study.read(name)
    drawn = [path for path in redrawn(name)[1] if path.suffix == ".png"]
    assert bool(drawn) == bool(declared.figures)
    for path in drawn:
        with Image.open(path) as new, Image.open(declared.folder / path.name) as committed:
            np.testing.assert_array_equal(np.asarray(new), np.asarray(committed))


def runs_of_three_studies(root: Path) -> None:
    for seed in range(3):
        for window in ("cumulative", "ema"):
            whole = config(seed=seed, study="windows", pruning__window=window)
            write_run(root / "windows" / f"{window}-{seed}", whole)
        for sparsity in (0.25, 0.5):
            write_run(root / "searched" / f"{sparsity}-{seed}", config(seed=seed, sparsity=sparsity, study="searched"))
        write_run(root / "other" / f"{seed}", config(seed=seed, study="other"))


def declare_two(folder: Path) -> None:
    stability = {"command": "tnvp.stability {runs} --csv {out}/stability.csv", "runs": {"pruning.window": ["ema"]}}
    counted = {"command": "{folder}/count.py {out}/results.csv {out}/counted.md"}
    declare(
        folder,
        "windows",
        figures={
            "accuracy": "accuracy_by_setting pruning.window",
            "stability": "rank_stability",
            "training": "accuracy_vs_training pruning.window",
        },
        tables={"stability.csv": stability, "counted.md": counted},
    )
    script = "import sys\nlines = len(open(sys.argv[1]).readlines())\nopen(sys.argv[2], 'w').write(f'{lines}\\n')\n"
    (folder / "windows" / "count.py").write_text(script)
    search = {"question": "?", "figures": {"front": "accuracy_flops_front"}, "search": ["hydra/sweeper=optuna"]}
    (folder / "searched").mkdir()
    (folder / "searched" / "study.yaml").write_text(yaml.safe_dump(search))


def test_ones_own_runs_draw_what_their_studies_declare(tmp_path, monkeypatch):
    """Without any published table; what can't be drawn is told and leaves the rest."""
    monkeypatch.setattr(study.figures, "draw", lambda root, out, table: [])  # tests of its own
    runs_of_three_studies(tmp_path / "runs")
    declare_two(tmp_path / "experiments")
    with pytest.warns(UserWarning, match="windows: no training: .*runs with pruning=none"):
        written = study.draw_runs(tmp_path / "runs", tmp_path / "out", tmp_path / "experiments")
    names = {str(path.relative_to(tmp_path / "out")) for path in written}
    drawn = {
        f"{stem}.{kind}"
        for stem in ("windows/accuracy", "windows/stability", "searched/front")
        for kind in ("png", "pdf")
    }
    tables = {"windows/results.csv", "windows/stability.csv", "windows/counted.md", "searched/results.csv"}
    assert names == drawn | tables and all(path.stat().st_size for path in written)
    assert not list((tmp_path / "experiments").rglob("*.csv"))
    out = tmp_path / "out" / "windows"
    rows = pd.read_csv(out / "stability.csv")
    assert set(rows["window"]) == {"ema"} and set(rows["run"]) == {f"ema-{seed}" for seed in range(3)}
    assert len(results.published(out / "results.csv")) == 6 and (out / "counted.md").read_text() == "7\n"

    shutil.rmtree(tmp_path / "runs" / "windows" / "ema-0")
    for seed in range(1, 3):
        shutil.rmtree(tmp_path / "runs" / "windows" / f"ema-{seed}")
    with pytest.warns(UserWarning, match="windows has no finished run for stability.csv"):
        study.draw_runs(tmp_path / "runs", tmp_path / "out", tmp_path / "experiments")
    assert not (out / "stability.csv").exists(), "what stood there was of runs that are gone"


def test_the_front_holds_what_nothing_beats():
    accuracy, flops = pd.Series([90.0, 95.0, 94.0, 95.0, 80.0]), pd.Series([10, 20, 30, 20, 5])
    assert search_figure.on_front(accuracy, flops) == [True, True, False, True, True]
    table = pd.DataFrame({"validation_accuracy": accuracy, "flops": flops, "test_accuracy": accuracy - 1})
    table = table.assign(criterion="variance", seed=0, commit="0123456789", hardware="some CPU")
    figure = search_figure.accuracy_flops_front(table.assign(**{"config.dataset.name": "digits"}), "mine", "make it")
    front = next(line for line in figure.axes[0].lines if line.get_drawstyle() == "steps-post")
    assert list(front.get_xdata()) == [5, 10, 20, 20]
    with pytest.raises(results.ResultsError, match="validation_accuracy"):
        search_figure.accuracy_flops_front(table.drop(columns="validation_accuracy"), "mine", "make it")


def test_a_search_is_one_sweep_and_its_finished_runs_are_published(tmp_path, monkeypatch):
    declare_two(tmp_path / "experiments")
    mine, started = study.read("searched", tmp_path / "experiments"), []
    monkeypatch.setattr(study, "attended", lambda command: started.append(command) or 0)
    where = [f"runs={tmp_path}/runs"]
    assert study.run(mine, where) == 0
    assert started[0][2:] == ["-m", "hydra/sweeper=optuna", "study=searched", *where]
    with pytest.raises(study.StudyError, match="searched has no finished run of the search"):
        study.publish(mine, where)
    runs_of_three_studies(tmp_path / "runs")
    assert [path.name for path in study.publish(mine, where)] == ["results.csv", "front.png", "front.pdf"]
    table = results.published(mine.table_path)
    assert len(table) == 6 and table["validation_accuracy"].between(0, 100).all() and table["on_front"].any()


def test_a_table_that_can_not_be_written_is_told(tmp_path):
    declare_two(tmp_path)
    mine = study.read("windows", tmp_path)
    table = pd.DataFrame({"run": ["windows/ema-0"], "config.pruning.window": ["ema"]})
    with pytest.raises(
        study.StudyError, match=r"stability.csv can't be written with tnvp.stability .*: error: .*ema-0"
    ):
        study.measure(mine, table, tmp_path / "runs", mine.folder)
    with pytest.raises(study.StudyError, match=r"windows has no finished run for stability.csv: .*ema"):
        study.measure(mine, table.assign(**{"config.pruning.window": "cumulative"}), tmp_path / "runs", mine.folder)
    (tmp_path / "windows" / "count.py").write_text("")
    with pytest.raises(study.StudyError, match=r"counted.md can't be written with .*: it wrote no such file"):
        study.draw(mine._replace(figures={}))


@pytest.mark.parametrize("name", ["accuracy_vs_sparsity_cifar10", "tutorial_demo"])
def test_the_originals_of_cifar10_may_take_the_place_of_jpeg_files(name):
    declared = study.read(name)
    firsts = [sweep._replace(axes={key: values[:1] for key, values in sweep.axes.items()}) for sweep in declared.sweeps]
    runs = study.runs_of(declared._replace(sweeps=firsts), ["dataset=cifar10"])
    assert all(run.path.name.startswith("cifar10-") for run in runs)


def test_another_table_is_no_published_one(tmp_path):
    pd.DataFrame({"a": [1]}).to_csv(tmp_path / "results.csv")
    with pytest.raises(results.ResultsError, match="lack the columns"):
        results.published(tmp_path / "results.csv")
    with pytest.raises(results.ResultsError, match="no table"):
        results.published(tmp_path / "none.csv")
