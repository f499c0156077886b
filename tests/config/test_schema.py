"""Keys by dotted path: definitions, defaults and classes for resume."""

from dataclasses import dataclass

import pytest

from phasetrain.config.schema import Schema, default_schema, matches, part_pattern
from phasetrain.config.sections.keys import group, key

SCHEMA = default_schema()


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = key(3, "size in pixels", resume="adjustable", ge=1)


@dataclass(frozen=True, kw_only=True)
class Root:
    RUN: Inner = group(Inner)
    METERS: dict = key({}, "label -> meter", resume="forbidden")


def test_keys_come_from_the_fields_of_the_sections() -> None:
    schema = Schema(Root)
    assert schema.sections == ("RUN", "METERS")
    assert schema.defaults == {"RUN": {"size": 3}, "METERS": {}}
    found = schema.keys["RUN.size"]
    assert (found.type.text, found.resume, found.meaning, found.default) == (
        "int >= 1",
        "adjustable",
        "size in pixels",
        3,
    )


def test_problem_names_the_type() -> None:
    assert SCHEMA.problem("DATA.TRAIN.batch_size", 0) == "expected int >= 1"
    assert SCHEMA.problem("DATA.TRAIN.batch_size", 64) is None
    assert SCHEMA.problem("MODEL.depth", "anything") is None


def test_other_splits_have_the_keys_of_test() -> None:
    assert SCHEMA.key("DATA.VAL_2.batch_size") is SCHEMA.keys["DATA.TEST.batch_size"]
    assert SCHEMA.key("DATA.val.batch_size") is None
    assert "batch_size" in SCHEMA.children("DATA.VAL")
    assert SCHEMA.children("DATA.val") == ()


def test_children_are_the_names_right_below() -> None:
    assert SCHEMA.children("")[:2] == ("RUN", "DATA")
    assert SCHEMA.children("PHASES.test_every") == ("epochs", "updates", "when")
    assert SCHEMA.children("METERS") == ()
    assert SCHEMA.children("RUN.seed") == ()


@pytest.mark.parametrize(
    ("path", "resume"),
    [
        ("RUN.seed", "forbidden"),
        ("DATA.TRAIN.batch_size", "adjustable"),
        ("DATA.VAL.workers", "free"),
        ("DATA.TRAIN.split", "forbidden"),
        ("DATA.VAL", "forbidden"),
        ("MODEL.depth", "forbidden"),
        ("METERS.accuracy.top", "forbidden"),
        ("HOOKS", "free"),
        ("HOOKS.console.every_steps", "free"),
        ("HOOKS.anything.every_steps", "adjustable"),
        ("HOOKS.plateau.factor", "adjustable"),
        ("OPTIMIZER.lr", "adjustable"),
        ("OPTIMIZER.momentum", "forbidden"),
        ("OPTIMIZER.SCHEDULES.lr.name", "adjustable"),
        ("OPTIMIZER.scaler.init_scale", "forbidden"),
    ],
)
def test_resume_class_of_a_path(path: str, resume: str) -> None:
    assert SCHEMA.resume(path) == resume


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("RUN.seed", "result"),
        ("RUN.imports", "result"),
        ("RUN.name", "run"),
        ("RUN.dir", "command"),
        ("RUN.pause_at", "command"),
        ("DATA.TRAIN.workers", "machine"),
        ("DATA.VAL_2.prefetch", "machine"),
        ("DATA.TRAIN.split", "result"),
        ("MODEL.depth", "result"),
        ("MACHINE.threads", "result"),
        ("LAUNCH.parameters.constraint", "machine"),
        ("LAUNCH.processes", "result"),
        ("CHECKPOINT.keep_every.epochs", "run"),
        # Which earlier checkpoints are kept, and which weights the run ends with.
        ("CHECKPOINT.best.keep", "result"),
        ("CHECKPOINT.load_best", "result"),
        ("HOOKS.console.every_steps", "result"),
        ("PHASES.extend", "run"),
        ("PHASES.epochs", "result"),
    ],
)
def test_scope_of_a_path(path: str, scope: str) -> None:
    assert SCHEMA.scope(path) == scope


def test_keys_in_which_any_two_runs_may_differ() -> None:
    own = [path for path in SCHEMA.keys if SCHEMA.is_of_one_run(path) and path != "RUN.step"]
    names = ("name", "dir", "engine", "resume", "checkpoint", "pause_at", "allow")
    assert own == [f"RUN.{name}" for name in names]


def test_a_key_about_the_result_has_to_say_what_a_resume_does() -> None:
    assert key(1, "number of jobs", scope="machine").metadata["resume"] == "free"
    with pytest.raises(AssertionError, match="number of samples"):
        key(1, "number of samples")


def test_a_key_that_says_nothing_about_results_is_free() -> None:
    keys = [key for key in SCHEMA.keys.values() if key.scope != "result"]
    # What a change of the length means is decided on a resume.
    assert [key.path for key in keys if key.resume != "free"] == ["PHASES.extend"]


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("LOSS", "LOSS"),
        ("DATA.TRAIN", "DATA.*"),
        ("DATA.train", None),
        ("DATA.TEST.collate", "DATA.*.collate"),
        ("METERS.accuracy", "METERS.*"),
        ("METERS.accuracy.top", None),
        ("OPTIMIZER.SCHEDULES.lr", "OPTIMIZER.SCHEDULES.*"),
        ("RUN", None),
    ],
)
def test_paths_of_parts_match_their_pattern(path: str, pattern: str | None) -> None:
    assert part_pattern(path) == pattern


def test_matches_compares_each_name() -> None:
    assert matches("HOOKS.console", "HOOKS.*")
    assert not matches("HOOKS", "HOOKS.*")
    assert not matches("METERS.console", "HOOKS.*")
