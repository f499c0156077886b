"""Bad input: errors with code, key and suggestion, the right exit code, and no loss."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import ONE, Starter
from harness import SMALL, train
from raising import raises

from phasetrain.app.api import run
from phasetrain.cli import main
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook


def run_and_read_error(
    capsys: pytest.CaptureFixture[str], expected_code: int, *overrides: str
) -> str:
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
    ("overrides", "code", "key", "suggestion"),
    [
        (["experiment=digit"], "config.unknown_file", "experiment", "digits"),
        (["LOSS.name=cross_entrpy"], "config.unknown_part", "LOSS.name", "cross_entropy"),
        (["MODEL.widht=3"], "config.unknown_parameter", "MODEL.widht", "MODEL.width"),
        (["METERS.acuracy={}"], "config.unknown_part", "METERS.acuracy", "accuracy"),
        (["HOOKS.consol={}"], "config.unknown_part", "HOOKS.consol", "console"),
        (
            ["DATA.TRAIN.transforms=[{name: random_shft}]"],
            "config.unknown_part",
            "DATA.TRAIN.transforms[0].name",
            "random_shift",
        ),
        (["OPTIMIZER.lr=fast"], "config.wrong_type", "OPTIMIZER.lr", None),
        (["OPTIMIZER.lr=inf"], "config.wrong_type", "OPTIMIZER.lr", None),
        (["PHASES.epochs=1.5"], "config.wrong_type", "PHASES.epochs", None),
        (["MODEL=small_cnn", "MODEL.width=big"], "config.wrong_type", "MODEL.width", None),
        (["OPTIMIZER.accumulate=5"], "config.indivisible", "OPTIMIZER.accumulate", None),
        (["RUN.imports=[no_such_module]"], "config.import_failed", "RUN.imports", None),
        (["RUN.dir=/proc/phasetrain"], "folder.not_writable", "RUN.dir", None),
        (["RUN.resume=must"], "resume.no_checkpoint", None, None),
        (["RUN.engine=test"], "checkpoint.not_found", None, None),
        (["PHASES={test.every: 3}"], "config.dotted_key", "test.every", None),
        (["DATA={TRAIN.batch_size: 3}"], "config.dotted_key", "TRAIN.batch_size", None),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_error_has_code_key_and_suggestion(
    here: Path, overrides: list[str], code: str, key: str | None, suggestion: str | None
) -> None:
    with raises(ConfigError, code=code, key=key, suggestion=suggestion):
        run(overrides)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["DATA.TRAIN.batch_size=2000"], ["DATA.TRAIN.batch_size = 2000", "1442", "drop_last"]),
        (["MODEL.classes=5"], ["sample ", "label 9", "5 classes"]),
        (["METERS.accuracy.topk=50"], ["METERS.accuracy: ", "topk = 50", "10 classes"]),
        (["LOSS.name=MSELoss"], ["LOSS: ", "MSELoss", "(64, 10) float32", "(64,) int64"]),
        (["MODEL.name=small_cnn", "MODEL.channels=3"], ["MODEL: ", "SmallCNN", "(64, 1, 8, 8)"]),
        (
            ["OPTIMIZER.SCHEDULES.lr.warmup=20 epochs"],
            ["OPTIMIZER.SCHEDULES.lr", "'20 epochs'", "264", "12"],
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_misfit_is_reported_with_key_values_and_shapes(
    here: Path, overrides: list[str], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(overrides)
    assert [text for text in expected if text not in str(caught.value)] == []


@pytest.mark.feature(
    "2",
    "overrides: set, add, undo, sweep; all mistakes reported at once",
    "`SECTION.key=value`, `~`, `-m`",
)
def test_all_mistakes_are_listed_at_once_and_exit_code_is_2(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["OPTIMIZER.lrr=1", "MODLE.name=x", "DATA.TRAIN.batchsize=3"]
    with raises(ConfigError) as caught:
        run(words)
    assert {problem.key: problem.suggestion for problem in caught.value.problems} == {
        "OPTIMIZER.lrr": "OPTIMIZER.lr",
        "MODLE.name": "MODEL.name",
        "DATA.TRAIN.batchsize": "DATA.TRAIN.batch_size",
    }
    error = run_and_read_error(capsys, 2, *words)
    assert all(f"{problem.key} = {problem.given}" in error for problem in caught.value.problems)
    assert list(here.iterdir()) == []


def test_unknown_option_has_exit_code_2(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = run_and_read_error(capsys, 2, "--nonsense")
    assert "--nonsense" in error
    assert "--config-dir" in error


@pytest.mark.parametrize(
    ("key", "words", "path"),
    [
        pytest.param(
            "DATA.TRAIN",
            ["dataset=image_folder", "path=no/such/folder"],
            "no/such/folder",
            marks=pytest.mark.addon("vision"),
        ),
        ("DATA.TEST", ["dataset=idx", "images=no/images", "labels=no/labels"], "no/images"),
    ],
)
def test_missing_data_path_is_reported_with_its_split(
    here: Path, key: str, words: list[str], path: str
) -> None:
    with raises(ConfigError, code="config.rejected_by_part", key=key) as caught:
        run(["experiment=digits", *(f"{key}.{word}" for word in words)])
    assert f"'{path}'" in str(caught.value)
    assert list(here.iterdir()) == []


def test_an_empty_split_is_rejected(here: Path) -> None:
    idx_file(here / "images", np.zeros((0, 8, 8)))
    idx_file(here / "labels", np.zeros((0,)))
    words = ["dataset=idx", "images=images", "labels=labels"]
    with raises(ConfigError, key="DATA.TRAIN"):
        run([f"DATA.TRAIN.{word}" for word in words])


def test_a_label_outside_the_classes_is_reported_with_its_sample(here: Path) -> None:
    idx_file(here / "images", np.zeros((4, 8, 8)))
    idx_file(here / "labels", np.array([0, 1, 7, 2]))
    words = [
        "DATA.TRAIN.dataset=idx",
        "DATA.TRAIN.images=images",
        "DATA.TRAIN.labels=labels",
        "DATA.TRAIN.classes=3",
    ]
    with pytest.raises(ConfigError, match="label 7 of sample 2 "):
        run(words)


def test_a_module_that_breaks_is_reported_with_file_and_line(here: Path) -> None:
    (here / "broken_parts.py").write_text("import math\n\nmath.no_such_thing\n")
    with raises(ConfigError, key="OPTIMIZER.lrr") as caught:
        run(["RUN.imports=[broken_parts]", "OPTIMIZER.lrr=1"])
    assert re.search(r"broken_parts\.py(, line |:)3", str(caught.value))


@pytest.mark.feature("4")
def test_two_definitions_of_one_name_are_reported_with_both_places(here: Path) -> None:
    (here / "second_accuracy.py").write_text(
        "from phasetrain.meters import METERS, Meter\n\n@METERS.register('accuracy')\nclass Mine(Meter):\n    pass\n"
    )
    with pytest.raises(ConfigError, match="'accuracy'") as caught:
        run(["RUN.imports=[second_accuracy]"])
    assert "phasetrain.meters.accuracy" in str(caught.value)
    assert "second_accuracy.Mine" in str(caught.value)


def test_a_forbidden_change_shows_both_values_and_keeps_the_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(here / "run")
    before = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    error = run_and_read_error(capsys, 3, *SMALL, "RUN.dir=run", "RUN.seed=7", "MODEL.width=5")
    assert re.search("RUN.seed: .* 0, .* 7 ", error)
    assert re.search("MODEL.width: .* 4, .* 5 ", error)
    with pytest.raises(ChangedError, match=r"PHASES.epochs: .* 3, .* 4 .*RUN.allow=PHASES"):
        train(here / "run", "PHASES.epochs=4")
    assert {path: path.read_bytes() for path in before} == before


def test_resume_never_rejects_a_folder_that_holds_a_run(here: Path) -> None:
    train(here / "run", "PHASES.epochs=0")
    before = sorted(here.rglob("*"))
    with pytest.raises(ConfigError, match=r"RUN\.resume = 'never'"):
        train(here / "run", "PHASES.epochs=0", "RUN.resume=never")
    assert sorted(here.rglob("*")) == before


def test_second_run_in_one_folder_is_rejected(starter: Starter, here: Path) -> None:
    codes: list[int] = []
    errors: list[str] = []

    class StartAnother(Hook):
        def on_phase_start(self, run: Any, phase: Any) -> None:
            if not codes:
                ended = starter.run(here / "run", *SMALL, ONE)
                codes.append(ended.code)
                errors.append(ended.output)

    result = train(here / "run", ONE, hooks={"another": StartAnother()})
    assert codes == [4]
    assert f"process {os.getpid()}" in errors[0]
    assert (result.state, result.exit_code) == ("finished", 0)


def test_more_than_one_rank_without_an_address_is_rejected(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 2"):
        run([])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(7)", "SystemExit"),
    ],
)
def test_a_dotted_path_into_a_module_that_breaks_is_reported_with_its_error(
    here: Path, source: str, told: str
) -> None:
    name = f"breaks_with_{told.lower()}"
    (here / f"{name}.py").write_text(source + "\n")
    with pytest.raises(ConfigError, match=rf"'{name}'.*{told}"):
        run([f"LOSS.name={name}.thing"])


@pytest.mark.parametrize(
    ("word", "suggestion", "says"),
    [
        ("lr", "OPTIMIZER.lr", "did you mean"),
        ("DATA.TRAIN.drop_last", "", "must not change on a resume"),
        ("MODEL.width", "", "must not change on a resume"),
    ],
)
def test_consent_to_a_key_gets_its_section_or_the_reason(
    word: str, suggestion: str, says: str
) -> None:
    with raises(ConfigError, code="config.unknown_consent", suggestion=suggestion) as caught:
        run([*SMALL, f"RUN.allow=[{word}]"])
    assert says in str(caught.value)
