import json
import subprocess
import sys

import pytest

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.changes import ABSENT, Change, compare_configs, trajectory_digest
from phasetrain.config.compose.composed import compose
from phasetrain.config.schema import default_schema

SCHEMA = default_schema()
LITERAL = {
    "RUN": {"seed": 3, "name": "x"},
    "LOSS": {"name": "mse", "weights": (1.0, 0.5)},
    "METERS": {"b": {}, "a": {}},
}


def config(*overrides: str) -> dict:
    return compose(overrides).config


def changes(*overrides: str) -> list[Change]:
    return compare_configs(config(), config(*overrides), SCHEMA)


def test_equal_configs_have_no_changes() -> None:
    assert changes() == []
    assert compare_configs(config(), AttrDict(config()), SCHEMA) == []
    assert compare_configs(config(), json.loads(json.dumps(config())), SCHEMA) == []


def test_each_changed_leaf_has_its_resume_class() -> None:
    assert changes(
        "OPTIMIZER.lr=0.5", "RUN.seed=1", "DATA.TRAIN.workers=2", "HOOKS.console.every_steps=3"
    ) == [
        Change("RUN.seed", 0, 1, "forbidden"),
        Change("DATA.TRAIN.workers", 0, 2, "free"),
        Change("OPTIMIZER.lr", 0.1, 0.5, "adjustable"),
        Change("HOOKS.console.every_steps", ABSENT, 3, "free"),
    ]


def test_numbers_are_compared_by_value_and_lists_as_leaves() -> None:
    assert compare_configs({"OPTIMIZER": {"lr": 1}}, {"OPTIMIZER": {"lr": 1.0}}, SCHEMA) == []
    assert (
        compare_configs({"MODEL": {"hidden": (1, 2)}}, {"MODEL": {"hidden": [1, 2.0]}}, SCHEMA)
        == []
    )
    assert compare_configs(
        {"MODEL": {"hidden": [1, 2]}}, {"MODEL": {"hidden": [2, 1]}}, SCHEMA
    ) == [Change("MODEL.hidden", [1, 2], [2, 1], "forbidden")]
    assert len(compare_configs({"MODEL": {"bias": True}}, {"MODEL": {"bias": None}}, SCHEMA)) == 1


def test_missing_key_counts_as_its_default() -> None:
    assert compare_configs(
        {"OPTIMIZER": {}}, {"OPTIMIZER": {"lr": 0.1, "clip_norm": 1.0}}, SCHEMA
    ) == [Change("OPTIMIZER.clip_norm", None, 1.0, "forbidden")]
    older = {key: value for key, value in config().items() if key != "PHASES"}
    assert [change.path for change in compare_configs(older, config(), SCHEMA)] == ["PHASES.epochs"]


def test_labels_and_splits_are_added_and_removed_as_a_whole() -> None:
    assert changes("METERS.accuracy=null", "METERS.top5={name: accuracy, top: 5}") == [
        Change("METERS.accuracy", {}, ABSENT, "forbidden"),
        Change("METERS.top5", ABSENT, {"name": "accuracy", "top": 5}, "forbidden"),
    ]
    (change,) = changes("DATA.TEST=null")
    assert (change.path, change.new, change.resume) == ("DATA.TEST", ABSENT, "forbidden")
    (change,) = changes("OPTIMIZER.SCHEDULES.lr=null")
    assert (change.path, change.resume) == ("OPTIMIZER.SCHEDULES.lr", "adjustable")


def test_name_alone_equals_the_mapping_with_the_name() -> None:
    assert compare_configs(config(), config("DATA.TRAIN.collate={name: stack}"), SCHEMA) == []
    assert changes("DATA.TRAIN.collate={name: stack, pad: 1}") == [
        Change("DATA.TRAIN.collate.pad", ABSENT, 1, "forbidden")
    ]


def test_the_digest_is_eight_hex_digits_and_stable() -> None:
    assert trajectory_digest(LITERAL, SCHEMA) == "4319f659"


@pytest.mark.parametrize(
    "override",
    ["DATA.TRAIN.workers=2", "HOOKS.console=null", "RUN.name=other", "MACHINE.threads=1", "OPTIMIZER.lr=0.1",
     "OPTIMIZER.weight_decay=0", "DATA.TRAIN.collate={name: stack}", "CHECKPOINT.keep_last=9"],
)  # fmt: skip
def test_what_does_not_shape_the_run_keeps_the_digest(override: str) -> None:
    assert trajectory_digest(config(override), SCHEMA) == trajectory_digest(config(), SCHEMA)


@pytest.mark.parametrize(
    "override",
    ["RUN.seed=1", "OPTIMIZER.lr=0.2", "PHASES.epochs=3", "MODEL.width=8", "METERS.loss=null", "DATA.TEST=null",
     "LOSS=label_smoothing", "DATA.TRAIN.transforms=[flatten]", "OPTIMIZER.SCHEDULES.lr.warmup=0.2"],
)  # fmt: skip
def test_forbidden_and_adjustable_keys_change_the_digest(override: str) -> None:
    assert trajectory_digest(config(override), SCHEMA) != trajectory_digest(config(), SCHEMA)


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    one = {"METERS": {"a": {}, "b": {"k": 1}}, "RUN": {"seed": 1}}
    other = {"RUN": {"seed": 1}, "METERS": {"b": {"k": 1}, "a": {}}}
    assert trajectory_digest(one, SCHEMA) == trajectory_digest(other, SCHEMA)


def test_digest_does_not_depend_on_the_process() -> None:
    code = (
        "from phasetrain.config.changes import trajectory_digest as digest;"
        "from phasetrain.config.schema import default_schema as schema;"
        f"print(digest({LITERAL!r}, schema()))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == trajectory_digest(LITERAL, SCHEMA)
