"""What is wrong with a run, all of it at once, and what in it never takes effect."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, train
from raising import raises

from phasetrain.app.preflight.validate import (
    check_room,
    find_problems,
    list_monitors,
    list_unused,
    report_all_problems,
)
from phasetrain.cli import main
from phasetrain.errors import ConfigError
from phasetrain.runs.folder import RunFolder
from phasetrain.testing.build import build_run, resolve_overrides


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), []),
        (
            ("CHECKPOINT.every_updates=16",),
            ["CHECKPOINT.every_updates = 16: the run ends after 15 updates"],
        ),
        (("CHECKPOINT.every_updates=15",), []),
        (
            ("CHECKPOINT.every_epochs=4",),
            ["CHECKPOINT.every_epochs = 4: the run ends after 3 complete epochs"],
        ),
        (("CHECKPOINT.keep_every.updates=99",), ["CHECKPOINT.keep_every.updates = 99"]),
        (("RUN.checkpoint=best",), ["RUN.checkpoint = best: training does not read it"]),
        pytest.param(
            ("RUN.step=5",),
            ["RUN.step = 5: training does not read it"],
            marks=pytest.mark.addon("experiments"),
        ),
        (("RUN.pause_at=16",), ["RUN.pause_at = 16: the run ends after 15 updates"]),
        (
            ("PHASES.test_every.epochs=5",),
            ["PHASES.test_every.epochs = 5: the run ends after 3 epochs"],
        ),
        (
            ("PHASES.test_every.updates=50",),
            ["PHASES.test_every.updates = 50: the run ends after 15 updates"],
        ),
        (
            ("PHASES.limit.train=100",),
            ["PHASES.limit.train = 100: no epoch has more than 60 updates"],
        ),
        (("DATA.TEST=null", "PHASES.test_every.epochs=5"), []),
        (
            ("DATA.TEST=null", "PHASES.train_meters=false"),
            ["METERS: PHASES.train_meters = false and there is no test"],
        ),
        (
            ("CHECKPOINT.every_epochs=null", "CHECKPOINT.at_end=false"),
            ["CHECKPOINT: no rule saves a checkpoint"],
        ),
        (
            (
                "CHECKPOINT.every_epochs=null",
                "CHECKPOINT.at_end=false",
                "CHECKPOINT.every_minutes=5",
            ),
            [],
        ),
        (
            (
                "PHASES.epochs=null",
                "PHASES.stages=[{epochs: 1}, {epochs: 1, PHASES: {limit: {train: 3}}}]",
            ),
            [],
        ),
        (("PHASES.epochs=0",), []),
        (("LAUNCH.gpus=2", "LAUNCH.partition=a"), ["LAUNCH.gpus = 2: ", "LAUNCH.partition = 'a'"]),
        (("LAUNCH.gpus=2", "LAUNCH.cluster=slurm"), []),
    ],
)
def test_settings_without_effect_are_listed(words: tuple[str, ...], told: list[str]) -> None:
    overrides = [*SMALL, "RUN.dir=x", *words]
    found = list_unused(resolve_overrides(overrides), build_run(overrides).plan)
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True)), found


def test_a_run_warns_of_it_and_goes_on(tmp_path: Path) -> None:
    assert train(tmp_path, "PHASES.epochs=1", "CHECKPOINT.every_updates=99").state == "finished"
    assert "CHECKPOINT.every_updates = 99: " in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "refused"), [((), True), (("CHECKPOINT.every_epochs=null",), False)]
)
def test_a_run_that_keeps_nothing_needs_no_room(
    tmp_path: Path,
    words: tuple[str, ...],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    overrides = [*SMALL, f"RUN.dir={tmp_path}", "CHECKPOINT.at_end=false", *words]
    folder = RunFolder(str(tmp_path))
    monkeypatch.setattr(folder.space, "free_bytes", lambda: 1_000)
    with pytest.raises(ConfigError, match="1,000 bytes are free") if refused else nullcontext():
        check_room(resolve_overrides(overrides), folder, build_run(overrides).task.parts)
    assert ("1,000 bytes are free" in caplog.text) == (not refused)


@pytest.mark.feature(
    "B4",
    "all mistakes before the first step, with unchanged bits",
    "`RUN.rehearse`, `phasetrain plan`, `benchmarks/first_error.py`",
)
def test_mistakes_of_all_kinds_in_one_report() -> None:
    setup = resolve_overrides(
        [
            *SMALL, "RUN.dir=x", "MODEL.freeze=[hed]", "OPTIMIZER.groups=[{match: nobody, lr_scale: 2.0}]",
            "METERS.top={name: accuracy, topk: 0}", "CHECKPOINT.best.monitor=test/acuracy",
            "HOOKS.early_stopping={patience: 0}", "MODEL.weights=/nowhere/weights.pt",
        ]
    )  # fmt: skip
    found = find_problems(setup)
    starts = [
        "METERS.top",
        "CHECKPOINT.best.monitor",
        "MODEL.weights",
        "MODEL.freeze",
        "OPTIMIZER.groups[0]",
        "HOOKS.",
    ]
    assert [any(one.message.startswith(start) for one in found) for start in starts] == [
        True
    ] * 6, found
    assert len(found) == 6


def test_metrics_of_a_meter_with_a_mistake_are_not_called_unmeasured() -> None:
    best = "CHECKPOINT.best.monitor=test/top_accuracy"
    stopping = "HOOKS.early_stopping={monitor: test/topping, patience: 2}"
    mistake = "METERS.top={name: accuracy, topk: 0}"
    found = find_problems(resolve_overrides([*SMALL, "RUN.dir=x", mistake, best, stopping]))
    keys = [one.key for one in found]
    assert "METERS.top" in keys
    assert "HOOKS.early_stopping.monitor" in keys
    assert "CHECKPOINT.best.monitor" not in keys


def test_where_the_data_cannot_be_opened_the_rest_is_looked_at_all_the_same() -> None:
    setup = resolve_overrides(
        [
            *SMALL, "RUN.dir=x", "DATA.TRAIN={dataset: idx, images: /nowhere/a, labels: /nowhere/c}", "MODEL.dropout=7.0",
            "DATA.TEST={dataset: idx, images: /nowhere/b, labels: /nowhere/c}", "HOOKS.early_stopping={patience: 0}",
        ]
    )  # fmt: skip
    found = find_problems(setup)
    assert [one.message.partition(" ")[0] for one in found[:2]] == ["DATA.TRAIN", "DATA.TEST"]
    assert found[-1].message.startswith("HOOKS.early_stopping")
    assert not any(one.code == "config.missing_parameter" for one in found)


@pytest.mark.addon("text")
def test_values_that_were_set_for_other_datasets_are_named_for_all_splits_at_once(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    split = "{dataset: lines, files: a}"
    file.write_text(f"DATA: {{TRAIN: {split}, TEST: {split}}}\nMODEL: {{name: mlp}}\n")
    setup = resolve_overrides(
        [
            str(file),
            "PHASES.epochs=1",
            "DATA.TRAIN.dataset=text",
            "DATA.TEST.dataset=text",
        ]
    )
    with pytest.raises(ConfigError) as caught, report_all_problems(setup):
        setup.builder().data()
    for name, problem in zip(("TRAIN", "TEST"), caught.value.problems, strict=True):
        assert (problem.code, problem.key) == ("config.missing_parameter", f"DATA.{name}.files")
        assert f"DATA.{name}.files = 'a' ({file}) dropped" in problem.message


def test_mistake_in_files_that_splits_share_is_reported_once(tmp_path: Path) -> None:
    split = f"{{dataset: idx, images: {tmp_path}/images, labels: {tmp_path}/labels}}"
    words = [*SMALL, "RUN.dir=x", f"DATA.TRAIN={split}", f"DATA.TEST={split}", "MODEL.dropout=7.0"]
    setup = resolve_overrides(words)
    found = find_problems(setup)
    with raises(ConfigError) as caught, report_all_problems(setup):
        raise ConfigError(problems=found[:1])
    places = [one.message.partition(" (")[0] for one in caught.value.problems]
    assert places[0] == "DATA.TRAIN, DATA.TEST"
    assert len(places) == len(found) - 1


def test_meter_that_does_not_fit_is_named_with_the_file_that_adds_it() -> None:
    setup = resolve_overrides([*SMALL, "RUN.dir=x"])
    with raises(ConfigError, code="config.misfit") as caught, report_all_problems(setup):
        raise ConfigError("METERS.accuracy: it takes scores", code="config.misfit")
    assert "METERS.accuracy (experiment/digits.yaml) is removed by" in str(caught.value)


def test_a_sound_run_has_none() -> None:
    assert (
        find_problems(
            resolve_overrides([*SMALL, "RUN.dir=x", "CHECKPOINT.best.monitor=test/accuracy"])
        )
        == []
    )


def test_other_errors_pass_through() -> None:
    setup = resolve_overrides([*SMALL, "RUN.dir=x"])
    with pytest.raises(ConfigError, match=r"^the only one$"), report_all_problems(setup):
        raise ConfigError("the only one")
    with pytest.raises(KeyError), report_all_problems(setup):
        raise KeyError("no mistake of the config's")


def test_monitored_metrics_are_listed() -> None:
    words = [
        "CHECKPOINT.best.monitor=-test/loss",
        "HOOKS.patient={name: early_stopping, monitor: train/loss}",
        "HOOKS.early_stopping={}",
    ]
    found = list_monitors(resolve_overrides([*SMALL, "RUN.dir=x", *words]))
    assert [(one.key, one.name) for one in found] == [
        ("CHECKPOINT.best.monitor", "-test/loss"),
        ("HOOKS.patient.monitor", "train/loss"),
    ]


def test_keys_and_values_and_what_follows_from_them_in_one_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["MODEL.widht=4", "OPTIMIZER.accumulate=5", "RUN.name=a/b"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("3 problems in the config:")
    assert all(
        one in told
        for one in ("did you mean MODEL.width", "nearest that work: 4, 8", "RUN.name = 'a/b'")
    )


def test_the_mistakes_in_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_overrides(["MODEL.widht=4", "OPTIMIZER.lrr=0.1"])
    assert [(one.key, one.suggestion) for one in caught.value.problems] == [
        ("MODEL.widht", "MODEL.width"),
        ("OPTIMIZER.lrr", "OPTIMIZER.lr"),
    ]
    assert [one.message for one in ConfigError("one").problems] == ["one"]
