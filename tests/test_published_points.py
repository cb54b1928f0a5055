"""Published rows are runs of the points that study.yaml declares, and each declared point is published."""

import copy
import itertools
import json

import pandas as pd
import pytest

from tnvp import results, study
from tnvp.config import NEUTRAL, NEUTRAL_OF_DATASET, Config, compose, config_hash, to_dict
from tnvp.declaration import Sweep, text
from tnvp.schema import SCHEMAS

NAMES = [name for name in study.study_names() if (study.EXPERIMENTS / name / "results.csv").exists()]
# Tables of before these fields were there, when runs did what the values say: hashes differ, results don't. Batch norms
# are measured anew only where there are any, and LeNet-300-100 has none.
EARLIER = {"compensation", "mnist_mlp", "one_shot"}
YOUNGER = {"config.pruning.optimizer_state": "carried", "config.pruning.warmup_steps": 50}
WITHOUT_EFFECT = {"config.pruning.bn_recalibrate"}


def configs(sweep: Sweep) -> list[Config]:
    """The configuration of each point. Hydra composes one for each choice of groups; what varies else is set in copies, in a hundredth of the time."""
    choices = {key: values for key, values in sweep.axes.items() if key in SCHEMAS}
    fields = {key: values for key, values in sweep.axes.items() if key not in SCHEMAS}
    found = []
    for choice in itertools.product(*choices.values()):
        words = [f"{key}={text(value)}" for key, value in zip(choices, choice, strict=True)]
        (composed,) = compose(
            study.REPOSITORY / "conf",
            [[*sweep.base, *words, *(f"{key}={text(values[0])}" for key, values in fields.items())]],
        )
        for point in itertools.product(*fields.values()):
            found.append(copy.deepcopy(composed))
            for key, value in zip(fields, point, strict=True):
                *groups, last = key.split(".")
                place = found[-1]
                for group in groups:
                    place = getattr(place, group)
                setattr(place, last, type(getattr(place, last))(value))
    return found


def test_points_that_are_set_are_those_that_hydra_composes():
    axes = {"optimizer": ["sgd", "adamw"], "pruning.sparsity": [0.25, 0.5], "seed": [0, 3]}
    sweep = Sweep(["experiment=digits", "pruning.finetune_epochs=1"], axes)
    assert configs(sweep) == compose(study.REPOSITORY / "conf", sweep.points())


def fields(config: Config) -> dict:
    """What influences results, as the columns of a table have it."""
    flat = dict(results._flat(to_dict(config), "config"))
    neutral = {*(f"config.{key}" for key in NEUTRAL), *(f"config.dataset.{key}" for key in NEUTRAL_OF_DATASET)}
    return {key: value for key, value in flat.items() if key not in neutral and not key.startswith("config.tracking.")}


def plain(value) -> object:
    """A value of a table or of a configuration, the same of both: 10 and 10.0, False and "False", none and NaN."""
    if pd.isna(value):
        return ""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", NAMES)
def test_published_rows_are_the_declared_points(name):
    declared = study.read(name)
    if declared.search:
        pytest.skip("a search draws its points")
    points, table = [config for sweep in declared.sweeps for config in configs(sweep)], pd.read_csv(declared.table_path)
    assert len(table) == len(points)
    assert set(table["run"].str.rsplit("-", n=1).str[-1]) == set(table["config_hash"]), "a row is named by its hash"
    if name not in EARLIER:
        assert set(table["config_hash"]) == {config_hash(config) for config in points}
        return
    ours = [fields(config) for config in points]
    keys = sorted({key for point in ours for key in point} - WITHOUT_EFFECT)
    assert all(point.get(key, value) == value for key, value in YOUNGER.items() for point in ours)
    rows = table.assign(**{key: table.get(key, pd.NA) for key in keys})
    for key, value in YOUNGER.items():
        has = rows["config.pruning.name"] == "one_shot"
        rows[key] = rows[key].astype(object).where(rows[key].notna() | ~has, value)
    published = {json.dumps([plain(value) for value in row]) for row in rows[keys].to_numpy(dtype=object)}
    assert published == {json.dumps([plain(point.get(key)) for key in keys]) for point in ours}
