import pytest
from omegaconf import OmegaConf

from phasetrain.config.schema import Schema, ValueType, default_schema, matches, part_pattern

SCHEMA = default_schema()

TINY = """\
RUN:
  seed: 0   # int >= 0 | forbidden | the seed

DATA:
  TRAIN:
    batch_size: 64  # int >= 1 | adjustable | samples
  TEST:             # a split
    workers: 0      # int >= 0 | free | processes
    collate: stack  # str or mapping | forbidden | how
"""


@pytest.mark.parametrize("path", sorted(SCHEMA.keys))
def test_each_default_fits_its_own_type_and_has_a_class_and_a_meaning(path: str) -> None:
    key = SCHEMA.keys[path]
    assert key.type.fits(key.default)
    assert key.resume in ("forbidden", "adjustable", "free")
    assert len(key.meaning) > 3


def test_every_leaf_of_the_defaults_is_a_key() -> None:
    def leaves(node: dict, path: str = "") -> set[str]:
        found = set()
        for name, value in node.items():
            here = f"{path}.{name}" if path else name
            found |= leaves(value, here) if isinstance(value, dict) and value else {here}
        return found

    assert leaves(SCHEMA.defaults) == set(SCHEMA.keys)
    assert len(SCHEMA.keys) > 40


def test_reads_the_three_columns() -> None:
    key = Schema(TINY).keys["DATA.TRAIN.batch_size"]
    assert (key.type.text, key.resume, key.meaning, key.default) == (
        "int >= 1",
        "adjustable",
        "samples",
        64,
    )


def test_defaults_are_read_as_omegaconf_reads_numbers() -> None:
    schema = Schema("A:\n  eps: 1e-3  # float > 0 | free | small\n")
    assert schema.keys["A.eps"].default == 0.001
    assert schema.defaults == OmegaConf.to_container(OmegaConf.create({"A": {"eps": 0.001}}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "  lr: 0.1",
            "line 2: A.lr needs `# type | forbidden or adjustable or free | meaning`, not ''",
        ),
        ("  lr: 0.1  # float | sometimes | rate", "line 2: A.lr needs"),
        ("  lr: 0.1  # float | free |", "line 2: A.lr needs"),
        ("  lr: 0.1  # flaot | free | rate", "line 2: A.lr: 'flaot' is no type; known: int, float"),
        ("  lr: 0.1  # int | free | rate", "line 2: A.lr = 0.1 is not int"),
        ("  - 3", "line 2: expected `key: value"),
    ],
)
def test_a_key_without_a_valid_comment_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Schema(f"A:\n{line}\n")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("int >= 1", [1, 2], [0, True, 1.0, "1", None]),
        ("float > 0 or null", [0.5, 1, None], [0, False, "1e-3", float("nan")]),
        ("float >= 0 and < 1", [0, 0.999], [1, -0.1]),
        ("bool", [True, False], [0, 1, "true"]),
        ("str", ["", "a"], [None, 1]),
        ("'auto' or 'cpu'", ["auto", "cpu"], ["cuda", 0]),
        ("list of str", [[], ["a"], ("a",)], ["a", [1], [None]]),
        ("list", [[], [1]], ["a", {}]),
        ("mapping", [{}, {"a": 1}], [[], None]),
    ],
)
def test_value_types(text: str, good: list, bad: list) -> None:
    kind = ValueType.parse(text)
    assert [value for value in good if not kind.fits(value)] == []
    assert [value for value in bad if kind.fits(value)] == []


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
        ("HOOKS.anything.every_steps", "free"),
        ("HOOKS.plateau", "adjustable"),
        ("HOOKS.plateau.factor", "adjustable"),
        ("OPTIMIZER.lr", "adjustable"),
        ("OPTIMIZER.momentum", "forbidden"),
        ("OPTIMIZER.SCHEDULES.lr.name", "adjustable"),
        ("OPTIMIZER.scaler.init_scale", "forbidden"),
    ],
)
def test_class_for_resume_of_any_path(path: str, resume: str) -> None:
    assert SCHEMA.resume(path) == resume


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
def test_places_of_parts(path: str, pattern: str | None) -> None:
    assert part_pattern(path) == pattern


def test_matches_compares_each_name() -> None:
    assert matches("HOOKS.console", "HOOKS.*")
    assert not matches("HOOKS", "HOOKS.*")
    assert not matches("METERS.console", "HOOKS.*")
