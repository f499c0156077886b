"""`phasetrain at` stands before a past update with the state that the run had there."""

import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differences, train
from raising import raises

from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.visit import StateCache, Visit
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.cli import main
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runs.ledger import FILE, PROCESSES_SHIFT, encode_ledger, parse_ledger
from phasetrain.runtime.storage import Storage


@contextmanager
def visit(folder: Path, update: int, *, memory: int = 2**30) -> Iterator[Visit]:
    with open_past_run(str(folder)) as past, Visit(past, update, memory=memory) as visit:
        yield visit


def list_files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.feature(
    "travel.at", "the state before any past update, at a prompt or in a script", "`phasetrain at`"
)
@pytest.mark.parametrize(("update", "began"), [(1, 0), (5, 4), (8, 4), (11, 8), (16, 15)])
def test_state_is_the_one_of_the_run(complete: Path, past: Path, update: int, began: int) -> None:
    reader = CheckpointReader(f"{complete}/checkpoints", Storage())
    saved = [
        checkpoint
        for checkpoint in reader.list_checkpoints()
        if checkpoint.manifest.state["updates"] == update - 1
    ]
    with visit(past, update) as at:
        assert (at.update, at.began, at.first_difference) == (update, began, None)
        assert (at.replayed, at.checked) == (update - 1 - began, update - 1 - began)
        if saved:
            loaded = reader.load(f"{reader.root}/{saved[-1].name}")
            saved_state, state = loaded.state["task"], at.task.shared_state()
            if at.engine.state.step == 0:  # a phase that begins has reset its meters
                saved_state = {name: saved_state[name] for name in ("model", "loss", "updater")}
                state = {name: state[name] for name in saved_state}
            assert differences(saved_state, state, "task") == []
        assert bool(at.batches) == (update < 16)


def test_a_step_equals_the_ledger_until_the_state_is_changed(past: Path) -> None:
    before = list_files(past)
    recorded = parse_ledger((past / FILE).read_bytes())
    with visit(past, 6) as at:
        report = at.step()
        assert (report.update, report.loss, report.differs) == (6, recorded[6].loss, ())
        assert report.gradient_norm is not None
        assert math.isfinite(report.gradient_norm)
        assert at.diff(6)[0].relative == pytest.approx(
            max(change.relative for change in at.diff(6))
        )
        assert {change.name for change in report.changed} == {
            change.name.removeprefix("model.")
            for change in at.diff(6)
            if change.name.startswith("model.")
        }
        at.back()
        with torch.no_grad():
            at.task.model.head.weight[0, 0] += 1
        [change] = at.diff(6)
        assert (change.name, change.entries) == ("model.head.weight", 1)
        assert change.largest == pytest.approx(1)
        # 3 is not in memory: the visit goes there, and comes back to the changed state.
        assert "model.head.weight" in {change.name for change in at.diff(3)}
        assert [change.name for change in at.diff(6)] == ["model.head.weight"]
        changed = at.step()
        assert changed.differs is not None
        assert "loss" in changed.differs
        at.goto(7)
        assert at.first_difference is None
        assert at.step().differs == ()
    assert list_files(past) == before


def test_norm_of_the_gradient_is_the_recorded_one(tmp_path: Path) -> None:
    words = ("OPTIMIZER.accumulate=2", "OPTIMIZER.clip_norm=1e6", "PHASES.epochs=1")
    train(tmp_path, *words)
    recorded = parse_ledger((tmp_path / FILE).read_bytes())[3]
    with visit(tmp_path, 3) as at:
        assert at.step().gradient_norm == recorded.norm
    without = tmp_path / "without"
    train(without, "OPTIMIZER.accumulate=2", "PHASES.epochs=1")
    with visit(without, 3) as at:
        assert at.step().gradient_norm == pytest.approx(recorded.norm, rel=1e-6)


def test_stepping_back_takes_a_state_from_memory(past: Path) -> None:
    with visit(past, 12) as at:
        assert at.began == 8
        at.back()
        assert (at.update, at.began, at.replayed) == (11, 10, 0)
        assert at.step().differs == ()
        at.goto(4)
        assert (at.began, at.replayed) == (0, 3)
        at.goto(12)
        assert (at.began, at.replayed) == (11, 0)
    with visit(past, 12, memory=0) as at:
        at.back()
        assert (at.began, at.replayed) == (8, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_is_read_again_from_its_position(tmp_path: Path, workers: int) -> None:
    words = ("DATA.TRAIN.dataset=stream_parts.Counted", "CHECKPOINT.keep_every.updates=2")
    sizes = ("PHASES={epochs: null, updates: 6}", "DATA.TRAIN.batch_size=16", "MODEL.classes=10")
    more = ("PHASES.limit.train=null", "MODEL.channels=1", f"DATA.TRAIN.workers={workers}")
    train(tmp_path, *words, *sizes, *more)
    with open_past_run(str(tmp_path), trust=True) as past, Visit(past, 4) as at:
        for update in (4, 3, 1, 6, 2):
            at.goto(update)
            assert at.first_difference is None
            assert at.step().differs == ()


def test_cache_drops_the_state_that_was_unused_for_longest() -> None:
    cache = StateCache(limit=2)
    for updates in (1, 2):
        cache.put(updates, _State(1))  # type: ignore[arg-type]
    cache.use(1)
    cache.put(3, _State(1))  # type: ignore[arg-type]
    assert list(cache) == [1, 3]
    cache.put(4, _State(9))  # type: ignore[arg-type]
    assert list(cache) == [4]


class _State:
    def __init__(self, size: int) -> None:
        self.size = size


SCRIPT = """
import helper
first = step()
back(1)
summary = {"loss": first.loss, "again": step().differs, "seen": helper.VALUE, "ids": len(batches)}
"""

BREAKPOINTS = """
model.register_forward_pre_hook(lambda *args: breakpoint())
report = step()
breakpoint()
update
"""


class TestCommand:
    def test_script_runs_with_the_names_of_the_prompt(
        self, past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "script.py").write_text(SCRIPT)
        (tmp_path / "helper.py").write_text("VALUE = 3\n")
        code = main(["at", str(past), "7", "--script", f"{tmp_path}/script.py", "--json"])
        content = json.loads(capsys.readouterr().out)
        recorded = parse_ledger((past / FILE).read_bytes())[7]
        assert (code, content["update"], content["began"], content["difference"]) == (0, 7, 4, None)
        assert content["recorded"]["loss"] == recorded.loss
        assert len(content["samples"]) == recorded.samples
        assert content["summary"] == {"loss": recorded.loss, "again": [], "seen": 3, "ids": 1}

    def test_prompt_has_the_objects_of_the_run(
        self, past: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        typed = (
            "a = model\nback(2)\nprint('MOVED', update, a is model, model is task.model)\nexit()\n"
        )
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert main(["at", str(past), "7"]) == 0
        assert "MOVED 5 False True" in capsys.readouterr().out

    def test_update_that_differs_from_the_ledger_is_exit_code_1(
        self, past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "forged"
        shutil.copytree(past, folder)
        ledger = parse_ledger((folder / FILE).read_bytes())
        records = [
            record._replace(loss=0.5) if number == 6 else record
            for number, record in ledger.items()
        ]
        (folder / FILE).write_bytes(encode_ledger(records, ledger.header))
        assert main(["at", str(folder), "8", "--json"]) == 1
        content = json.loads(capsys.readouterr().out)
        assert content["difference"] == {"update": 6, "components": ["loss"]}

    def test_breakpoint_opens_pdb_in_a_script_and_in_a_step(
        self, past: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "script.py").write_text(BREAKPOINTS)
        # In a new process, because pytest replaces `breakpoint()`.
        words = ["at", str(past), "7", "--script", str(tmp_path / "script.py")]
        done = subprocess.run(
            [sys.executable, "-m", "phasetrain", *words],
            input="p 'IN', update\nc\np 'AFTER', update, report.differs\nc\n",
            capture_output=True,
            check=True,
            text=True,
        )
        assert "('IN', 7)" in done.stdout
        assert "('AFTER', 8, ())" in done.stdout

    def test_notebook_has_the_objects_of_the_prompt(
        self, past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "look.ipynb"
        before = list_files(past)
        assert main(["at", str(past), "7", "--notebook", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["notebook"] == str(path)
        content = json.loads(path.read_text())
        assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
        names: dict[str, Any] = {}
        _, opening, *cells = [cell["source"] for cell in content["cells"]]
        for _ in range(2):  # a cell may run twice
            exec(opening, names)
        assert names["update"] == 7
        for cell in cells:
            exec(cell, names)
        assert (names["report"].update, names["report"].differs, names["update"]) == (7, (), 7)
        assert list_files(past) == before

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["17"], "at.no_such_update"),
            (["0"], "at.no_such_update"),
            (["3", "--script", "missing.py"], "at.no_script"),
            (["3", "--memory", "-1"], "cli.usage"),
            (["17", "--notebook", "look.ipynb"], "at.no_such_update"),
            (["3", "--notebook", "missing/look.ipynb"], "at.notebook"),
            (["3", "--notebook", __file__], "at.notebook"),
            (["3", "--notebook", "look.ipynb", "--script", __file__], "cli.usage"),
        ],
    )
    def test_wrong_arguments(
        self, past: Path, words: list[str], code: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["at", str(past), *words, "--json"]) == 2
        assert [error["code"] for error in json.loads(capsys.readouterr().out)["errors"]] == [code]


def test_ranks_without_ordered_reduction_are_compared_in_part(past: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    shutil.copytree(past, folder)
    ledger = parse_ledger((folder / FILE).read_bytes())
    records = [
        record._replace(flags=record.flags | 2 << PROCESSES_SHIFT, loss=record.loss + 1e-7)
        for record in ledger.values()
    ]
    (folder / FILE).write_bytes(encode_ledger(records, ledger.header))
    with visit(folder, 7) as at:
        assert (at.first_difference, at.past.components) == (None, ("samples", "lr"))
        report = at.step()
        assert (report.differs, report.compared) == ((), ("samples", "lr"))


def test_step_at_the_end_of_the_run(past: Path) -> None:
    with visit(past, 16) as at, raises(ConfigError, code="at.end"):
        at.step()


def test_update_whose_samples_are_all_excluded(past: Path, tmp_path: Path) -> None:
    with visit(past, 3) as at:
        ids = at.batches[0].ids.tolist()
    train(tmp_path, "PHASES.epochs=1", f"DATA.TRAIN.exclude={ids}")
    with raises(ConfigError, code="at.no_samples"), visit(tmp_path, 3):
        pass
    with visit(tmp_path, 4) as at:
        assert (at.replayed, at.first_difference) == (3, None)


def test_config_that_was_changed_is_rejected(past: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(past, folder)
    config = folder / "config.yaml"
    text = config.read_text()
    assert text.count("lr: 0.1\n") == 1
    config.write_text(text.replace("lr: 0.1\n", "lr: 0.2\n"))
    with raises(ChangedError, code="resume.adjustable_key"), visit(folder, 7):
        pass


def test_run_without_checkpoints_is_trained_from_its_start(past: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(past, folder, ignore=shutil.ignore_patterns("checkpoints"))
    with visit(folder, 7) as at:
        assert (at.began, at.replayed, at.checked, at.first_difference) == (0, 6, 6, None)


def test_folder_without_a_run(tmp_path: Path) -> None:
    with raises(ConfigError, code="run.not_found"), visit(tmp_path, 1):
        pass
