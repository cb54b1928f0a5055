"""One run, top to bottom, on the embedded digits: what it leaves on disk, and that it does what its config says."""

import io
import math
import re
from itertools import pairwise

import hydra
import pytest
import torch
from rich.console import Console

import run
import tnvp
from tnvp import config, data, experiment
from tnvp.progress import ProgressBar
from tnvp.pruning.errors import PruningError
from tnvp.results import SUMMARY, RunDirectory, by_setting, table
from tnvp.training import Fit, TrainingError

SMALL = ["epochs=3", "model.widths=[32,16]", "optimizer.lr=0.1", "tracking=none", "progress=false"]
KINDS = {
    "none": ["pruning=none"],
    "one_shot": ["pruning=one_shot", "pruning.finetune_epochs=2"],
    "gradual": ["pruning=gradual", "pruning.start_step=5", "pruning.end_step=25", "pruning.every=5"],
    "iterative": ["pruning=iterative", "pruning.start_step=5", "pruning.events=3", "pruning.every=10"],
    "threshold": ["pruning=threshold", "pruning.every=10", "pruning.threshold=0.8"],
}


def compose(*overrides: str) -> config.Config:
    config.register()
    with hydra.initialize_config_dir(str(run.CONF), version_base=run.VERSION):
        return config.resolve(hydra.compose("config", list(overrides)))


@pytest.fixture
def started(tmp_path):
    """Runs the experiment with small settings; returns (config, summary, run directory)."""

    def start(*overrides: str):
        made = compose(*SMALL, f"runs={tmp_path}", *overrides)
        summary = experiment.run(made)
        return made, summary, RunDirectory.open(experiment.run_path(made))

    return start


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_what_the_contract_says(kind, started):
    made, summary, directory = started(*KINDS[kind])
    assert list(summary) == list(SUMMARY) and directory.summary == summary
    assert directory.config == config.to_dict(made)
    assert directory.environment["config_hash"] == config.config_hash(made) == summary["config_hash"]
    metrics, events, traces = directory.metrics(), directory.events(), directory.traces()
    assert metrics["step"].is_monotonic_increasing
    per_epoch = metrics[metrics["validation/accuracy"].notna()]
    assert len(per_epoch) == {"one_shot": 5}.get(kind, 3)
    assert set(traces["group"]) == {"fc1", "fc2"} and (traces["variance"] >= 0).all()
    assert len(events) == {"none": 0, "one_shot": 1, "gradual": 4, "iterative": 3, "threshold": 3}[kind]
    model = tnvp.load(directory.model_path)
    assert directory.summary["widths"] == f"{model.fc1.out_features}-{model.fc2.out_features}"
    assert [model.fc1.out_features, model.fc2.out_features] == per_epoch.iloc[-1][["widths/fc1", "widths/fc2"]].tolist()
    assert table(directory.path.parent)["run"].tolist() == [directory.path.name]


def test_one_shot_removes_what_was_asked_and_says_so(started):
    _, summary, directory = started("pruning.sparsity=0.5")
    (event,) = directory.events()
    assert [(g["width_before"], g["width_after"]) for g in event["groups"]] == [(32, 16), (16, 8)]
    assert summary["neuron_sparsity"] == event["neuron_sparsity"] == 0.5
    for group in event["groups"]:
        assert sorted(group["removed"] + group["kept"]) == list(range(group["width_before"]))
        assert max(group["removed_scores"]) == group["threshold"]
    model = tnvp.load(directory.model_path)
    assert summary["parameters"] == event["parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["flops"] == 2 * (64 * 16 + 16 * 8 + 8 * 10)


def test_scratch_trains_the_widths_that_pruning_ends_with_for_as_many_steps(started):
    kind = ["pruning.sparsity=0.75", "pruning.finetune_epochs=2"]
    _, pruned, other = started("pruning=one_shot", *kind)
    _, scratch, directory = started("pruning=scratch", *kind)
    for key in ("neuron_sparsity", "parameter_sparsity", "parameters", "flops"):
        assert scratch[key] == pruned[key]
    assert scratch["test_accuracy_dense"] is scratch["test_accuracy_pruned"] is scratch["criterion"] is None
    assert scratch["test_accuracy"] > 50 and directory.events() == []
    steps = [run.metrics()["step"].max() for run in (directory, other)]
    assert steps[0] == steps[1]
    assert directory.metrics()["learning_rate"].max() == pytest.approx(0.1, rel=0.1), "one cycle, at the full rate"
    assert set(directory.metrics()["widths/fc1"].dropna()) == {8}


@pytest.fixture
def finetuned_with(monkeypatch):
    """The model and the optimizer, as it was, that each phase began with: phase → (model, optimizer, its state)."""
    phases, real = {}, experiment.train

    def train(model, optimizer, *arguments, **keywords):
        state = [(p, {k: torch.as_tensor(v).clone() for k, v in s.items()}) for p, s in optimizer.state.items()]
        phases[keywords["phase"]] = (model, optimizer, state)
        return real(model, optimizer, *arguments, **keywords)

    monkeypatch.setattr(experiment, "train", train)
    return phases


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_optimizer_after_the_event_is_what_was_asked_for(optimizer, started, finetuned_with):
    """Whatever becomes of the state, every parameter is trained, once."""
    rates = {}
    for how in ("carried", "reset", "fresh"):
        _, _, directory = started(f"pruning.optimizer_state={how}", f"optimizer={optimizer}", "trunks=null")
        (_, before, _), (model, after, state) = finetuned_with["dense"], finetuned_with["finetune"]
        assert (before is after) == (how != "fresh")
        held = [p for group in after.param_groups for p in group["params"]]
        assert list(map(id, held)) == list(map(id, model.parameters()))
        if how == "carried":
            assert {id(p) for p, _ in state} == set(map(id, held))
            assert all(v.shape == p.shape for p, values in state for v in values.values() if v.numel() > 1)
            assert any(v.any() for _, values in state for k, v in values.items() if k != "step")
        else:
            assert state == []
        rates[how] = directory.metrics().query("phase == 'finetune' and step % 10 == 0")["learning_rate"].to_numpy()
    assert len(rates["fresh"]) == 5 and (rates["carried"] == rates["reset"]).all()
    # The first record is of step 40, the 7th after the event; each tells the rate of the next step.
    warm = [min(1, (step - 33 + 1) / 50) for step in (40, 50, 60, 70, 80)]
    assert rates["fresh"] == pytest.approx(rates["carried"] * warm)


def test_what_becomes_of_the_optimizers_state_stands_in_the_table_and_keeps_the_trunk(started):
    made = [started(f"pruning.optimizer_state={how}")[0] for how in ("carried", "reset", "fresh")]
    rows = table(experiment.run_path(made[0]).parent)
    assert set(rows["config.pruning.optimizer_state"]) == {"carried", "reset", "fresh"}
    assert rows["trunk_hash"].nunique() == rows["test_accuracy_pruned"].nunique() == 1
    assert rows["test_accuracy"].nunique() > 1
    assert len(by_setting(rows)) == 3, "they are never averaged together"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gradual", {step: 0.5 * (1 - (1 - (step - 5) / 20) ** 3) for step in (10, 15, 20, 25)}),
        ("iterative", {5: 0.5 / 3, 15: 1 / 3, 25: 0.5}),
    ],
)
def test_sparsity_follows_its_schedule(kind, expected, started):
    _, _, directory = started(*KINDS[kind], "pruning.sparsity=0.5")
    requested = {event["step"]: event["requested"]["sparsity"] for event in directory.events()}
    assert requested == pytest.approx(expected)
    achieved = [event["neuron_sparsity"] for event in directory.events()]
    assert achieved == pytest.approx(list(expected.values()), abs=1 / 48)
    assert achieved[-1] == 0.5


def test_iterative_with_one_event_is_one_shot_without_a_new_phase(started):
    """Of the networks before and after the event, which at a constant learning rate are trained alike."""
    constant = ["optimizer.schedule=constant", "trunks=null"]
    _, one_shot, _ = started("pruning=one_shot", "epochs=1", "pruning.finetune_epochs=1", *constant)
    _, iterative, _ = started("pruning=iterative", "epochs=2", "pruning.start_step=11", "pruning.events=1", *constant)
    same = ("test_accuracy_dense", "test_accuracy_pruned", "widths", "training_flops")
    assert [iterative[key] for key in same] == [one_shot[key] for key in same]


def test_training_flops_sum_up_what_each_step_cost(started):
    def cost(*widths: int) -> int:
        return 2 * sum(a * b for a, b in pairwise((64, *widths, 10)))

    images = len(data.load("digits").train)
    one_shot, none, scratch = (
        started(f"pruning={kind}", *more)[1]["training_flops"]
        for kind, *more in (
            ("one_shot", "pruning.finetune_epochs=2"),
            ("none",),
            ("scratch", "pruning.finetune_epochs=2"),
        )
    )
    assert one_shot == images * (3 * cost(32, 16) + 2 * cost(16, 8))
    assert none == images * 3 * cost(32, 16) and scratch == images * 5 * cost(16, 8)
    for kind, steps in {"gradual": (10, 5, 5, 5, 8), "iterative": (5, 10, 10, 8)}.items():
        _, pruned, directory = started(*KINDS[kind])
        widths = [(32, 16), *(tuple(g["width_after"] for g in event["groups"]) for event in directory.events())]
        expected = sum(cost(*w) * n for w, n in zip(widths, steps, strict=True))
        assert pruned["training_flops"] == pytest.approx(images / 11 * expected, abs=0.5), "a whole number"
        assert pruned["training_flops"] < none
    masked = started(*KINDS["gradual"], "pruning.mode=mask")[1]
    assert masked["training_flops"] == none, "a mask saves nothing"


def test_an_event_carries_its_certificate(started):
    _, _, directory = started("pruning.compensation=mean")
    (event,) = directory.events()
    found = {
        name: event[f"certificate/{name}"]
        for name in ("predicted", "measured", "mean_part", "remainder", "border_part")
    }
    assert found["measured"] == event["output_error"] > 0
    assert found["predicted"] == pytest.approx(found["measured"], rel=1e-3), "no layer here has a border"
    assert found["predicted"] ** 2 == pytest.approx(found["mean_part"] ** 2 + found["remainder"] ** 2)
    assert found["border_part"] < 1e-4 and event["certificate/disagreement"] == ""


def test_a_masked_run_ends_as_the_rebuilt_one(started):
    (_, rebuilt, shrunk), (_, masked, zeroed) = (
        started(*KINDS["gradual"], f"pruning.mode={m}") for m in ("rebuild", "mask")
    )
    for before, after in zip(shrunk.events(), zeroed.events(), strict=True):
        assert [g["removed"] for g in before["groups"]] == [g["removed"] for g in after["groups"]]
        assert after["parameter_sparsity"] == 0 < before["parameter_sparsity"], "a mask alone saves nothing"
    assert rebuilt["parameters"] == masked["parameters"] and rebuilt["test_accuracy"] == masked["test_accuracy"]


def test_batch_norms_are_recalibrated_as_a_step_of_its_own(started):
    _, _, directory = started("model.batch_norm=true")
    (event,) = directory.events()
    assert event["accuracy_recalibrated"] >= event["accuracy_after"]
    for options in (["model.batch_norm=true", "pruning.bn_recalibrate=0"], ["model.batch_norm=false"]):
        _, _, directory = started(*options)
        assert "accuracy_recalibrated" not in directory.events()[0]


def test_neurons_keep_the_ids_they_were_born_with(started):
    _, _, directory = started(*KINDS["gradual"])
    alive = {"fc1": set(range(32)), "fc2": set(range(16))}
    for event in directory.events():
        for group in event["groups"]:
            assert set(group["removed"]) | set(group["kept"]) == alive[group["name"]]
            alive[group["name"]] -= set(group["removed"])
    traces = directory.traces()
    last = traces[traces["step"] == traces["step"].max()]
    assert {name: set(rows["neuron"]) for name, rows in last.groupby("group")} == alive


def test_the_test_set_is_read_for_three_numbers_alone(started, monkeypatch):
    read = []
    real = data.batches
    monkeypatch.setattr(
        data,
        "batches",
        lambda images, split, *a, **k: read.append(split is images.test) or real(images, split, *a, **k),
    )
    started(*KINDS["threshold"])
    assert sum(read) == 3 and read[-3:] == [True] * 3


def test_the_final_model_is_the_best_epoch_by_validation(started):
    _, _, directory = started("pruning=none", "epochs=4")
    images = data.load("digits")
    model = tnvp.load(directory.model_path)
    accuracy = experiment.evaluate(model, data.batches(images, images.validation, 256))["accuracy"]
    assert accuracy == pytest.approx(directory.metrics()["validation/accuracy"].max())


def test_the_same_config_gives_the_same_run(started, tmp_path):
    _, first, _ = started()
    _, second, _ = started(f"runs={tmp_path}/again")
    varying = {"seconds"}
    assert {k: v for k, v in first.items() if k not in varying} == {k: v for k, v in second.items() if k not in varying}


def test_a_complete_run_is_not_repeated_and_force_sets_it_aside(started, capsys):
    _, first, directory = started()
    before = directory.summary_path.stat().st_mtime_ns
    _, again, _ = started()
    assert again == first and directory.summary_path.stat().st_mtime_ns == before
    assert "complete already" in capsys.readouterr().out
    started("force=true")
    assert sorted(path.name for path in directory.path.parent.iterdir()) == [
        directory.path.name,
        f"{directory.path.name}.old-1",
    ]


def test_a_run_that_broke_off_before_its_first_checkpoint_is_set_aside_and_done_again(started, monkeypatch):
    def break_off(study, *_):
        study.directory.log({"step": 1})
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(experiment.Study, "run", break_off)
        with pytest.raises(KeyboardInterrupt):
            started()
    _, _, directory = started()
    assert directory.is_complete
    assert directory.path.with_name(f"{directory.path.name}.old-1").is_dir()


@pytest.mark.parametrize("dirty", [True, False, None])
def test_a_table_tells_code_that_was_not_committed(dirty, started, monkeypatch):
    real = experiment.environment
    monkeypatch.setattr(experiment, "environment", lambda *a: real(*a) | {"commit": "0123abc" * 5, "dirty": dirty})
    _, summary, _ = started()
    assert summary["commit"] == "0123abc" * 5 + ("-dirty" if dirty else "")


def test_bad_input_leaves_no_run_directory(started, tmp_path):
    with pytest.raises(PruningError, match="head"):
        started("pruning.ignore=[head]")
    with pytest.raises(experiment.models.ModelError, match="16×16"):
        experiment.run(compose("tracking=none", "model=tutorial_cnn", f"runs={tmp_path}"))
    with pytest.raises(config.ConfigError, match=r"end_step=5000 .* 3 epochs of 11 steps are 33"):
        started("pruning=gradual", "pruning.end_step=5000")
    iterative = ["pruning=iterative", "pruning.start_step=5", "pruning.events=4", "pruning.every=10"]
    with pytest.raises(config.ConfigError, match=r"start_step=5, .*events=4, .*every=10: .* step 35, is beyond .* 33"):
        started(*iterative)
    with pytest.raises(config.ConfigError, match="every=34"):
        started("pruning=threshold", "pruning.every=34")
    assert not list(tmp_path.iterdir())


def test_a_loss_that_explodes_stops_the_run_with_its_step(started, tmp_path):
    with pytest.raises((TrainingError, PruningError), match=r"step \d+|NaN or Inf"):
        started("optimizer.lr=1e12")
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize("option", ["precision=bfloat16", "optimizer=adamw", "optimizer=adam", "model.batch_norm=true",
                                    "optimizer.schedule=cosine", "optimizer.schedule=constant", "pruning.scope=global"])  # fmt: skip
def test_options_run(option, started):
    _, summary, _ = started(option)
    assert summary["neuron_sparsity"] == 0.5 and summary["test_accuracy"] > 15


@pytest.mark.parametrize(
    ("experiment_name", "model"),
    [
        ("cifar_resnet20", ["model.width=4"]),
        ("cifar_vgg", ["model.width=0.125"]),
        ("cifar_vit", ["model.patch_size=2", "model.dim=12", "model.depth=1"]),
    ],
)
def test_an_experiment_runs_on_small_images_too(experiment_name, model, tmp_path):
    small = ["dataset=digits", "epochs=1", "pruning.finetune_epochs=1", "tracking=none", "progress=false"]
    made = compose(f"experiment={experiment_name}", *small, *model, f"runs={tmp_path}")
    summary = experiment.run(made)
    assert 0 < summary["neuron_sparsity"] <= 0.55  # of 3 heads, 2 go
    loaded = tnvp.load(RunDirectory.open(experiment.run_path(made)).model_path)
    assert summary["parameters"] == sum(p.numel() for p in loaded.parameters())


@pytest.mark.slow
def test_a_compiled_run_prunes_and_trains_on_like_an_eager_one(started):
    _, eager, _ = started()
    _, compiled, directory = started("compile=true")
    assert compiled["parameters"] == eager["parameters"]
    assert compiled["test_accuracy"] == pytest.approx(eager["test_accuracy"], abs=5)
    counts = directory.traces().groupby("step")["count"].first()
    assert counts.iloc[0] == 10 * 128  # every image of the window's ten steps was recorded


def lines_of_progress(columns: int, widths: dict[str, int], epochs: int = 1) -> list[str]:
    """What a terminal of so many columns shows of a phase, line by line, without its control codes."""
    out = io.StringIO()
    bar = ProgressBar(lambda: widths, Console(file=out, force_terminal=True, width=columns))
    fit = Fit(torch.nn.Linear(2, 2), None, "finetune", epochs=epochs, steps_per_epoch=2)
    bar.on_start(fit)
    for step in range(1, 2 * epochs + 1):
        fit.step = fit.batches_done = step
        fit.epoch = step / 2
        fit.add(torch.tensor(0.5), torch.eye(2), torch.tensor([0, 1]))
        bar.on_step(fit)
    bar.on_end(fit)
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))


def test_the_progress_bar_tells_loss_accuracy_and_widths():
    for columns in (140, 80):
        (*_, last), wide = (
            [line for line in lines_of_progress(columns, {"fc1": 300, "fc2": 100}, 10) if line],
            columns > 80,
        )
        for part in ("finetune", "loss 0.500", "accuracy 100.0 %", "widths 300–100", "epoch 10.0/10", "left 0:00:00"):
            assert part in last
        assert ("━" in last) == wide


@pytest.mark.parametrize("columns", [40, 80, 119, 120])
def test_progress_keeps_to_its_line(columns):
    """However narrow the terminal and deep the network: nothing is cut off in the middle of a number."""
    lines = lines_of_progress(columns, {f"conv{i}": 512 for i in range(30)})
    assert all(len(line.rstrip()) <= columns and "…" not in line for line in lines)
    assert len([line for line in lines if line.strip()]) == len([line for line in lines if "left" in line])
    assert any("epoch 1.0/1" in line for line in lines)
    assert any("neurons 15360" in line for line in lines) == (columns > 40)


def test_elsewhere_than_on_a_terminal_it_is_quiet():
    out = io.StringIO()
    bar = ProgressBar(lambda: {}, Console(file=out))
    fit = Fit(torch.nn.Linear(2, 2), None, "dense", epochs=1, steps_per_epoch=1, step=1)
    bar.on_start(fit)
    bar.on_step(fit)
    bar.on_end(fit)
    assert out.getvalue().strip() == ""


def test_summary_numbers_are_finite_or_absent(started):
    _, summary, _ = started("pruning=none")
    assert summary["test_accuracy_pruned"] is None and summary["criterion"] is None
    assert all(math.isfinite(v) for v in summary.values() if isinstance(v, float))
