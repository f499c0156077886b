"""The command line itself; what it runs is tested in tests/end_to_end."""

import io
import json
import logging
import math
from pathlib import Path

import pytest

from phasetrain import __version__
from phasetrain.app import list_runs
from phasetrain.app.api import run
from phasetrain.app.engines import print_log
from phasetrain.cli import main
from phasetrain.cli.parsing import split_command
from phasetrain.cli.table import format_commands, list_commands
from phasetrain.config.addons import Command
from phasetrain.config.nested import to_json_value
from phasetrain.runtime.terminal import Terminal


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_cfg_prints_the_resolved_config_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--cfg", "job", "OPTIMIZER.lr=0.25", "RUN.name=mine"]) == 0
    out = capsys.readouterr().out
    assert "\nOPTIMIZER:\n  name: sgd\n  lr: 0.25\n" in out
    assert "  dir: runs/mine-" in out
    assert list(Path.cwd().iterdir()) == []


def test_cfg_leaves_the_next_word_to_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "OPTIMIZER.lr=0.5"]) == 0
    assert "\n  lr: 0.5\n" in capsys.readouterr().out


def test_run_survives_a_closed_output(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    result = run(
        ["PHASES.epochs=1", "PHASES.limit.train=2", "RUN.dir=quiet"],
        terminal=Terminal(Gone(), live=False),
    )
    assert result.state == "finished"
    assert "completed after 2 updates" in (tmp_path / "quiet" / "log.txt").read_text()


def test_foreign_files_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    assert main(["RUN.dir=.", "PHASES.epochs=1"]) == 2
    assert (
        "contains no run, but files that a run would overwrite: config.yaml"
        in capsys.readouterr().err
    )
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_flag_may_follow_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["OPTIMIZER.lr=0.25", "--cfg"]) == 0
    assert "lr: 0.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "suggestion"),
    [
        (["--confg-dir", "x=1"], "cli.unknown_flag", "--config-dir"),
        (["plan", "-x"], "cli.unknown_flag", ""),
        (["--config-dir"], "cli.usage", ""),
        pytest.param(["rerun"], "cli.usage", "", marks=pytest.mark.addon("experiments")),
        (["plann"], "cli.unknown_command", "plan"),
        (["runs", "lst"], "cli.unknown_command", "runs list"),
        (["plan", "RUN.engine=test"], "cli.conflict", ""),
        (["-m", "--from", "x"], "cli.conflict", ""),
    ],
)
def test_usage_error_is_reported_with_code_and_suggestion(
    words: list[str], code: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 2
    content = json.loads(capsys.readouterr().out)
    (error,) = content["errors"]
    assert (error["code"], error["suggestion"]) == (code, suggestion)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lr", "0.1"], "OPTIMIZER.lr=VALUE"),
        (["--config", "my.yaml"], "given by its path alone: my.yaml"),
        (["digits"], "experiment=NAME"),
        (["folde.yaml"], "there is no such file."),
        (["min.yaml"], "did you mean 'mine.yaml'?"),
        (["resume", "a_file"], "this is a file; expected the folder of a run"),
        (["resume", "empty"], "the folder is empty; expected the folder of a run"),
        (["resume", "emty"], "did you mean 'empty'? expected the folder of a run"),
        (["resume", "run/files"], "did you mean 'run'? expected the folder of a run"),
        pytest.param(
            *(["runs", "diff", "empty", "empty"], "'empty': the folder is empty"),
            marks=pytest.mark.addon("experiments"),
        ),
    ],
)
def test_wrong_file_folder_or_flag_says_what_is_there_and_what_is_meant(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("empty", "run/files/more"):
        Path(folder).mkdir(parents=True)
    for file in ("a_file", "mine.yaml", "run/config.yaml"):
        Path(file).write_text("")
    assert main(words) == 2
    assert says in capsys.readouterr().err


class TestJson:
    def test_error_lists_every_misspelt_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["OPTIMIZER.lrr=1", "MODLE.name=x", "--json"]) == 2
        out, err = capsys.readouterr()
        content = json.loads(out)
        assert (content["schema"], content["command"], content["exit_code"]) == (1, "train", 2)
        found = {error["key"]: error["suggestion"] for error in content["errors"]}
        assert found == {"OPTIMIZER.lrr": "OPTIMIZER.lr", "MODLE.name": "MODEL.name"}
        assert "OPTIMIZER.lrr" in err
        assert list(Path.cwd().iterdir()) == []

    def test_training_prints_its_result_alone_on_stdout(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        words = ["PHASES.epochs=1", "PHASES.limit.train=2", "RUN.dir=run"]
        assert main([*words, "--json"]) == 0
        out, err = capfd.readouterr()
        content = json.loads(out)
        assert (content["state"], content["updates"], content["errors"]) == ("finished", 2, [])
        assert content["best"]["metric"] == "test/accuracy"
        assert content["last"].keys() >= {"test/accuracy", "train/loss"}
        assert "completed" in err
        assert main(["runs", "list", ".", "--json"]) == 0
        (row,) = json.loads(capfd.readouterr().out)["runs"]
        assert (row["state"], row["updates"]) == ("finished", 2)

    def test_config_version_and_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--json", "--cfg", "OPTIMIZER.lr=0.25"]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["OPTIMIZER"]["lr"] == 0.25
        assert main(["--version", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["version"] == __version__
        assert main(["help", "train", "--json"]) == 0
        assert "usage: phasetrain train" in json.loads(capsys.readouterr().out)["text"]

    def test_unexpected_error_is_reported_and_raised(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(list_runs, "list_runs", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["runs", "list", ".", "--json"])
        (error,) = json.loads(capsys.readouterr().out)["errors"]
        assert error["code"] == "internal"
        assert "ZeroDivisionError" in error["message"]

    def test_numbers_that_json_cannot_hold_are_null(self) -> None:
        assert to_json_value({"a": math.nan, "b": (1, -math.inf)}) == {"a": None, "b": [1, None]}


class TestCommands:
    @pytest.mark.parametrize("command", list_commands(), ids=lambda command: str(command.name))
    def test_help_names_every_command(
        self, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*command.name.split(), "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: phasetrain {command.name} [flags]")
        assert "--json" in out
        assert command.name in format_commands()

    @pytest.mark.parametrize(
        ("words", "name", "rest"),
        [
            (["A.b=plan"], "train", ["A.b=plan"]),
            (["--config-dir", "plan", "test"], "test", ["--config-dir", "plan"]),
            (["A.b=1", "runs", "list", "x"], "runs list", ["A.b=1", "x"]),
            (["--from", "old"], "train", ["--from", "old"]),
            (["--cfg", "job", "A.b=1"], "train", ["--cfg", "job", "A.b=1"]),
        ],
    )
    def test_command_is_the_first_word_that_is_no_flag_and_no_override(
        self, words: list[str], name: str, rest: list[str]
    ) -> None:
        command, others = split_command(list_commands(), words)
        assert (command.name, others) == (name, rest)


@pytest.mark.addon("experiments", "observe")
@pytest.mark.parametrize("words", [["runs"], ["runs", "--help"], ["runs", "-h"], ["help", "runs"]])
def test_group_of_commands_prints_the_usage_of_each(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    for name in ("list", "follow", "compare", "diff"):
        assert f"usage: phasetrain runs {name} " in text
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text.rstrip()


def test_missing_config_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-dir", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_log_is_printed_only_during_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("phasetrain.test")
    before = (logging.getLogger("phasetrain").level, list(logging.getLogger("phasetrain").handlers))
    with print_log(Terminal(live=False)):
        logger.info("seen")
        logger.warning("seen too")
    logger.info("not seen")
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["seen", "warning: seen too"]
    assert (
        logging.getLogger("phasetrain").level,
        logging.getLogger("phasetrain").handlers,
    ) == before


@pytest.mark.feature("1")
def test_experiment_file_is_given_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "OPTIMIZER").mkdir(parents=True)
    (tmp_path / "conf" / "OPTIMIZER" / "slow.yaml").write_text("{name: sgd, nesterov: true}")
    text = "defaults: [digits, override /OPTIMIZER: slow, _self_]\nPHASES: {epochs: 7}\n"
    (tmp_path / "my shop.yaml").write_text(text)
    assert main(["my shop.yaml", "MODEL.width=8", "--cfg", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["RUN"]["name"] == "my-shop"
    assert config["RUN"]["dir"].startswith("runs/my-shop-")
    assert (config["PHASES"]["epochs"], config["MODEL"]["width"]) == (7, 8)
    assert config["OPTIMIZER"]["nesterov"] is True, "./conf was found"


def test_sub_command_takes_an_experiment_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("RUN:\n\tname: x\n")
    assert main(["plan", "bad.yaml", "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["code"], error["key"]) == ("config.invalid_file", "bad.yaml")
