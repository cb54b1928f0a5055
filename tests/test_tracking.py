"""The W&B copy: what really is in the run's file, on a real server, and what happens when W&B fails."""

import atexit
import base64
import hashlib
import inspect
import json
import logging
import math
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.wandb_server import free_port, isolate
from tnvp import tracking

ROOT = Path(__file__).parent.parent
CONFIG = {
    "study": "s",
    "seed": 3,
    "model": {"name": "mlp", "widths": [300, 100]},
    "pruning": {"sparsity": 0.5},
}
RECORDS = [
    {"step": 50 * i, "epoch": i / 2, "phase": "dense", "train/loss": 1 / i, "learning_rate": 0.1} for i in range(1, 9)
]
RECORDS[-1] |= {"validation/accuracy": 91.5, "widths/fc1": 300, "validation/loss": None}
EVENTS = [
    {
        "step": 400 + i,
        "epoch": 4.0,
        "criterion": "variance",
        "requested": {"sparsity": 0.25 * i},
        "neuron_sparsity": 0.25 * i,
        "accuracy_before": 91.0,
        "accuracy_after": 90.0 - i,
        "groups": [{"name": "fc1", "removed": [10 * i, 10 * i + 1], "kept": [0], "threshold": 0.1}],
    }
    for i in (1, 2)
]
EVENTS[1]["groups"][0]["removed_scores"] = [0.5, 0.25]
ROWS = [[401, "fc1", 10, None], [401, "fc1", 11, None], [402, "fc1", 20, 0.5], [402, "fc1", 21, 0.25]]
VARIANCES = [0.0, 1e-6, 0.01, 1.0, 100.0, float("nan")]
SUMMARY = {"test_accuracy": 90.5, "neuron_sparsity": 0.5, "criterion": "variance"}


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    isolate(tmp_path, monkeypatch)


def begin(mode, directory, name="run", **more):
    directory.mkdir(parents=True, exist_ok=True)
    options = dict(project="tnvp", entity=None, group="study", job_type="one_shot", name=name, tags=["a", "b"])
    return tracking.start(mode, directory=directory, config=CONFIG, **options, **more)


def record_run(mode, directory, name="run", **more):
    """A whole run with everything in it; its tracker, finished."""
    tracker = begin(mode, directory, name, **more)
    Image.linear_gradient("L").save(directory / "trace.png")
    (directory / "model.pt").write_bytes(b"weights" * 100)
    for record in RECORDS:
        tracker.log(record)
    for event in EVENTS:
        tracker.event(event)
    tracker.histogram("variance/fc1", VARIANCES, step=400)
    tracker.image("trace", directory / "trace.png")
    tracker.summary(SUMMARY)
    tracker.artifact(directory / "model.pt", name=f"model {name}", type="model")
    tracker.finish()
    tracker.finish()
    return tracker


# ---- the run's own file ----------------------------------------------------------------------------------


def read_records(directory):
    """The protobuf records of a finished W&B run's file; `finish` returns a moment before it is whole."""
    (path,) = Path(directory).glob("*.wandb")
    for _ in range(100):
        records = decode(path.read_bytes())
        if of_kind(records, "exit"):
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path} has no exit record")


def decode(data):
    """The records of a .wandb file: a 7-byte header, then a LevelDB log (blocks of 32 KiB)."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data[:4] == b":W&B"
    position, whole, records = 7, b"", []
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:  # too short for another header: padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part = data[position + 7 : position + 7 + length]
        whole = part if kind in (1, 2) else whole + part  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            records.append(Record.FromString(whole))
        position += 7 + length
    return records


def unpack(items):
    """{"a/b": value} of W&B's key-value items; a nested key's parts joined by dots."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def of_kind(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def history(records):
    rows = [unpack(row.item) for row in of_kind(records, "history")]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        isolate(directory / "home", patch)
        tracker = record_run("offline", directory)
    return directory, Path(tracker.where), read_records(tracker.where)


def test_the_file_holds_who_the_run_is_its_config_and_its_summary(recorded):
    directory, where, records = recorded
    assert where.parent == directory / "wandb"
    run = of_kind(records, "run")[0]
    assert (run.project, run.run_group, run.job_type, run.display_name) == (
        "tnvp",
        "study",
        "one_shot",
        "run",
    )
    assert list(run.tags) == ["a", "b"]
    config = unpack(run.config.update)
    assert {key: config[key] for key in config if key != "_wandb"} == CONFIG
    summary = {}
    for update in of_kind(records, "summary"):
        summary |= unpack(update.update)
    assert SUMMARY.items() <= summary.items()
    assert [end.exit_code for end in of_kind(records, "exit")] == [0]


def test_the_file_holds_every_record_over_its_own_axis(recorded):
    rows = history(recorded[2])
    assert rows[: len(RECORDS)] == [{k: v for k, v in record.items() if v is not None} for record in RECORDS]
    first, second = (row for row in rows if "pruned/accuracy" in row)
    assert first == {
        "step": 401,
        "epoch": 4.0,
        "pruned/neuron_sparsity": 0.25,
        "pruned/requested_sparsity": 0.25,
        "pruned/accuracy_before": 91.0,
        "pruned/accuracy": 89.0,
    }
    assert second["pruned/accuracy"] == 88.0
    axes = {metric.name: metric.step_metric for metric in of_kind(recorded[2], "metric")}
    assert {axes[key] for key in axes if key.startswith("pruned/") and key != tracking.PRUNED_AXIS} == {
        tracking.PRUNED_AXIS
    }
    assert {axes[key] for key in (*RECORDS[-1], "log10_variance/fc1", "trace") if key in axes} == {"step"}
    assert {"train/loss", "epoch", "widths/fc1", "log10_variance/fc1"} <= axes.keys()


def test_the_file_holds_histogram_image_table_and_artifact(recorded):
    directory, where, records = recorded
    rows = history(records)
    (histogram,) = (row for row in rows if "log10_variance/fc1._type" in row)
    assert histogram["log10_variance/fc1._type"] == "histogram"
    assert sum(histogram["log10_variance/fc1.values"]) == len(VARIANCES) - 1  # all but the NaN
    bins = histogram["log10_variance/fc1.bins"]
    assert (bins[0], bins[-1]) == pytest.approx((math.log10(tracking.LOG_FLOOR), 2.0))
    (image,) = (row for row in rows if "trace.path" in row)
    assert (where / "files" / image["trace.path"]).read_bytes() == (directory / "trace.png").read_bytes()
    (table,) = (row for row in rows if "removed_neurons.path" in row)
    content = json.loads((where / "files" / table["removed_neurons.path"]).read_text())
    assert content == {"columns": ["step", "group", "neuron", "score"], "data": ROWS}
    (model,) = (artifact for artifact in of_kind(records, "artifact") if artifact.type == "model")
    assert model.name == "model-run"
    (entry,) = model.manifest.contents
    weights = (directory / "model.pt").read_bytes()
    assert (entry.path, entry.size) == ("model.pt", len(weights))
    assert base64.b64decode(entry.digest) == hashlib.md5(weights).digest()
    assert entry.local_path == str(directory / "model.pt")  # not a copy somewhere in the home directory


def test_the_file_holds_a_table_of_mixed_values(tmp_path):
    tracker = begin("offline", tmp_path)
    tracker.table("means", ["criterion", "n", "half"], [["variance", 3, 0.5], [None, 1, math.nan]])
    tracker.finish()
    (row,) = history(read_records(tracker.where))
    content = json.loads((Path(tracker.where) / "files" / row["means.path"]).read_text())
    assert content == {"columns": ["criterion", "n", "half"], "data": [["variance", 3, 0.5], [None, 1, None]]}


def test_two_runs_in_one_process_are_two_runs(tmp_path):
    one, two = begin("offline", tmp_path / "one"), begin("offline", tmp_path / "two")
    one.log({"step": 1, "a": 1})
    two.log({"step": 1, "a": 2})
    two.finish(failed=True)
    one.log({"step": 2, "a": 3})  # still open
    one.finish()
    records = [read_records(tracker.where) for tracker in (one, two)]
    assert len({of_kind(each, "run")[0].run_id for each in records}) == 2
    assert [[row["a"] for row in history(each)] for each in records] == [[1, 3], [2]]
    assert [of_kind(each, "exit")[0].exit_code for each in records] == [0, 1]


# ---- silence, secrets, time ------------------------------------------------------------------------------


# tnvp without its __init__, which imports torch: seconds for every process.
BARE = "import sys, types; sys.modules['tnvp'] = package = types.ModuleType('tnvp'); package.__path__ = ['tnvp']"


def spawn(function, directory, **environment):
    """A Python process that runs function(directory), a function of this module, in the project's root."""
    script = f"{BARE}; from tests import test_tracking as t; t.{function.__name__}(t.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(directory)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **pipes)


def outcome(process):
    """(stdout, stderr) of a process that must succeed."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, err


def two_offline_runs(directory):
    """Print the hosts looked up or connected to, the runs' places and the second run's seconds."""
    report = {"hosts": []}

    def listen(event, values):
        if event == "socket.getaddrinfo" or (event == "socket.connect" and values[0].family != socket.AF_UNIX):
            report["hosts"].append(repr(values))

    sys.addaudithook(listen)
    atexit.register(lambda: print(json.dumps(report)))  # before W&B's own, so after them: they send things too
    report["places"] = [record_run("offline", directory / "first").where]
    began = time.monotonic()
    report["places"].append(record_run("offline", directory / "second").where)
    report["seconds"] = time.monotonic() - began


def test_offline_is_silent_private_without_network_and_quick(tmp_path):
    secrets = dict(WANDB_API_KEY="0123456789" * 4, AWS_SECRET_ACCESS_KEY="hidden-from-wandb", WANDB_RUN_ID="same")
    out, err = outcome(spawn(two_offline_runs, tmp_path, **secrets))
    assert err == "" and out.count("\n") == 1
    report = json.loads(out)
    assert report["hosts"] == []
    assert "same" not in {of_kind(read_records(place), "run")[0].run_id for place in report["places"]}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(secrets[name].encode() in content for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"))
    assert report["seconds"] < 2


# ---- modes and the no-op twin ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", tracking.MODES)
@pytest.mark.parametrize("wish", [*tracking.MODES, "dryrun", "run", "shared", ""])
def test_the_environment_can_make_a_run_more_private_never_less(mode, wish, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", wish)
    wish = {"dryrun": "offline"}.get(wish, wish)
    rank = tracking.MODES.index
    expected = wish if wish in tracking.MODES and rank(wish) < rank(mode) else mode
    assert tracking.effective_mode(mode) == expected


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match=r"tracking.mode is 'on'; choose one of disabled, offline, online"):
        tracking.effective_mode("on")


def test_the_twin_has_the_same_methods_and_does_nothing(tmp_path):
    def methods(kind):
        return {
            name: inspect.signature(value) for name, value in vars(kind).items() if callable(value) and name[0] != "_"
        }

    assert methods(tracking.Tracker) == methods(tracking.WandbTracker)
    tracker = record_run("disabled", tmp_path / "run")
    assert type(tracker) is tracking.Tracker and tracker.where == ""
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"trace.png", "model.pt"}


# ---- faults ----------------------------------------------------------------------------------------------


def only_warning(caplog):
    ours = (record for record in caplog.records if record.name == "tnvp.tracking")
    (record,) = (record for record in ours if record.levelno >= logging.WARNING)
    message = record.getMessage()
    assert "The run goes on" in message and "tracking.mode=" in message and "wandb sync" in message
    return message


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize("fault", ["raises", "missing"])
def test_a_run_goes_on_when_wandb_does_not_start(mode, fault, tmp_path, monkeypatch, caplog):
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        import wandb

        monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
    assert type(record_run(mode, tmp_path)) is tracking.Tracker
    assert ("ZeroDivisionError" if fault == "raises" else "ModuleNotFoundError") in only_warning(caplog)


@pytest.mark.parametrize("name", ["log", "define_metric", "log_artifact", "finish"])
def test_a_run_goes_on_when_wandb_raises_and_says_so_once(name, tmp_path, monkeypatch, caplog):
    import wandb

    def fail(*_args, **_kwargs):
        raise RuntimeError("no space left\nmore")

    honest = wandb.Run.finish
    monkeypatch.setattr(wandb.Run, name, fail)
    tracker = record_run("offline", tmp_path)
    honest(tracker._run)
    assert "(RuntimeError: no space left)" in only_warning(caplog)
    assert unpack(of_kind(read_records(tracker.where), "summary")[-1].update) or name == "finish"


def test_one_bad_call_costs_only_itself(tmp_path, caplog):
    tracker = begin("offline", tmp_path)
    tracker.image("trace", tmp_path / "absent.png")
    tracker.artifact(tmp_path / "absent.pt", name="model", type="model")
    tracker.log({"step": 1, "a": 1})
    tracker.finish()
    assert tracker.where in only_warning(caplog)
    records = read_records(tracker.where)
    assert history(records) == [{"step": 1, "a": 1}] and of_kind(records, "exit")


def start_online(directory):
    tracking.INIT_SECONDS = 2
    tracker = begin("online", directory, resumed={"id": "0a1b2c3d"} if directory.name == "silent" else None)
    tracker.log({"step": 1, "a": 1})
    tracker.finish()
    print(tracker.where)


def test_an_online_run_without_an_answer_is_recorded_offline(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        ports = {"refusing": free_port(), "silent": silent.getsockname()[1]}
        processes = []
        for name, port in ports.items():
            place = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0123456789" * 4}
            processes.append(spawn(start_online, tmp_path / name, **place))
        for process in processes:
            out, err = outcome(process)
            where = out.strip()
            assert (
                err.count("\n") == 1
                and f"recorded offline: `wandb sync {where}`" in err
                and "tracking.mode=offline" in err
            )
            assert history(read_records(where)) == [{"step": 1, "a": 1}]


def test_an_online_run_without_a_key_is_recorded_offline_without_a_question(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for a key"))
    tracker = record_run("online", tmp_path)
    assert "API key" in only_warning(caplog) and f"wandb sync {tracker.where}" in only_warning(caplog)
    assert history(read_records(tracker.where))[: len(RECORDS)]


# ---- a real server ---------------------------------------------------------------------------------------


def assert_complete(server, identity, name):
    run, metrics, files, artifacts = server.knows(identity)
    assert (run["display_name"], run["state"], run["tags"]) == (name, "finished", ["a", "b"])
    assert {key: run["config"][key]["value"] for key in CONFIG} == CONFIG
    assert SUMMARY.items() <= run["summary"].items()
    assert metrics["train/loss"] == [record["train/loss"] for record in RECORDS]
    assert metrics["pruned/neuron_sparsity"] == [0.25, 0.5] and metrics["pruned/accuracy"] == [89.0, 88.0]
    assert "media/images/trace" in files and "media/table/removed_neurons" in files
    assert f"model-{name}" in artifacts


def stream(directory):
    first = record_run("online", directory / "first", name="first")
    tracking.FINISH_SECONDS = 2
    second = begin("online", directory / "second", name="second")
    second.log({"step": 1, "a": 1})
    print(json.dumps([first.where, second.where]), flush=True)
    input()  # meanwhile the server goes away
    second.log({"step": 2, "a": 2})
    second.finish()


def test_a_server_gets_the_same_run_live_and_by_sync_and_may_die(server, recorded, tmp_path):
    streaming = spawn(stream, tmp_path, **server.access)
    where = str(recorded[1])
    server.sync(where)
    offline = where.rpartition("-")[2]
    assert_complete(server, offline, "run")
    first, second = (Path(place).name for place in json.loads(streaming.stdout.readline()))
    assert len({first, second, offline}) == 3
    assert_complete(server, first, "first")
    assert server.knows(offline)[1] == server.knows(first)[1]
    server.stop()
    _, err = streaming.communicate("\n", timeout=200)
    assert streaming.returncode == 0, err
    assert "wandb sync --include-online" in err and "tracking.mode=offline" in err


def half_a_run(directory):
    """Killed when the server (or the file) had some rows; prints the id, waits for the kill."""
    for mode in ("online", "offline"):
        tracker = begin(mode, directory / mode)
        for record in RECORDS[:5]:
            tracker.log(record)
        print(tracker.state()["id"], flush=True)
    input()


def test_a_killed_run_is_one_run_on_the_server_live_and_by_sync(server, tmp_path):
    process = spawn(half_a_run, tmp_path, **server.access)
    live, later = (process.stdout.readline().strip() for _ in range(2))
    for _ in range(600):  # what the server does not have yet would stay in the killed run's folder
        if len(server.knows(live)[1].get("train/loss", [])) >= 5:
            break
        time.sleep(0.1)
    process.kill()
    process.communicate()
    outcome(spawn(go_on, tmp_path, IDS=f"{live} {later}", **server.access))
    folders = sorted(map(str, (tmp_path / "offline" / "wandb").glob("offline-run-*")))
    assert len(folders) == 2
    for folder in folders:
        server.sync(folder)
    for identity in (live, later):
        assert_complete(server, identity, "run")


def go_on(directory):
    for mode, identity in zip(("online", "offline"), os.environ["IDS"].split(), strict=True):
        record_run(mode, directory / mode, resumed={"id": identity})
