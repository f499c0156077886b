"""A run again from its folder: the same bits, or where they diverge."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from harness import SMALL, train
from raising import raises

from phasetrain.addons.experiments.rerun import read_original, repeat, repeat_overrides
from phasetrain.app.api import run
from phasetrain.app.engines import run_engine
from phasetrain.app.result import RunResult
from phasetrain.app.setup import resolve_config
from phasetrain.app.stored.stored_config import StoredConfig
from phasetrain.app.train.resume import list_deviations
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.cli import main
from phasetrain.cli.output import write_text
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.runs.records import format_deviations
from phasetrain.runtime.terminal import Terminal

ROOT = Path(__file__).parents[3]
SHORT = "PHASES.epochs=1"


def run_quietly(words: Sequence[str], stored: StoredConfig | None = None) -> RunResult:
    return run_engine(words, stored=stored, terminal=Terminal(io.StringIO(), live=False))


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
    @pytest.mark.feature("B12")
    def test_on_the_command_line(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--from", str(copy)]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        digest = json.loads((copy / "status.json").read_text())["digest"]
        assert (
            last
            == f"bit-identical to {copy}: weights sha256 {digest}, 5 updates, 7 lines of metrics.jsonl"
        )
        assert (copy.parent / "one-again" / "RUN.md").is_file()
        assert read_original(str(copy)).stored.overrides == (*SMALL, SHORT)

    def test_another_one_gets_another_folder(self, copy: Path) -> None:
        shutil.copytree(copy, f"{copy}-again")
        assert f"RUN.dir={copy}-again-2" in repeat_overrides(read_original(str(copy)))
        (copy.parent / "one-again" / "status.json").write_text('{"state": "preempted"}')
        assert f"RUN.dir={copy}-again" in repeat_overrides(read_original(str(copy)))

    def test_the_verdict_is_printed_whatever_the_folder_is_called(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
        monkeypatch.setattr(sys, "stdout", out)
        write_text(f"bit-identical to {os.fsdecode(b'b' + bytes([255]))}")
        write_text("")
        out.flush()
        assert cast(io.BytesIO, out.buffer).getvalue() == b"bit-identical to b\\udcff\n"

    def test_as_far_as_an_original_went_that_did_not_finish(
        self, copy: Path, tmp_path: Path
    ) -> None:
        (copy / "status.json").write_text('{"state": "failed"}')
        ledger = (copy / "steps.ledger").read_bytes()
        (copy / "steps.ledger").write_bytes(ledger[: 48 + 3 * 92])
        verdict = repeat(str(copy), [f"RUN.dir={tmp_path / 'x'}"], run=run_quietly)
        assert (verdict.exit_code, verdict.is_identical) == (0, True)
        assert "update 3" in verdict.text


@pytest.mark.slow
def test_three_processes_again(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "phasetrain",
    ]

    def call(*words: str) -> str:
        done = subprocess.run(
            [*command, *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
        )
        return done.stdout

    call(*SMALL, SHORT, f"RUN.dir={tmp_path / 'one'}")
    last = call("--from", str(tmp_path / "one")).splitlines()[-1]
    assert last.startswith(f"bit-identical to {tmp_path / 'one'}: weights sha256 ")


class TestParts:
    def test_with_another_value(self, copy: Path, tmp_path: Path) -> None:
        words = [f"RUN.dir={tmp_path / 'x'}", "OPTIMIZER.weight_decay=0.1"]
        verdict = repeat(str(copy), words, run=run_quietly)
        assert (verdict.exit_code, verdict.is_identical) == (1, False)
        assert str(copy) in verdict.text
        assert "update 2: " in verdict.text
        assert "OPTIMIZER.weight_decay" in verdict.text

    def test_in_the_weights_alone(self, copy: Path, tmp_path: Path) -> None:
        status = json.loads((copy / "status.json").read_text())
        (copy / "status.json").write_text(json.dumps(status | {"digest": "0" * 64}))
        verdict = repeat(str(copy), [f"RUN.dir={tmp_path / 'x'}"], run=run_quietly)
        assert (verdict.exit_code, verdict.is_identical) == (1, False)
        assert "5 updates" in verdict.text
        assert "weights" in verdict.text


class Scaled(Hook):
    """Makes other weights than the config alone."""

    def on_start(self, run: Run) -> None:
        with torch.no_grad():
            for parameter in run.task.model.parameters():
                parameter.mul_(0.5)


class TestDepartures:
    """A run that its newest command alone does not make."""

    def found(self, folder: Path) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = json.loads((folder / "environment.json").read_text())[
            "departures"
        ]
        return content

    def test_values_that_were_changed_on_the_way_are_in_documents_and_verdict(
        self, copy: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.found(copy) == []
        train(copy, "PHASES.epochs=2", "RUN.allow=[PHASES.epochs]")
        found = self.found(copy)
        assert [one["updates"] for one in found] == [5]
        line = found[0]["what"][0]
        assert line.startswith("PHASES.epochs: the checkpoint has 1, now 2")
        for name in ("RUN.md", "reproduce.sh"):
            assert f"from update 5 on: {line}" in (copy / name).read_text()
        with caplog.at_level(logging.WARNING, "phasetrain"):
            verdict = repeat(str(copy), [], run=run_quietly)
        assert (verdict.exit_code, verdict.is_identical) == (1, False)
        assert f"  from update 5 on: {line}" in verdict.text
        assert any("PHASES.epochs" in message for message in caplog.messages)

    @pytest.mark.addon("observe")
    def test_hooks_and_loops_from_python(self, tmp_path: Path) -> None:
        from phasetrain.addons.observe.notebook import NotebookProgress

        run(
            [*SMALL, SHORT, f"RUN.dir={tmp_path / 'one'}"],
            hooks={"drop": Scaled(), "notebook": NotebookProgress(lambda html: None)},
            loop=of_ones_own,
            terminal=Terminal(io.StringIO(), live=False),
        )
        told = [
            f"hook 'drop' ({__name__}.Scaled) is given in Python",
            f"a loop ({__name__}.of_ones_own) is given in Python",
        ]
        assert self.found(tmp_path / "one") == [{"updates": 0, "what": told}]
        verdict = repeat(str(tmp_path / "one"), [], run=run_quietly)
        assert (verdict.exit_code, f"from the start: {'; '.join(told)}" in verdict.text) == (
            1,
            True,
        )

    def test_those_of_the_checkpoint_stay(self) -> None:
        first = list_deviations(None, 0, ["hook"])
        loaded = LoadedCheckpoint("there", None, {"departures": first}, {})  # type: ignore[arg-type]
        assert list_deviations(loaded, 3, ["hook"]) == first == [{"updates": 0, "what": ["hook"]}]
        second = [*first, {"updates": 3, "what": ["loop", "2 -> 3"]}]
        assert list_deviations(loaded, 3, ["hook", "loop"], ["2 -> 3"]) == second
        loaded = LoadedCheckpoint("there", None, {"departures": second}, {})  # type: ignore[arg-type]
        assert list_deviations(loaded, 5, ["hook"], ["2 -> 3"])[2:] == [
            {"updates": 5, "what": ["2 -> 3"]}
        ]
        assert list_deviations(LoadedCheckpoint("there", None, {}, {}), 5, []) == []  # type: ignore[arg-type]

    def test_what_was_damaged_is_left_out(self) -> None:
        broken: list[Any] = [
            None,
            3,
            {"updates": "x", "what": []},
            {"updates": 3, "what": 4},
            {"updates": 3, "what": [5]},
        ]
        assert format_deviations(broken) == ["from update 3 on: 5"]
        ended = [{"updates": at, "until": 7, "what": ["x"]} for at in (0, 3)]
        assert format_deviations(ended) == [
            "from the start until update 7: x",
            "from update 3 until update 7: x",
        ]
        assert format_deviations("x") == format_deviations(None) == []


def of_ones_own(engine: PhaseEngine) -> None:
    engine.run()


class TestFolder:
    @pytest.mark.parametrize("name", ["one", "./one/", "other"])
    def test_one_in_which_nothing_would_be_trained_is_refused(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(copy.parent)
        if name == "other":
            shutil.copytree("one", "other")
        with raises(ConfigError, code="rerun.same_folder"):
            repeat("one", [f"RUN.dir={name}"], run=run_quietly)

    def test_a_repetition_that_was_stopped_goes_on(self, copy: Path, tmp_path: Path) -> None:
        shutil.copytree(copy, tmp_path / "other")
        (tmp_path / "other" / "status.json").write_text('{"state": "preempted"}')
        assert (
            repeat_overrides(read_original(str(copy)), [f"RUN.dir={tmp_path / 'other'}"])[-1]
            == f"RUN.dir={tmp_path / 'other'}"
        )

    def test_another_engine_is_refused(self, copy: Path) -> None:
        with raises(ConfigError, code="cli.conflict"):
            repeat_overrides(read_original(str(copy)), ["RUN.engine=plan"])

    def test_rerun_of_a_sweep_is_a_conflict(
        self, copy: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--from", str(copy), "-m", "--json"]) == 2
        (error,) = json.loads(capsys.readouterr().out)["errors"]
        assert error["code"] == "cli.conflict"


class TestChangedFiles:
    def test_values_of_then_are_taken(self, tmp_path: Path) -> None:
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
        terminal = Terminal(io.StringIO(), live=False)
        first = run(
            [*words, f"RUN.dir={tmp_path / 'one'}"],
            config_dir=tmp_path / "mine",
            terminal=terminal,
        )
        more = "LOSS: {label_smoothing: 0.1}\nMETERS: {logged: {of: grad_norm}}\nMODEL: {ema: {decay: 0.9}}\n"
        mine.write_text(
            text.replace("0.05", "0.2").replace("width: 4", "width: 4, dropout: 0.5") + more
        )
        original = read_original(first.folder)
        found = repeat_overrides(original)
        assert [word.partition("=")[0] for word in found] == ["MACHINE.threads", "RUN.dir"]
        config = resolve_config(found, stored=original.stored).config.plain()
        for section in ("MODEL", "LOSS", "METERS"):
            assert config[section] == original.stored.values[section]
        assert (config["OPTIMIZER"]["lr"], config["MODEL"]["dropout"]) == (0.05, 0.1)
        shutil.rmtree(tmp_path / "mine")
        assert repeat(first.folder, [], run=run_quietly).is_identical

    def test_experiment_file_is_found_from_another_folder(
        self, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mine.yaml").write_text("RUN: {seed: 3}\n")
        (copy / "overrides.yaml").write_text("[mine.yaml]")
        facts = json.loads((copy / "environment.json").read_text())
        (copy / "environment.json").write_text(json.dumps({**facts, "folder": str(tmp_path)}))
        monkeypatch.chdir(copy)
        assert read_original(str(copy)).stored.overrides == (f"{tmp_path}/mine.yaml",)
        monkeypatch.chdir(tmp_path)
        assert read_original(str(copy)).stored.overrides == ("mine.yaml",)


class TestNotARun:
    def test_a_config_that_is_torn(self, copy: Path) -> None:
        for content in ("", "RUN: {dir: x}\n", 10_000 * "["):
            (copy / "config.yaml").write_text(content)
            with pytest.raises(ConfigError) as caught:
                read_original(str(copy))
            assert caught.value.code == "rerun.no_run"

    @pytest.mark.parametrize("found", [["x"], 3, "nowhere"])
    def test_a_folder_of_configs_that_is_gone_or_no_text(self, copy: Path, found: object) -> None:
        environment = json.loads((copy / "environment.json").read_text())
        (copy / "environment.json").write_text(json.dumps(environment | {"config_dir": found}))
        assert repeat(str(copy), [], run=run_quietly).is_identical

    @pytest.mark.parametrize("ledger", [False, True])
    def test_one_that_has_done_nothing_is_refused_before_anything_is_trained(
        self, copy: Path, ledger: bool
    ) -> None:
        (copy / "status.json").write_text('{"state": "preempted"}')
        (copy / "metrics.jsonl").unlink()
        content = (copy / "steps.ledger").read_bytes()
        (copy / "steps.ledger").write_bytes(content[:48])
        if not ledger:
            (copy / "steps.ledger").unlink()
        with raises(ConfigError, code="rerun.nothing_to_compare"):
            repeat(str(copy), [], run=run_quietly)
        assert not (copy.parent / "one-again").exists()

    @pytest.mark.parametrize("content", [None, "", "a: [", "- x\n", "\xff"])
    def test_is_refused(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            for name in ("config.yaml", "overrides.yaml"):
                (tmp_path / name).write_text(content, "latin-1")
        with pytest.raises(ConfigError) as caught:
            read_original(str(tmp_path))
        assert caught.value.code == "rerun.no_run"

    def test_on_the_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--from", str(tmp_path)]) == 2
        assert f"'{tmp_path}'" in capsys.readouterr().err
