"""conf/ holds what it should; bad configurations are refused by name; hashes tell results apart."""

import copy
import math
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
from omegaconf import OmegaConf

import run
import tnvp
from tnvp import models, schema, training
from tnvp.config import ConfigError, check, config_hash, register, resolve, to_dict, trunk_hash
from tnvp.data import DATASETS
from tnvp.pruning.errors import PruningError
from tnvp.run_directory import ResultsError, RunDirectory
from tnvp.schema import SCHEMAS
from tnvp.tracking import MODES

REPOSITORY = Path(run.__file__).parent
EXPERIMENTS = sorted(path.stem for path in (run.CONF / "experiment").glob("*.yaml"))
ANOTHER = {  # a right value other than the default, where adding 1 or taking the next choice gives none
    "dataset.validation_fraction": 0.2, "dataset.mean": [0.4], "dataset.std": [0.2],
    "dataset.root": "elsewhere", "dataset.folder": "pictures",
    "model.widths": [128, 65], "model.dropout": 0.2, "model.dim": 384, "model.heads": 6, "optimizer.momentum": 0.5,
    "optimizer.beta1": 0.8, "optimizer.beta2": 0.9, "pruning.sparsity": 0.25, "pruning.ignore": ["fc1"],
    "study": "other", "name": "mine", "device": "cpu", "runs": "elsewhere", "trunks": None,
    "checkpoint_steps": 7,
}  # fmt: skip


def compose(*overrides):
    register()
    with hydra.initialize_config_dir(str(run.CONF), version_base=run.VERSION):
        return resolve(hydra.compose("config", list(overrides)))


@pytest.fixture(scope="module")
def pool():
    """Configurations that together have every choice of every group, some choices more than once."""
    rows = zip_longest(*([f"{group}={choice}" for choice in choices] for group, choices in SCHEMAS.items()))
    return [compose(*filter(None, row)) for row in rows]


def chosen(pool, choice):
    group, _, name = choice.partition("=")
    values = (getattr(config, group) for config in pool)
    picked = [getattr(value, "library", value.name) == name for value in values]
    return pool[picked.index(True)]


def leaves(config):
    """(dotted key, value, metadata) of every leaf."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from ((f"{field.name}.{key}", *rest) for key, *rest in leaves(value))
        else:
            yield field.name, value, field.metadata


def changed(config, key, value):
    """A copy with another value, not checked."""
    config = copy.deepcopy(config)
    group, _, leaf = key.rpartition(".")
    setattr(getattr(config, group) if group else config, leaf, value)
    return config


def another(key, value, allowed):
    if key in ANOTHER:
        return ANOTHER[key]
    if "choices" in allowed:
        return next(choice for choice in allowed["choices"] if choice != value)
    return not value if isinstance(value, bool) else value + 1


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def reload(values):
    return resolve(OmegaConf.create(values))


def with_key(config, key, value):
    """As a nested dictionary, with a value or key that the schema may not know."""
    values = to_dict(config)
    group, _, leaf = key.rpartition(".")
    (values[group] if group else values)[leaf] = value
    return values


# What conf/ holds.


def test_the_default_is_the_digits_experiment():
    assert compose() == schema.Config(
        dataset=schema.Dataset("digits", 0.1, 0, None, None, flip=False, crop_padding=0),
        model=schema.MLP("mlp", [128, 64], "relu", batch_norm=False, dropout=0.0),
        optimizer=schema.SGD("sgd", 0.05, 5e-4, "one_cycle", momentum=0.9, nesterov=False),
        pruning=schema.OneShot(
            "one_shot", 10, "variance", "mean", "mean", "layer", "none", 1, 1, "cumulative", 10, 10, "rebuild", False, [],
            sparsity=0.5, dense_epochs=20, finetune_epochs=5, finetune_lr_factor=0.3, optimizer_state="carried", warmup_steps=50,
        ),
        tracking=schema.WandbTracking("wandb", "offline", "tnvp", None, []),
        study="digits", name=None, seed=0, device="auto", batch_size=128, precision="float32", compile=False,
        threads=1, runs="runs", trunks="runs/.trunks", checkpoint_steps=None, checkpoint_minutes=10, force=False, progress=True,
    )  # fmt: skip


def test_the_demo_is_the_public_one(monkeypatch):
    monkeypatch.setenv("TNVP_DATA_ROOT", "here")
    config = compose("experiment=tutorial_demo")
    dataset = ("cifar10", 0.1, 0, [0.5] * 3, [0.5] * 3)
    shared = (
        "variance_preactivation",
        "mean",
        "act_of_mean",
        "layer",
        "none",
        1,
        1,
        "cumulative",
        10,
        10,
        "rebuild",
        False,
        ["conv1", "conv2"],
    )
    assert config.dataset == schema.TorchvisionDataset(*dataset, False, 0, root="here", download=True)
    assert config.model == schema.Model("tutorial_cnn")
    assert config.optimizer == schema.SGD("sgd", 0.001, 0.0, "constant", momentum=0.9, nesterov=False)
    assert config.pruning == schema.Threshold("threshold", 500, *shared, threshold=0.6, epochs=2, every=2000)
    assert config.batch_size == 4


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_and_says_how_it_is_run(name):
    head = (run.CONF / "experiment" / f"{name}.yaml").read_text().splitlines()[:2]
    assert head == ["# @package _global_", f"# python run.py experiment={name}"]
    config = compose(f"experiment={name}", "dataset=image_folder")
    assert config.study == name
    assert config.dataset.name == "image_folder"  # the command line wins over the experiment


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "tutorial_demo"])
def test_an_experiment_leaves_pruning_and_optimizer_free(name):
    config = compose(f"experiment={name}", "pruning=none", "optimizer=adam")
    assert config.pruning.epochs == OmegaConf.load(run.CONF / "experiment" / f"{name}.yaml").epochs
    assert config.optimizer.lr == 1e-3


def test_every_choice_has_a_file_a_schema_and_what_it_names():
    for group, choices in SCHEMAS.items():
        assert set(choices) == {path.stem for path in (run.CONF / group).glob("*.yaml")}
    assert list(SCHEMAS["dataset"]) == list(DATASETS)
    assert list(SCHEMAS["model"]) == [*models.MODELS, *models.LIBRARIES]
    assert list(SCHEMAS["optimizer"]) == list(training.OPTIMIZERS)
    modes = next(field for field in fields(schema.WandbTracking) if field.name == "mode").metadata["choices"]
    assert set(modes) == set(MODES)


def test_a_torchvision_network_is_chosen_by_its_name():
    assert compose("model=torchvision").model == schema.TorchvisionModel("resnet18", "torchvision", pretrained=False)
    config = compose("model=torchvision", "model.name=vgg11_bn")  # the zoo has this name too
    assert reload(OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))) == config
    assert config_hash(config) != config_hash(compose("model=vgg11_bn"))


def test_every_field_is_explained():
    lines = [line.strip() for line in Path(schema.__file__).read_text().splitlines()]
    schemas = {schema.Composition, *(owner for choices in SCHEMAS.values() for owner in choices.values())}
    for name in {field.name for owner in schemas for field in fields(owner)} - set(SCHEMAS):
        following = [lines[i + 1] for i, line in enumerate(lines) if line.startswith(f"{name}: ")]
        assert following and all(line.startswith('"""') for line in following), name


# What is refused, and how.


def test_a_configuration_survives_its_own_yaml(pool):
    for config in pool:
        assert reload(OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))) == config


def test_no_number_may_be_infinite_or_nan(pool):
    seen = set()
    for config in pool:
        for key, value, allowed in leaves(config):
            if "interval" in allowed:
                for bad in (math.nan, math.inf, -math.inf):
                    listed = isinstance(value, list) or value is None
                    message = refusal(check, changed(config, key, [bad] if listed else bad))
                    assert message.startswith(f"{key}[0]={bad}" if listed else f"{key}={bad}")
                seen.add(key)
    assert len(seen) > 25


def test_a_wrong_choice_is_named_with_the_right_ones(pool):
    for config in pool:
        for key, value, allowed in leaves(config):
            if "choices" in allowed:
                message = refusal(check, changed(config, key, f"{value}x"))
                right = ", ".join(allowed["choices"])
                assert message.startswith(f"{key}={value}x is not one of {right}; did you mean ")


@pytest.mark.parametrize(
    ("choice", "key", "value", "message"),
    [
        ("pruning=one_shot", "pruning.sparsity", 50, "pruning.sparsity=50.0 must be a number in [0, 1)"),
        ("pruning=one_shot", "pruning.sparsity", 1.0, "pruning.sparsity=1.0 must be a number in [0, 1)"),
        ("pruning=one_shot", "pruning.dense_epochs", 0, "dense_epochs=0 must be a number in [1, inf)"),
        ("pruning=one_shot", "pruning.dense_epochs", 1.5, "could not be converted to Integer"),
        ("pruning=one_shot", "pruning.ignore", ["a", "b", "a"], "names 'a' more than once"),
        ("pruning=one_shot", "pruning.optimizer_state", "kept", "is not one of carried, reset, fresh"),
        ("pruning=gradual", "pruning.window", "event", "is not one of cumulative, since_prune, ema, calibration"),
        ("pruning=one_shot", "pruning.ignore", [""], "pruning.ignore[0]='' must be a layer's name"),
        ("pruning=gradual", "pruning.start_step", 150, "start_step=150 must be below pruning.end_step=150"),
        ("pruning=iterative", "pruning.start_step", 0, "pruning.start_step=0 must be a number in [1, inf)"),
        ("pruning=iterative", "pruning.events", 0, "pruning.events=0 must be a number in [1, inf)"),
        ("pruning=iterative", "pruning.every", 0, "pruning.every=0 must be a number in [1, inf)"),
        ("pruning=threshold", "pruning.threshold", 0, "pruning.threshold=0.0 must be a number in (0, inf)"),
        ("dataset=mnist", "dataset.std", [0.3, 0.0], "dataset.std[1]=0.0 must be a number in (0, inf)"),
        ("dataset=mnist", "dataset.validation_fraction", 1, "must be a number in (0, 1)"),
        ("model=mlp", "model.widths", [8, 0], "model.widths[1]=0 must be a number in [1, inf)"),
        ("model=mlp", "model.widths", [], "model.widths=[] leaves nothing to prune"),
        ("model=mlp", "model.widths", 8, "model.widths must be a list"),
        ("model=mlp", "model.batch_norm", "perhaps", "model.batch_norm: "),
        ("model=vit_tiny", "model.heads", 5, "model.dim=192 must be a multiple of model.heads=5"),
        ("model=vit_tiny", "model.patch_size", 0, "model.patch_size=0 must be a number in [1, 8192]"),
        ("model=vgg11_bn", "model.width", 0, "model.width=0.0 must be a number in (0, 1024]"),
        ("model=mlp", "model.name", "resnet18", "write model=torchvision model.name=resnet18"),
        ("model=mlp", "model.name", "qqq", "model.name=qqq is not one of mlp, "),
        ("model=torchvision", "model.name", "mlp", "torchvision has no model 'mlp': choose it with model=mlp"),
        (
            "model=torchvision",
            "model.name",
            "resnte18",
            "model.name=resnte18: torchvision has no model 'resnte18': did",
        ),
        ("model=torchvision", "model.library", "torch", "model.library=torch is not one of mlp, "),
        ("optimizer=sgd", "optimizer.momentum", None, "optimizer.momentum: "),
        ("optimizer=sgd", "seed", True, "seed: "),
        ("optimizer=sgd", "device", "gpu", "device='gpu' must be auto, cpu, mps, cuda or cuda:N"),
        ("optimizer=sgd", "study", "..", "study='..' must be a name"),
        ("optimizer=sgd", "study", "a/b", "study='a/b' must be a name"),
        ("optimizer=sgd", "optimizer.name", "sdg", "is not one of sgd, adam, adamw; did you mean sgd?"),
        ("optimizer=sgd", "optimizer", "sgd", "optimizer has no value: choose optimizer=sgd|adam|adamw"),
    ],
)
def test_a_bad_value_is_refused_by_name(pool, choice, key, value, message):
    said = refusal(reload, with_key(chosen(pool, choice), key, value))
    assert message in said and len(said.splitlines()) == 1


def test_values_that_do_not_fit_together_are_refused(pool):
    nesterov = changed(chosen(pool, "optimizer=sgd"), "optimizer.nesterov", True)
    check(nesterov)
    said = refusal(check, changed(nesterov, "optimizer.momentum", 0.0))
    assert said == "optimizer.nesterov=true needs optimizer.momentum above 0, got 0"
    taylor = changed(chosen(pool, "pruning=one_shot"), "pruning.criterion", "taylor")
    check(taylor)
    assert "taylor needs gradients" in refusal(check, changed(taylor, "pruning.window", "calibration"))
    colour = changed(chosen(pool, "dataset=cifar10"), "dataset.mean", [0.5] * 3)
    check(colour)
    assert "one value per channel" in refusal(check, changed(colour, "dataset.std", [0.5]))


def test_all_bad_values_are_named_at_once(pool):
    config = changed(chosen(pool, "pruning=one_shot"), "pruning.scope", "all")
    said = refusal(check, changed(config, "pruning.sparsity", 2.0)).splitlines()
    assert [line.partition("=")[0] for line in said] == ["pruning.scope", "pruning.sparsity"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("pruning.sparsitty", "unknown key pruning.sparsitty: did you mean pruning.sparsity?"),
        ("pruning.every", "unknown key pruning.every: it exists only with pruning=gradual or iterative or threshold"),
        ("sparsity", "unknown key sparsity: did you mean pruning.sparsity?"),
        ("epoch", "unknown key epoch: did you mean epochs?"),
        ("optimizer.qqq", "unknown key optimizer.qqq: optimizer has name, lr, "),
        ("qqq", "unknown key qqq: the top level has dataset, "),
    ],
)
def test_an_attached_key_is_unknown_and_the_nearest_is_named(pool, key, message):
    assert refusal(reload, with_key(chosen(pool, "pruning=one_shot"), key, 0.9)).startswith(message)


def test_no_key_may_be_missing(pool):
    values = to_dict(pool[0])
    del values["optimizer"]["lr"]
    assert refusal(reload, values).startswith("optimizer.lr has no value")


# Hashes.


def test_hashes_see_what_influences_results_and_nothing_else(pool):
    neutral = {"study", "name", "runs", "trunks", "force", "progress", "checkpoint_steps", "checkpoint_minutes"}
    neutral |= {"dataset.root", "dataset.download"}
    for config in pool:
        assert re.fullmatch("[0-9a-f]{12}", config_hash(config))
        for key, value, allowed in leaves(config):
            group = key.partition(".")[0]
            if group in ("tracking", "pruning") or key in (f"{group}.name", "model.library"):
                continue
            other = changed(config, key, another(key, value, allowed))
            check(other)
            assert (config_hash(other) == config_hash(config)) == (key in neutral), key
            assert (trunk_hash(other) == trunk_hash(config)) == (key in neutral), key


def test_tracking_does_not_influence_results(pool):
    other = changed(pool[0], "tracking", pool[1].tracking)
    assert other != pool[0]
    assert config_hash(other) == config_hash(pool[0]) and trunk_hash(other) == trunk_hash(pool[0])


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        ("none", {"epochs", "trace_every"}),
        ("one_shot", {"dense_epochs", "trace_every"}),
        ("gradual", {"epochs", "start_step", "every", "trace_every"}),
        ("iterative", {"epochs", "start_step", "trace_every"}),
        ("threshold", {"epochs", "every", "trace_every"}),
        (
            "scratch",
            {
                "sparsity",
                "dense_epochs",
                "finetune_epochs",
                "min_neurons",
                "round_to",
                "approximate",
                "ignore",
                "trace_every",
            },
        ),
    ],
)
def test_the_trunk_is_what_precedes_the_first_event(pool, kind, before):
    config = chosen(pool, f"pruning={kind}")
    for key, value, allowed in leaves(config):
        if key.startswith("pruning.") and key != "pruning.name":
            other = changed(config, key, another(key, value, allowed))
            check(other)
            assert config_hash(other) != config_hash(config), key
            assert (trunk_hash(other) != trunk_hash(config)) == (key.partition(".")[2] in before), key


def test_where_the_first_event_is_also_the_last_its_step_counts(pool):
    config = changed(chosen(pool, "pruning=gradual"), "pruning.every", 1000)
    assert trunk_hash(config) != trunk_hash(changed(config, "pruning.end_step", 151))


def test_hashes_do_not_depend_on_how_a_number_is_written_or_keys_are_ordered(pool):
    config = changed(chosen(pool, "pruning=threshold"), "pruning.threshold", 1.0)
    values = with_key(config, "pruning.threshold", 1)
    assert config_hash(reload(dict(reversed(values.items())))) == config_hash(config)


# run.py.


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs run.py's main with a stand-in for the experiment; what ran is in `command.ran`."""
    ran, failures = [], {}

    def path_of(config):
        return tmp_path / "runs" / config_hash(config)

    def fake(config):
        ran.append(config)
        if config.seed in failures:
            raise failures[config.seed]
        RunDirectory.create(path_of(config), aside=True).write_summary({})

    stand_in = SimpleNamespace(run=fake, run_path=path_of, USER_ERRORS=(ConfigError, PruningError, ResultsError))
    monkeypatch.setattr(tnvp, "experiment", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "tnvp.experiment", stand_in)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # main may set it; so it is undone

    def call(*arguments):
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        status = run.main()
        printed = capsys.readouterr()
        written = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert set(written) <= ({"multirun.yaml", "outcome.json", "summary.json"} if ran else set())
        return status, printed.out, printed.err

    call.ran, call.failures = ran, failures
    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("dataset=mnits", "dataset=mnits is not one of cifar10, cifar100, digits, "),
        ("experiment=none", "experiment=none is not one of cifar_cnn, cifar_mlp, cifar_resnet20, "),
        ("pruning.sparsitty=0.9", "unknown key pruning.sparsitty: did you mean pruning.sparsity?"),
        ("+pruning.sparsitty=0.9", "unknown key pruning.sparsitty: did you mean pruning.sparsity?"),
        ("experiment=cifar_mlp model=tutorial_cnn", "In 'experiment/cifar_mlp': unknown key model.widths: "),
        ("seed=abc", "seed: Value 'abc' of type 'str' could not be converted to Integer"),
        ("pruning.ignore=fc1", "pruning.ignore must be a list"),
        ("pruning.sparsity=50", "pruning.sparsity=50.0 must be a number in [0, 1)"),
        ("seed=0,1", "Ambiguous value for argument 'seed=0,1'"),
        ("seed==1", "Error parsing override 'seed==1'"),
        ("dataset=null", "Config group override must be a string"),
        ("+dataset=mnist", "Multiple values for dataset: choose without +"),
        ("~pruning", "pruning has no value: choose pruning=none|one_shot|gradual|iterative|threshold|scratch"),
        ("-m seed=0 hydra/launcher=nope", "hydra/launcher=nope is not one of basic"),
        ("-m dataset=glob(x*)", "dataset=glob(x*) has no values"),
        ("-m seed=0,1 pruning.sparsity=0.5,1.5", "pruning.sparsity=1.5 must be a number in [0, 1)"),
        ("-m seed=0,1 dataset=digits,mnits", "dataset=mnits is not one of"),
        ("--cfg job dataset=mnits", "dataset=mnits is not one of"),
    ],
)
def test_a_bad_command_gets_one_message_and_status_2(command, arguments, message):
    status, out, err = command(*arguments.split())
    assert status == 2 and out == "" and not command.ran
    assert err.startswith(message)
    assert len(err.splitlines()) <= 4 and "Traceback" not in err and "HYDRA" not in err


def test_a_sweep_runs_every_combination(command):
    status, _, err = command("pruning.sparsity=0.5,0.9", "-m", "seed=0,1", "batch_size=64")
    assert status == 0 and {c.batch_size for c in command.ran} == {64}
    assert [(c.pruning.sparsity, c.seed) for c in command.ran] == [(0.5, 0), (0.5, 1), (0.9, 0), (0.9, 1)]
    assert err.splitlines()[2] == "[3/4] pruning.sparsity=0.9 seed=0 batch_size=64"


def test_keys_of_a_swept_choice_may_be_set(command):
    status, _, _ = command("-m", "optimizer=adam,adamw", "optimizer.beta1=0.8")
    assert status == 0 and [c.optimizer.name for c in command.ran] == ["adam", "adamw"]


def test_a_failed_point_is_reported_and_the_others_run(command):
    command.failures[1] = PruningError("nothing prunable")
    status, _, err = command("-m", "seed=0,1,2")
    assert status == 2 and len(command.ran) == 3
    assert err.splitlines()[:4] == ["[1/3] seed=0", "[2/3] seed=1", "nothing prunable", "[3/3] seed=2"]
    assert err.splitlines()[4:] == [
        "3 runs: 2 done, 1 failed",
        "  done    seed=0",
        "  failed  seed=1  (nothing prunable)",
        "  done    seed=2",
    ]


def test_a_bug_keeps_its_traceback(command):
    command.failures[0] = ValueError("a bug")
    status, _, err = command()
    assert status == 1 and "Traceback" in err and err.endswith("ValueError: a bug\n")


def test_an_interrupt_ends_a_sweep(command):
    command.failures[0] = KeyboardInterrupt()
    status, _, err = command("-m", "seed=0,1")
    assert status == 130 and len(command.ran) == 1 and "Traceback" not in err
    assert err.splitlines()[-3:] == [
        "2 runs: 2 not finished",
        "  not finished  seed=0  (interrupted)",
        "  not finished  seed=1  (not started)",
    ]


def test_help_lists_the_choices(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command("--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "\npruning: gradual, iterative, none, one_shot, scratch, threshold\n" in out and "schema:" not in out
    assert not command.ran


def test_the_script_runs_from_anywhere(tmp_path):
    command = [sys.executable, REPOSITORY / "run.py", "pruning.criterion=varience"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stdout == "" and not list(tmp_path.iterdir())
    assert ended.stderr.startswith("pruning.criterion=varience is not one of variance, ")
    assert ended.stderr.endswith("; did you mean variance?\n") and ended.stderr.count("\n") == 1
