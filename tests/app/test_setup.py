"""What is settled before data is opened."""

from pathlib import Path

import pytest
from raising import raises

from phasetrain.app.setup import describe_dropped, resolve_config
from phasetrain.app.slots import list_slots
from phasetrain.config.schema import PARTS
from phasetrain.engine.plan import PhaseSettings
from phasetrain.errors import ConfigError
from phasetrain.tasks.build.data_builder import phase_settings


def test_the_default_experiment() -> None:
    setup = resolve_config([])
    assert setup.config.RUN.name == "digits"
    assert setup.config.MODEL.name == "small_cnn"
    assert (setup.machine.device.type, setup.machine.precision, setup.machine.threads) == (
        "cpu",
        "fp32",
        1,
    )
    assert phase_settings(setup.config) == PhaseSettings(epochs=12, test_every_epochs=1)
    assert (setup.world.rank, setup.world.size) == (0, 1)


def test_lines_about_what_was_dropped_and_derived() -> None:
    setup = resolve_config(["MODEL.name=mlp"])
    assert setup.dropped == (
        "MODEL.width = 32 (MODEL/small_cnn.yaml) dropped: MODEL.name is now 'mlp' (command line)",
        "MODEL.dropout = 0.1 (experiment/digits.yaml) dropped: MODEL.name is now 'mlp' (command line)",
    )
    assert "DATA.TRAIN.micro_batch_size: null -> 64 (batch_size in one piece)" in setup.derived


def test_what_follows_from_other_values_was_not_asked_for() -> None:
    setup = resolve_config(["DATA.TRAIN.batch_size=32"])
    assert setup.config.DATA.TRAIN.micro_batch_size == 32
    assert setup.asked["DATA"]["TRAIN"]["micro_batch_size"] is None
    assert setup.asked["DATA"]["TRAIN"]["batch_size"] == 32
    assert setup.asked["OPTIMIZER"]["momentum"] == 0.9


def test_everything_wrong_at_once_with_broken_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "breaks_at_once.py").write_text("raise RuntimeError('no licence')\n")
    with pytest.raises(ConfigError) as caught:
        resolve_config(["RUN.imports=[breaks_at_once]", "OPTIMIZER.lrr=1", "LOSS.name=nothing"])
    for text in ("breaks_at_once", "no licence", "OPTIMIZER.lrr", "LOSS.name"):
        assert text in str(caught.value)


@pytest.mark.addon("sampling", "vision")
def test_every_section_that_names_a_part_has_a_slot() -> None:
    assert PARTS.keys() <= {slot.path for slot in list_slots()}
    assert {slot.path for slot in list_slots()} == {
        "TASK",
        "TASK.judge",
        "TASK.teacher",
        "MODEL",
        "MODEL.adapters",
        "MODEL.trunk",
        "MODEL.head",
        "MODEL.heads.*",
        "MODEL.predictor",
        "LOSS",
        "LOSS.losses.*",
        "METERS.*",
        "OPTIMIZER",
        "OPTIMIZER.SCHEDULES.*",
        "OPTIMIZER.SCHEDULES.*.parts[]",
        "OPTIMIZER.groups[].SCHEDULES.*",
        "OPTIMIZER.groups[].SCHEDULES.*.parts[]",
        "OPTIMIZER.others.*",
        "OPTIMIZER.others.*.SCHEDULES.*",
        "OPTIMIZER.others.*.SCHEDULES.*.parts[]",
        "OPTIMIZER.others.*.groups[].SCHEDULES.*",
        "OPTIMIZER.others.*.groups[].SCHEDULES.*.parts[]",
        "OPTIMIZER.scaler",
        "DATA.*",
        "DISTRIBUTED",
        "DATA.*.datasets.*",
        "DATA.*.transforms[]",
        "DATA.*.transforms[].transforms[]",
        "DATA.*.transforms[].groups[].transforms[]",
        "DATA.*.transforms[].groups[].transforms[].transforms[]",
        "DATA.TRAIN.batch_transforms[]",
        "DATA.TRAIN.batch_transforms[].transforms[]",
        "DATA.*.sampler",
        "DATA.*.collate",
        "DATA.*.loader",
        "HOOKS.*",
    }


def test_unknown_parameter_is_answered_without_facts_of_the_run() -> None:
    with raises(
        ConfigError, key="OPTIMIZER.SCHEDULES.lr.strat", code="config.unknown_parameter"
    ) as caught:
        resolve_config(["OPTIMIZER.SCHEDULES.lr.strat=1"])
    assert "It takes: end, warmup, warmup_start" in str(caught.value)


def test_parameter_is_not_mistaken_for_a_remote_key() -> None:
    with raises(ConfigError, key="LOSS.queue", suggestion=""):
        resolve_config(["LOSS.queue=3"])


def test_dropped_parameters_have_one_line_without_those_that_are_set_again() -> None:
    words = ["OPTIMIZER.name=adamw", "OPTIMIZER.weight_decay=0.1", "MODEL.name=mlp"]
    line = describe_dropped(resolve_config(words))
    for path in ("OPTIMIZER.momentum", "OPTIMIZER.nesterov", "MODEL.width", "MODEL.dropout"):
        assert path in line
    assert "weight_decay" not in line
    assert describe_dropped(resolve_config([])) == ""


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["RUN.name=n${RUN.sed}"], "RUN.name"),
        (["PHASES.updates=None"], "PHASES.updates"),
        (["PHASES.epochs=ten"], "PHASES.epochs"),
        (["DATA.TRAIN.batch_size=x", "OPTIMIZER.accumulate=3"], "DATA.TRAIN.batch_size"),
    ],
)
def test_what_follows_from_a_mistake_is_not_reported(words: list[str], key: str) -> None:
    with raises(ConfigError, key=key) as caught:
        resolve_config(words)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        (
            "OPTIMIZER.SCHEDULES.lr={name: composite, parts: [{name: linear, lenght: 1}, "
            "{name: cosin}]}",
            {"OPTIMIZER.SCHEDULES.lr.parts[0].lenght", "OPTIMIZER.SCHEDULES.lr.parts[1].name"},
        ),
        pytest.param(
            "DATA.TRAIN.transforms=[{name: multi_crop, groups: [{views: 2, transforms: "
            "[random_shft, {name: noise, st: 1}]}]}]",
            {
                "DATA.TRAIN.transforms[0].groups[0].transforms[0]",
                "DATA.TRAIN.transforms[0].groups[0].transforms[1].st",
            },
            marks=pytest.mark.addon("vision"),
        ),
        (
            "DATA.TRAIN.transforms=[{name: apply, transforms: [noize, {name: noise, sdt: 1}]}]",
            {
                "DATA.TRAIN.transforms[0].transforms[0]",
                "DATA.TRAIN.transforms[0].transforms[1].sdt",
            },
        ),
        pytest.param(
            "DATA.TRAIN.transforms=[{name: multi_crop, groups: [{views: 2, transforms: "
            "[{name: apply, transforms: [noize, {name: noise, sdt: 1}]}]}]}]",
            {
                "DATA.TRAIN.transforms[0].groups[0].transforms[0].transforms[0]",
                "DATA.TRAIN.transforms[0].groups[0].transforms[0].transforms[1].sdt",
            },
            marks=pytest.mark.addon("vision"),
        ),
        pytest.param(
            "DATA.TRAIN.batch_transforms=[{name: one_of, transforms: [mixip]}, "
            "{name: each_view, transforms: [{name: cutmix, alhpa: 1}]}]",
            {
                "DATA.TRAIN.batch_transforms[0].transforms[0]",
                "DATA.TRAIN.batch_transforms[1].transforms[0].alhpa",
            },
            marks=pytest.mark.addon("vision"),
        ),
        pytest.param(
            "DATA.TRAIN={dataset: mixed, datasets: {a: {dataset: digts}, b: {dataset: idx, "
            "image: x}}}",
            {"DATA.TRAIN.datasets.a.dataset", "DATA.TRAIN.datasets.b.image"},
            marks=pytest.mark.addon("sampling"),
        ),
    ],
)
def test_all_mistakes_in_parts_of_parts_are_reported(word: str, keys: set[str]) -> None:
    with raises(ConfigError) as caught:
        resolve_config([word])
    assert {problem.key for problem in caught.value.problems} == keys
    assert all(problem.suggestion for problem in caught.value.problems)


@pytest.mark.parametrize(("word", "compiles"), [("true", True), ("false", False)])
def test_compile_is_switched_by_a_boolean(word: str, compiles: bool) -> None:
    setup = resolve_config([f"MACHINE.compile={word}"])
    assert (setup.config.MACHINE.compile is not None) == compiles


def test_a_split_that_loses_the_default_dataset_says_so() -> None:
    with raises(ConfigError, key="DATA.TRAIN", code="config.missing_dataset") as caught:
        resolve_config(["DATA.TEST.dataset=idx"])
    assert "default experiment" in str(caught.value)
