"""A trunk is trained once for all runs that share it, and makes no difference to their results."""

import multiprocessing
import pickle
import time

import pytest
import torch

from tests.test_experiment import compose
from tests.test_resume import Killed, Recorded, assert_same, dies_at
from tnvp import events, experiment, run_state, trunk
from tnvp.config import Config
from tnvp.results import RunDirectory

SMALL = [
    "epochs=2", "model.widths=[32,16]", "model.dropout=0.2",
    "dataset.crop_padding=1", "optimizer.lr=0.1", "tracking=none", "progress=false",
]  # fmt: skip
ONE_SHOT = ["pruning=one_shot", "pruning.finetune_epochs=1"]
GRADUAL = ["pruning=gradual", "pruning.start_step=5", "pruning.every=4", "pruning.end_step=17"]  # 11 steps an epoch
ITERATIVE = ["pruning=iterative", "pruning.start_step=9", "pruning.every=4", "pruning.events=3"]
THRESHOLD = ["pruning=threshold", "pruning.every=9", "pruning.threshold=0.8"]
KINDS = {  # and the trunk's last step
    "one_shot": (ONE_SHOT, 22),
    "gradual": (GRADUAL, 8),
    "iterative": (ITERATIVE, 8),
    "threshold": (THRESHOLD, 8),
}


def small(tmp_path, *overrides: str) -> Config:
    return compose(*SMALL, f"runs={tmp_path}", *overrides)


def branch(tmp_path, *overrides: str) -> tuple[dict, RunDirectory]:
    config = small(tmp_path, *([] if overrides and overrides[0].startswith("pruning=") else ONE_SHOT), *overrides)
    return experiment.run(config), RunDirectory.open(experiment.run_path(config))


def trunks(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / ".trunks").glob("*.pt*"))


@pytest.fixture
def trained(monkeypatch):
    """The numbers of the steps that were trained, in order."""
    steps, real = [], events.Recording.on_step
    monkeypatch.setattr(events.Recording, "on_step", lambda self, fit: steps.append(fit.step) or real(self, fit))
    return steps


def without_times(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "seconds"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_bit_for_bit_with_a_trunk_and_without(kind, tmp_path, trained):
    (overrides, last), branches = KINDS[kind], (
        ["pruning.criterion=variance", "pruning.window=ema", "pruning.scope=global"],
        ["pruning.criterion=variance", "pruning.window=calibration"],
        ["pruning.criterion=variance_preactivation", "pruning.window=since_prune", "pruning.compensation=act_of_mean"],
        ["pruning.criterion=taylor", "pruning.compensation=none"],
        ["pruning.criterion=obs", "pruning.compensation=affine"],
        ["pruning.criterion=random", "pruning.mode=mask"],
    )  # fmt: skip
    for more in branches:
        shared, alone = (
            branch(tmp_path / name, *overrides, *more, *how)[1] for name, how in {"a": [], "b": ["trunks=null"]}.items()
        )
        assert_same(shared, alone)
    assert trained.count(last) == 1 + len(branches) and trained.count(last + 1) == 2 * len(branches)
    assert len(trunks(tmp_path / "a")) == 1 and not (tmp_path / "b" / ".trunks").exists()


@pytest.mark.parametrize("first", [1, 2, 11, 12, 13])
def test_a_trunk_may_end_wherever_an_epoch_or_a_window_does(first, tmp_path, trained):
    """11 steps an epoch, windows of 3: at their ends, one step before and after; before the step 1 there is nothing."""
    more = ["pruning=threshold", f"pruning.every={first}", "pruning.threshold=0.8", "pruning.trace_every=3"]
    _, alone = branch(tmp_path / "b", *more, "trunks=null")
    for criterion in ("apoz", "variance"):
        _, shared = branch(tmp_path / "a", *more, f"pruning.criterion={criterion}")
    assert_same(shared, alone)
    assert trained.count(max(1, first - 1)) == (2 if first > 1 else 3)
    assert len(trunks(tmp_path / "a")) == (first > 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_within_its_trunk_makes_it_when_it_goes_on(kind, tmp_path, monkeypatch, trained):
    """Killed once in the trunk and once behind it; then another run takes the trunk, and is killed too."""
    overrides, last = KINDS[kind]
    for criterion in ("taylor", "variance"):
        more = [*overrides, f"pruning.criterion={criterion}"]
        with monkeypatch.context() as patch:
            dies_at(patch, [last - 2, last + 3] if criterion == "taylor" else [last + 3])
            for _ in range(2 if criterion == "taylor" else 1):
                with pytest.raises(Killed):
                    branch(tmp_path / "a", *more, "checkpoint_steps=2")
        _, shared = branch(tmp_path / "a", *more)
        count = trained.count(1)
        assert_same(shared, branch(tmp_path / "b", *more, "trunks=null")[1])
        assert trained.count(1) == count + 1
    assert trained.count(1) == 1 + 2 and len(trunks(tmp_path / "a")) == 1


def test_a_run_that_goes_on_without_trunks_makes_none(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        dies_at(patch, [7])
        with pytest.raises(Killed):
            branch(tmp_path / "a", *GRADUAL, "checkpoint_steps=2")
    _, again = branch(tmp_path / "a", *GRADUAL, "trunks=null")
    assert_same(again, branch(tmp_path / "b", *GRADUAL, "trunks=null")[1])
    assert trunks(tmp_path / "a") == []


def test_the_tracker_is_told_the_same_from_a_trunk(tmp_path, monkeypatch):
    trackers = []
    monkeypatch.setattr(experiment, "start_tracking", lambda *a: trackers.append(Recorded()) or trackers[-1])
    branch(tmp_path / "a", *GRADUAL, "pruning.criterion=apoz")
    branch(tmp_path / "a", *GRADUAL, "pruning.criterion=variance")
    branch(tmp_path / "b", *GRADUAL, "pruning.criterion=variance", "trunks=null")
    assert trackers[1].rows == trackers[2].rows and len(trackers[1].rows) > 10


@pytest.mark.parametrize("kind", ["one_shot", "gradual"])
def test_a_run_from_a_trunk_counts_the_seconds_that_it_took(kind, tmp_path):
    first, _ = branch(tmp_path, *KINDS[kind][0])
    second, _ = branch(tmp_path, *KINDS[kind][0], "pruning.sparsity=0.25")
    ((path,),) = [list((tmp_path / ".trunks").glob("*.pt"))]
    assert min(first["seconds"], second["seconds"]) > trunk.read(path)["seconds"] > 0


@pytest.mark.parametrize(
    "other", ["seed=1", "optimizer.lr=0.05", "pruning.dense_epochs=1", "pruning.ignore=[fc1]", "dataset.split_seed=1"]
)
def test_another_trunk_is_trained_where_it_differs(other, tmp_path, trained):
    branch(tmp_path)
    branch(tmp_path, other)
    assert trained.count(1) == 2 and len(trunks(tmp_path)) == 2


def test_other_code_or_data_of_the_same_name_make_another_trunk(tmp_path, monkeypatch):
    weights = [torch.ones(3)]
    path = trunk.trunk_path(tmp_path, "abc", ["cpu"], weights)
    assert path == trunk.trunk_path(tmp_path, "abc", ["cpu"], [torch.ones(3)])
    assert path != trunk.trunk_path(tmp_path, "abc", ["cuda"], weights)
    assert path != trunk.trunk_path(tmp_path, "abc", ["cpu"], [torch.tensor([1.0, 1, 2])])
    monkeypatch.setattr(trunk, "CODE", ("training.py",))
    assert path != trunk.trunk_path(tmp_path, "abc", ["cpu"], weights)


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: b"torn"])
def test_a_damaged_trunk_is_set_aside_and_trained_anew(damage, tmp_path, trained):
    expected, _ = branch(tmp_path)
    (path,) = (tmp_path / ".trunks").glob("*.pt")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=r"damaged .* trained anew"):
        again, _ = branch(tmp_path, "force=true")
    assert without_times(again) == without_times(expected)
    assert trained.count(1) == 2 and trunks(tmp_path) == [path.name, f"{path.name}.old-1"]


def test_a_trunk_that_can_not_be_kept_costs_no_run(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.warns(UserWarning, match="can't be kept"):
        trunk.write(tmp_path / "x", {})


def test_a_broken_off_training_leaves_no_trunk_and_no_lock(tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(events.Recording, "on_epoch", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            branch(tmp_path)
    assert trunks(tmp_path) == []
    branch(tmp_path)
    assert len(trunks(tmp_path)) == 1


def _branch_slowly(tmp_path, criterion: str, trained) -> None:
    real = experiment.train

    def train(*args, **keywords):
        trained.put((keywords["phase"], keywords["resumed"] is None))
        if keywords["resumed"] is None:
            time.sleep(0.5)  # the other process arrives meanwhile
        return real(*args, **keywords)

    experiment.train = train
    branch(tmp_path, f"pruning.criterion={criterion}")


def test_two_processes_at_once_train_one_trunk(tmp_path):
    context = multiprocessing.get_context("spawn")
    trained = context.Queue()
    workers = [context.Process(target=_branch_slowly, args=(tmp_path, name, trained)) for name in ("variance", "l2")]
    for worker in workers:
        worker.start()
    phases = sorted(trained.get(timeout=120) for _ in range(4))
    for worker in workers:
        worker.join(timeout=120)
        assert worker.exitcode == 0
    assert phases == [("dense", False), ("dense", True), *[("finetune", True)] * 2] and trained.empty()
    assert len(list(tmp_path.glob("digits/*/summary.json"))) == 2


class Malicious:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize("form", [trunk.FORMAT, run_state.FORMAT])
def test_a_malicious_state_with_the_right_head_runs_nothing(form, tmp_path, monkeypatch, capsys):
    """Of a trunk and of a run's checkpoint; what it would do is seen where torch.load is not told to load data only."""
    path = tmp_path / "000000001.pt"

    def use() -> None:
        with pytest.warns(UserWarning, match="is damaged|can't be used"):
            if form == trunk.FORMAT:
                assert trunk.read(path) is None
            else:
                assert run_state.Checkpoints(tmp_path).newest(lambda state: "") is None

    run_state.write_state(path, {"model": Malicious()}, form)
    whole = path.read_bytes()
    use()
    data = pickle.dumps(Malicious())
    path.write_bytes(run_state._head(form, data) + data)
    use()
    assert "code ran" not in capsys.readouterr().out
    path.write_bytes(whole)
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **options: real(file, **{**options, "weights_only": False}))
    run_state.read_state(path, form)
    assert "code ran" in capsys.readouterr().out


def test_what_a_killed_process_left_of_a_trunk_goes_with_the_next_that_makes_it(tmp_path):
    branch(tmp_path)
    (path,) = (tmp_path / ".trunks").glob("*.pt")
    path.rename(half := path.with_name(f".{path.name}.7.tmp"))
    branch(tmp_path, "pruning.criterion=l1")
    assert path.exists() and not half.exists()
