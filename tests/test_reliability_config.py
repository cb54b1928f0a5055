"""Whatever stands on the command line: a run, or one message and status 2; never a traceback or a run half made."""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import run
import tnvp
from tnvp import experiment, sweep
from tnvp.schema import SCHEMAS, Composition, Config

from .test_experiment import compose

TINY = ["experiment=digits", "model.widths=[4]", "epochs=1", "pruning.finetune_epochs=0", "tracking=none", "progress=false", "trunks=null"]  # fmt: skip
SECRET = "s3cr3t-of-the-environment"
DIVERGED = re.compile(r"NaN or Inf|the loss became|out of memory")  # found by training alone: the run stays, unfinished
KEYS = sorted(
    {f"{group}.{name}" for group, choices in SCHEMAS.items() for s in choices.values() for name in s.__annotations__}
    | set(Composition.__annotations__) | set(Config.__annotations__)
)  # fmt: skip
ODD = st.sampled_from(
    ["", "null", "nan", "inf", "-inf", "1e400", "1e300", "-1", "0", "1", "0.5", "1.5", "99999999999999999999", "true", "maybe", "[]", "[1]", "[4,[4]]", "[4,null]",
     "{}", "{a:1}", "..", ".", "a/b", "../x", "'/'", ".hidden", "wandb", "x.old-1", "x" * 300, "'é ü'", "é", "'\u202e'", "'\n'", "'\x00'", "'\ud800'", "' '", "-", "a b",
     "${seed}", "${nope}", "${", "'${'", "${oc.env:TNVP_SECRET_NOT}", "${oc.env:FAKE_SECRET}", "x${oc.env:FAKE_SECRET,1}", "${oc.decode:1}", "${hydra:runtime.cwd}",
     "choice(1,2)", "range(3)", "1,2", "glob(*)", "interval(0,1)", "int(x)", "cuda:99", "mps", "gpu", "\u0664", "=", "==", "[1,2", "'", '"', "\\"]
)  # fmt: skip
VALUES = st.one_of(
    ODD, st.integers().map(str), st.floats().map(repr), st.text(max_size=12).filter(lambda t: "\0" not in t)
)
CHOICES = st.sampled_from([c for choices in SCHEMAS.values() for c in choices] + ["nope"])
RIGHT = st.sampled_from(
    ["seed=3", "batch_size=64", "pruning=none", "pruning.sparsity=0.25", "optimizer=adam", "model.batch_norm=true", "name=mine", "++epochs=1", "study='é ü'",
     "pruning.criterion=l1", "pruning.compensation=none", "dataset.flip=true", "dataset.mean=[0.5]", "precision=bfloat16", "model.widths=[8,4]", "runs=here/there", "trunks=here/.trunks"]
)  # fmt: skip
OF_CHOICES = [
    (f"{group}={choice}", f"{group}.{name}")
    for group in ("dataset", "model")
    for choice, schema in SCHEMAS[group].items()
    for name in (field.name for field in fields(schema))
]
OVERRIDES = st.one_of(
    RIGHT,
    st.builds("{}{}={}".format, st.sampled_from(["", "", "", "+", "++"]), st.sampled_from(KEYS), VALUES),
    st.builds("{}={}".format, st.sampled_from(list(SCHEMAS)), CHOICES),
    st.builds("~{}".format, st.sampled_from(KEYS)),
    st.builds("{}={}".format, st.text("abc.@_/", min_size=1, max_size=8), VALUES),
    st.text(max_size=10).filter(lambda text: not text.startswith("-")),
)

WITH_CHOICE = st.builds(  # a field of another data set or network: composed here, and not run
    lambda of, value: [of[0], f"{of[1]}={value}"], st.sampled_from(OF_CHOICES), VALUES
)


def is_cheap(config) -> bool:
    """Worth running for real here: seconds, no network."""
    pruning = config.pruning
    epochs = getattr(pruning, "epochs", 0) or pruning.dense_epochs + pruning.finetune_epochs
    large = config.model.name != "mlp" or any(100 < width < 1e9 for width in config.model.widths)
    padded = config.dataset.crop_padding > 8
    return config.dataset.name == "digits" and epochs <= 2 and config.threads in (0, 1) and not (
        large or padded or config.compile or 1 < config.batch_size < 8 or config.runs.startswith("/")
    )  # fmt: skip


def attempt(*arguments: str) -> SimpleNamespace:
    """run.py with these arguments in an empty folder: its status, what it printed, the run directories it left, and whether it ran."""
    ran, real, status_of = [], experiment.run, sweep.status

    def one(config):
        ran.append(is_cheap(config))
        return real(config) if ran[-1] else {"test_accuracy": 0.0}

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        patch.setattr(tnvp.experiment, "run", one)
        patch.setattr(sweep, "status", lambda rows: status_of(rows) if all(ran) else 0)
        tiny = [
            word for word in TINY if not word.startswith("model.") or not any(a.startswith("model=") for a in arguments)
        ]
        patch.setattr(sys, "argv", ["run.py", *tiny, *arguments])
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setenv("FAKE_SECRET", SECRET)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = run.main()
            except SystemExit as ended:  # argparse's own
                status = ended.code
        left = {str(path.relative_to(place)) for path in Path(place).rglob("*")}  # folders and hidden files too
        files = [path for path in Path(place).rglob("*") if path.is_file()]
        leaked = [str(path) for path in files if SECRET.encode() in path.read_bytes() or SECRET in str(path)]
        runs = {path.parent for path in files if path.name == "config.yaml"}
        halves = [path for path in runs if not (path / "summary.json").exists()]
    printed = out.getvalue() + err.getvalue()
    return SimpleNamespace(
        status=status, err=err.getvalue(), printed=printed, ran=ran, runs=runs, halves=halves, leaked=leaked, left=left
    )


def assert_told(arguments: list[str]) -> str:
    """The law; returns what became of it: "run", "valid" (too dear to run here), "refused" or "diverged"."""
    found = attempt(*arguments)
    assert SECRET not in found.printed and not found.leaked
    assert "Traceback" not in found.err, found.err
    assert found.status in (0, 2), found.err
    if found.status == 0:
        assert found.ran and not found.halves
        return "run" if all(found.ran) else "valid"
    assert found.err.strip() and len(found.err.splitlines()) <= 12, found.err
    assert any(is_named(argument, found.err) for argument in arguments), (arguments, found.err)
    if found.halves:
        assert DIVERGED.search(found.err), found.err
        return "diverged"
    assert not found.left, "nothing is half made: no folder, no lock"
    return "refused"


def is_named(argument: str, message: str) -> bool:
    """Whether the message has the key that the argument sets, or its value."""
    key, _, value = argument.partition("=")
    key, value, as_is = key.lstrip("+~"), value.strip("'\""), repr(argument)[1:-1]
    if not re.search(r"\w", argument):  # a fault in these has no word
        return True
    leaf = key.rpartition(".")[2]  # what knows no configuration says so
    words = [re.escape(word) for word in (key, leaf) if len(word) > 1]
    return (
        f"unknown key {key.partition('.')[0]}:" in message
        or any(re.search(rf"(?<!\w){word}(?!\w)", message) for word in words)
        or as_is in message
        or (len(value) > 2 and value in message)
    )


def fuzz(examples: int) -> Counter:
    seen = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(st.one_of(st.lists(OVERRIDES, min_size=1, max_size=2), WITH_CHOICE))
    def law(arguments):
        seen[assert_told(arguments)] += 1

    law()
    return seen


def test_random_command_lines_are_run_or_refused_with_a_message():
    seen = fuzz(40)
    assert seen["refused"] > 10 and seen["run"] + seen["valid"] > 0


@pytest.mark.slow
def test_500_random_command_lines_are_run_or_refused_with_a_message():
    seen = fuzz(500)
    print(dict(seen))
    assert seen["refused"] > 150 and seen["run"] > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["study=" + "x" * 300], "study=xxx"),
        (["name='" + "é" * 130 + "'"], "name=ééé"),
        (["study=.hidden"], "study='.hidden' must be a name"),
        (["study=wandb"], "study='wandb' must be a name"),  # the table would look over it
        (["study=x.old-1"], "study='x.old-1' must be a name"),
        (["name='x\ud800'"], "name='x\\ud800' has characters"),  # what a shell's invalid bytes become
        (["name=é"], "'name=é' can't be read: quote unusual characters"),
        (["runs=" + "x" * 300], "runs=xxx"),
        (["runs=" + "x/" * 5000], "runs=x/x/"),
        (["batch_size=1", "model.batch_norm=true"], "batch_size=1 makes training batches of one image"),
        (["batch_size=99999999999999999999"], "batch_size=99999999999999999999 is too large"),
        (["pruning.calibration_batches=99999999999999999999"], "pruning.calibration_batches="),
        (["threads=1000000"], "threads=1000000 must be"),  # torch ends the process where threads can't be made
        (["model.widths=[4000000000]"], "out of memory with batch_size=128"),
        (["model.widths=[4000000000,4000000000]"], "out of memory with batch_size=128"),
        (["model.widths=[4,[4]]"], "model.widths[1]=[4] must be one value"),
        (["optimizer.lr=1e300"], "optimizer.lr=1e+300 is too large"),
        (["dataset.std=[1e-40]"], "std is too small"),
        (["dataset.crop_padding=100000000"], "dataset.crop_padding=100000000 must be"),
        (["trunks=/proc/x"], "/proc/x"),
        (["dataset=image_folder", "dataset.folder=x", "dataset.image_size=4294967295"], "dataset.image_size=4294967295 must"),
        (["model=vgg11_bn", "model.width=1e18"], "model.width=1e+18 must be"),
        (["model=vit_tiny", "model.depth=4294967295"], "model.depth=4294967295 must be"),
        (["study=${oc.env:FAKE_SECRET}"], "study: only environment variables whose names begin with TNVP_"),
        (["study='${oc.${name}:FAKE_SECRET}'", "name=env"], "study: only environment variables"),
        (["-m", "study='${oc.${name}:FAKE_SECRET}'", "name=env"], "study: only environment variables"),
        (["study='${oc.decode:\"\\${oc.env:FAKE_SECRET}\"}'"], "study: only environment variables"),
        (["study='${oc.create:\"\\${oc.env:FAKE_SECRET}\"}'"], "study: "),
        (["study='${hydra:job.env_set.X}'", "hydra.job.env_set.X='${oc.env:FAKE_SECRET}'"], "study: "),
        (["-m", "seed=1,2", "hydra.sweep.dir='${oc.env:FAKE_SECRET}'"], "only environment variables"),
        (["tracking=wandb", "tracking.tags=[a,'${oc.env:FAKE_SECRET}']"], "tracking.tags[1]: only environment variables"),
        (["dataset=mnist", "dataset.root='${oc.env:TNVP_NONE,${oc.env:FAKE_SECRET}}'"], "dataset.root: only environment"),
        (["trunks=here/.trunks", "pruning.ignore=[fc1]"], "nothing in this network can be pruned"),
        (["-m", "seed=1,2", "hydra.sweep.subdir='${nope}'"], "'nope' not found"),
        (["pruning.ignore=[fc1]"], "nothing in this network can be pruned"),
    ],
)  # fmt: skip
def test_what_once_was_a_fault_is_refused_by_name(arguments, words):
    assert assert_told(arguments) == "refused"
    assert words in attempt(*arguments).err


def test_batches_larger_than_the_data_and_batches_of_one_run():
    assert assert_told(["batch_size=1000000"]) == "run"
    found = attempt("epochs=1", "dataset.validation_fraction=0.98", "batch_size=8")
    assert found.status == 0 and found.ran == [True]


def test_names_stay_inside_the_folder_of_runs(tmp_path):
    for name in ("..", ".", "a/b", "../../x", "a\\b", "/etc"):
        for key in ("study", "name"):
            found = attempt(f"{key}='{name}'")
            assert found.status == 2 and f"{key}=" in found.err and not found.runs


def test_a_run_that_can_not_begin_leaves_no_folder_for_trunks(tmp_path):
    (tmp_path / "file").write_text("")
    config = compose(*TINY[:-1], f"trunks={tmp_path}/made/.trunks", f"runs={tmp_path}/file/runs")
    with pytest.raises(OSError, match="file"):
        experiment.run(config)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_variable_of_our_own_may_be_read(monkeypatch):
    monkeypatch.setenv("TNVP_TEST_STUDY", "mine")
    assert attempt("study=${oc.env:TNVP_TEST_STUDY}").status == 0
    assert "FAKE_SECRET" not in os.environ
