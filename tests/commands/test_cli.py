"""The command line itself; what it runs is tested in tests/end_to_end."""

import io
import logging
from pathlib import Path

import pytest

from phasetrain.commands.cli import main, printed, run
from phasetrain.runtime.terminal import Terminal


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_cfg_prints_the_resolved_config_and_does_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--cfg", "job", "OPTIMIZER.lr=0.25", "RUN.name=mine"]) == 0
    out = capsys.readouterr().out
    assert "\nOPTIMIZER:\n  name: sgd\n  lr: 0.25\n" in out
    assert "  dir: runs/mine-" in out
    assert list(Path.cwd().iterdir()) == []


def test_cfg_takes_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "OPTIMIZER.lr=0.5"]) == 0
    assert "\n  lr: 0.5\n" in capsys.readouterr().out


def test_output_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    result = run(
        ["PHASES.epochs=1", "PHASES.limit.train=2", "RUN.dir=quiet"],
        terminal=Terminal(Gone(), live=False),
    )
    assert result.state == "finished"
    assert "completed after 2 updates" in (tmp_path / "quiet" / "log.txt").read_text()


def test_files_of_others_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    assert main(["RUN.dir=.", "PHASES.epochs=1"]) == 2
    assert "holds no run, but config.yaml" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_flags_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["OPTIMIZER.lr=0.25", "--cfg"]) == 0
    assert "lr: 0.25" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--confg-dir", "x"], ["-x"], ["--config-dir"]])
def test_other_flags_are_refused_with_the_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "usage: phasetrain [flags]" in capsys.readouterr().err


def test_a_config_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-dir", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_what_is_logged_is_printed_only_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("phasetrain.test")
    before = (logging.getLogger("phasetrain").level, list(logging.getLogger("phasetrain").handlers))
    with printed(Terminal(live=False)):
        logger.info("seen")
        logger.warning("seen too")
    logger.info("not seen")
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["seen", "warning: seen too"]
    assert (
        logging.getLogger("phasetrain").level,
        logging.getLogger("phasetrain").handlers,
    ) == before
