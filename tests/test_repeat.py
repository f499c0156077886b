"""A run again from its folder: the same bits, or where they part."""

import io
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import SMALL, train

from phasetrain.errors import ConfigError
from phasetrain.repeat import again, read_original, repeat
from phasetrain.run import main, run
from phasetrain.terminal import Terminal
from phasetrain.train import Result

ROOT = Path(__file__).parents[1]
SHORT = "PHASES.epochs=1"


def quietly(words: Sequence[str], config_dir: str | None) -> Result:
    return run(words, config_dir=config_dir, terminal=Terminal(io.StringIO(), live=False))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "one"
    train(folder, SHORT)
    return folder


@pytest.fixture
def copy(one: Path, tmp_path: Path) -> Path:
    shutil.copytree(one, tmp_path / "one")
    return tmp_path / "one"


class TestSame:
    def test_on_the_command_line(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--from", str(copy)]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        digest = json.loads((copy / "status.json").read_text())["digest"]
        assert last == f"bit-identical to {copy}: weights sha256 {digest}, 5 updates, 7 lines of metrics.jsonl"
        assert (copy.parent / "one-again" / "RUN.md").is_file()
        assert read_original(str(copy)).overrides == (*SMALL, SHORT)

    def test_another_one_gets_another_folder(self, copy: Path) -> None:
        shutil.copytree(copy, f"{copy}-again")
        assert f"RUN.dir='{copy}-again-2'" in again(read_original(str(copy)))
        (copy.parent / "one-again" / "status.json").write_text('{"state": "preempted"}')
        assert f"RUN.dir='{copy}-again'" in again(read_original(str(copy)))

    def test_as_far_as_an_original_went_that_did_not_finish(self, copy: Path, tmp_path: Path) -> None:
        (copy / "status.json").write_text('{"state": "failed"}')
        ledger = (copy / "steps.ledger").read_bytes()
        (copy / "steps.ledger").write_bytes(ledger[: 16 + 3 * 76])
        text, code = repeat(str(copy), [f"RUN.dir={tmp_path / 'x'}"], config_dir=None, run=quietly)
        assert code == 0
        assert text.startswith(
            f"bit-identical as far as {copy} went, which has not finished. They are equal up to update 3"
        )


@pytest.mark.slow
def test_three_processes_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "phasetrain"]

    def call(*words: str) -> str:
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
        return done.stdout

    call(*SMALL, SHORT, f"RUN.dir={tmp_path / 'one'}")
    last = call("--from", str(tmp_path / "one")).splitlines()[-1]
    assert last.startswith(f"bit-identical to {tmp_path / 'one'}: weights sha256 ")


class TestParts:
    def test_with_another_value(self, copy: Path, tmp_path: Path) -> None:
        words = [f"RUN.dir={tmp_path / 'x'}", "OPTIMIZER.weight_decay=0.1"]
        text, code = repeat(str(copy), words, config_dir=None, run=quietly)
        assert code == 1
        assert text.startswith(f"NOT bit-identical to {copy}.")
        assert "They part at update 2: " in text
        assert "OPTIMIZER.weight_decay" in text

    def test_in_the_weights_alone(self, copy: Path, tmp_path: Path) -> None:
        status = json.loads((copy / "status.json").read_text())
        (copy / "status.json").write_text(json.dumps(status | {"digest": "0" * 64}))
        text, code = repeat(str(copy), [f"RUN.dir={tmp_path / 'x'}"], config_dir=None, run=quietly)
        assert code == 1
        assert "5 updates and all measured values are equal, and the weights at the end are not" in text


class TestChangedFiles:
    def test_values_of_then_are_taken(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        mine = tmp_path / "mine" / "experiment" / "wide.yaml"
        mine.parent.mkdir(parents=True)
        text = "# @package _global_\ndefaults: [digits, _self_]\nMODEL: {width: 4}\nOPTIMIZER: {lr: 0.05}\n"
        mine.write_text(text)
        words = [
            "experiment=wide",
            "PHASES.updates=2",
            "PHASES.epochs=null",
            "MACHINE.threads=null",
            "HOOKS.report=null",
        ]
        first = quietly([*words, f"RUN.dir={tmp_path / 'one'}"], str(tmp_path / "mine"))
        mine.write_text(text.replace("0.05", "0.2").replace("width: 4", "width: 4, dropout: 0.5"))
        with caplog.at_level(logging.INFO, "phasetrain"):
            found = again(read_original(first.folder))
        assert "OPTIMIZER.lr=0.05" in found
        assert "MODEL.dropout=0.1" in found
        assert any(word.startswith("MACHINE.threads=") and word != "MACHINE.threads=null" for word in found)
        assert "OPTIMIZER.lr = 0.05, as it was; it would be 0.2 now" in caplog.messages
        shutil.rmtree(tmp_path / "mine")
        with pytest.raises(ConfigError, match=r"was started with --config-dir .*, which is not there"):
            read_original(first.folder)


class TestNotARun:
    @pytest.mark.parametrize("content", [None, "", "a: [", "- x\n", "\xff"])
    def test_is_refused(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            for name in ("config.yaml", "overrides.yaml"):
                (tmp_path / name).write_text(content, "latin-1")
        with pytest.raises(ConfigError, match=r"--from .*overrides\.yaml and config\.yaml of a run are expected"):
            read_original(str(tmp_path))

    def test_on_the_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--from", str(tmp_path)]) == 2
        assert "name the folder of a run" in capsys.readouterr().err
