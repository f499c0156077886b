"""Bad input: a sentence that says what to do, the right exit code, and nothing lost."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import Starter
from harness import SMALL, train

from phasetrain.commands.cli import main
from phasetrain.hooks import Hook


def said(capsys: pytest.CaptureFixture[str], expected_code: int, *overrides: str) -> str:
    """Run the command line, check its exit code, and return what it printed as an error."""
    capsys.readouterr()
    assert main(list(overrides)) == expected_code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def idx_file(path: Path, values: "np.ndarray[Any, Any]") -> None:
    """Write an IDX file of unsigned bytes."""
    shape = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + shape + values.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["experiment=digit"], ["experiment", "digit", "digits"]),
        (["LOSS.name=cross_entrpy"], ["LOSS.name", "cross_entrpy", "did you mean 'cross_entropy'"]),
        (["MODEL.widht=3"], ["MODEL.widht", "did you mean", "width"]),
        (["METERS.acuracy={}"], ["METERS.acuracy", "accuracy"]),
        (["HOOKS.tensorbord={}"], ["HOOKS.tensorbord", "tensorboard"]),
        (
            ["DATA.TRAIN.transforms=[{name: random_shft}]"],
            ["DATA.TRAIN.transforms", "random_shift"],
        ),
        (["OPTIMIZER.lr=fast"], ["OPTIMIZER.lr", "fast", "float"]),
        (["PHASES.epochs=1.5"], ["PHASES.epochs", "1.5", "int"]),
        (["MODEL=resnet20", "MODEL.depth=21"], ["MODEL.depth", "21", "20", "32", "56"]),
        (
            ["DATA.TRAIN.batch_size=2000"],
            ["DATA.TRAIN.batch_size = 2000", "1442 samples", "drop_last"],
        ),
        (["OPTIMIZER.accumulate=5"], ["OPTIMIZER.accumulate", "5", "64", "4"]),
        (["MODEL.classes=5"], ["sample ", "label", "5 classes"]),
        (["LOSS.name=MSELoss"], ["LOSS", "MSELoss", "(64, 10) float32", "(64,) int64"]),
        (["MODEL.name=small_cnn", "MODEL.channels=3"], ["MODEL", "SmallCNN", "(64, 1, 8, 8)"]),
        (["OPTIMIZER.SCHEDULES.lr.warmup=20 epochs"], ["OPTIMIZER.SCHEDULES.lr", "20 epochs"]),
        (["RUN.imports=[no_such_module]"], ["RUN.imports", "no_such_module"]),
        (["RUN.dir=/proc/phasetrain"], ["RUN.dir = '/proc/phasetrain'", "cannot be written"]),
        (["RUN.resume=must"], ["RUN.resume = 'must'", "no checkpoint"]),
        (["RUN.engine=test"], ["RUN.checkpoint = 'latest'", "no checkpoint"]),
        (["--nonsense"], ["--nonsense", "--config-dir"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_the_message_names_key_value_and_way_out(
    here: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], expected: list[str]
) -> None:
    error = said(capsys, 2, *overrides)
    for text in expected:
        assert text in error


def test_all_mistakes_are_listed_at_once_within_three_seconds(here: Path) -> None:
    words = ["OPTIMIZER.lrr=1", "MODLE.name=x", "DATA.TRAIN.batchsize=3"]
    done = subprocess.run(
        [sys.executable, "-m", "phasetrain", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    for wrong, right in zip(
        [word.split("=")[0] for word in words], ["lr", "MODEL.name", "batch_size"], strict=True
    ):
        assert f"{wrong} = " in done.stderr
        assert f"did you mean {right}" in done.stderr.replace("OPTIMIZER.lr?", "lr").replace(
            "DATA.TRAIN.b", "b"
        )
    assert list(here.iterdir()) == []


def test_a_missing_data_path(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, 2, "DATA.TRAIN.dataset=image_folder", "DATA.TRAIN.path=no/such/folder")
    assert "no/such/folder" in error
    assert "DATA.TRAIN" in error
    error = said(
        capsys,
        2,
        "DATA.TEST.dataset=idx",
        "DATA.TEST.images=no/images",
        "DATA.TEST.labels=no/labels",
    )
    assert "no/images" in error
    assert "DATA.TEST" in error
    assert list(here.iterdir()) == []


def test_an_empty_split(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idx_file(here / "images", np.zeros((0, 8, 8)))
    idx_file(here / "labels", np.zeros((0,)))
    error = said(
        capsys, 2, "DATA.TRAIN.dataset=idx", "DATA.TRAIN.images=images", "DATA.TRAIN.labels=labels"
    )
    assert "DATA.TRAIN" in error
    assert "no samples" in error or "empty" in error


def test_a_label_outside_the_classes_names_its_sample(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    idx_file(here / "images", np.zeros((4, 8, 8)))
    idx_file(here / "labels", np.array([0, 1, 7, 2]))
    words = [
        "DATA.TRAIN.dataset=idx",
        "DATA.TRAIN.images=images",
        "DATA.TRAIN.labels=labels",
        "DATA.TRAIN.classes=3",
    ]
    error = said(capsys, 2, *words)
    assert "sample 2" in error
    assert "7" in error


def test_a_module_that_breaks_names_file_and_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "broken_parts.py").write_text("import math\n\nmath.no_such_thing\n")
    error = said(capsys, 2, "RUN.imports=[broken_parts]", "OPTIMIZER.lrr=1")
    assert "broken_parts" in error
    assert "line 3" in error or ":3" in error
    assert "OPTIMIZER.lr" in error


def test_two_definitions_of_one_name_show_both_places(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "second_accuracy.py").write_text(
        "from phasetrain.meters import METERS, Meter\n\n@METERS.register('accuracy')\nclass Mine(Meter):\n    pass\n"
    )
    error = said(capsys, 2, "RUN.imports=[second_accuracy]")
    assert "'accuracy' is defined twice" in error
    assert "phasetrain.meters.classification.accuracy" in error
    assert "second_accuracy.Mine" in error


def test_a_forbidden_change_shows_both_values_and_keeps_the_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(here / "run")
    before = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    error = said(capsys, 3, *SMALL, "RUN.dir=run", "RUN.seed=7", "MODEL.width=5")
    assert "RUN.seed: the checkpoint has 0, now 7 (forbidden)" in error
    assert "MODEL.width: the checkpoint has 4, now 5 (forbidden)" in error
    error = said(capsys, 3, *SMALL, "RUN.dir=run", "PHASES.epochs=4")
    assert (
        "PHASES.epochs: the checkpoint has 3, now 4 (adjustable: allow it with RUN.allow=[PHASES.epochs])"
        in error
    )
    assert {path: path.read_bytes() for path in before} == before


def test_resume_never_in_a_folder_that_holds_a_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(here / "run")
    before = sorted(here.rglob("*"))
    error = said(capsys, 2, *SMALL, "RUN.dir=run", "RUN.resume=never")
    assert "RUN.resume = 'never'" in error
    assert sorted(here.rglob("*")) == before


def test_two_runs_in_one_folder(starter: Starter, here: Path) -> None:
    codes: list[int] = []
    errors: list[str] = []

    class StartAnother(Hook):
        def on_phase_start(self, run: Any, phase: Any) -> None:
            if not codes:
                ended = starter.run(here / "run", *SMALL)
                codes.append(ended.code)
                errors.append(ended.output)

    result = train(here / "run", hooks={"another": StartAnother()})
    assert codes == [4]
    assert f"is in use by process {os.getpid()}" in errors[0]
    assert (result.state, result.exit_code) == ("finished", 0)


def test_more_than_one_rank_is_rejected(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE = 2" in said(capsys, 2)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(7)", "SystemExit"),
    ],
)
def test_a_dotted_path_into_a_module_that_breaks(
    here: Path, capsys: pytest.CaptureFixture[str], source: str, told: str
) -> None:
    name = f"breaks_with_{told.lower()}"
    (here / f"{name}.py").write_text(source + "\n")
    error = said(capsys, 2, f"LOSS.name={name}.thing")
    assert f"module '{name}' cannot be imported ({told}" in error


def test_dotted_keys_within_a_mapping_on_the_command_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("PHASES={test.every: 3}", "DATA={TRAIN.batch_size: 3}"):
        assert word.split("{")[1].split(":")[0] in said(capsys, 2, word)
    assert list(here.iterdir()) == []


def test_a_meter_that_does_not_fit_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "METERS.accuracy: accuracy: topk = 50 is more than the 10 classes" in said(
        capsys, 2, "METERS.accuracy.topk=50"
    )


def test_learning_rate_without_end_is_rejected(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "OPTIMIZER.lr" in said(capsys, 2, "OPTIMIZER.lr=inf")
