"""What if: a run with a change, trained from the last checkpoint before it matters, has every bit of
the run from scratch."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from harness import SMALL, KillAfter, differences_of_runs, status, train
from raising import raises

from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.fork.sample_updates import find_updates
from phasetrain.addons.experiments.what_if import RECEIPT, RECEIPT_TEXT, Question, Receipt, answer
from phasetrain.app.engines import run_engine
from phasetrain.app.result import RunResult
from phasetrain.app.setup import resolve_config
from phasetrain.app.stored.stored_config import StoredConfig
from phasetrain.cli import main
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import Killed

WORDS = (
    *("PHASES.epochs=2", "MODEL.width=2", "CHECKPOINT.every_updates=1"),
    "CHECKPOINT.keep_every.updates=1",
)
FINGERPRINT = "0aa51e973b13ecdfac424e924494fd069e30d84c45621e68495de1856c83adb3"
SET_LR = Question(settings=("OPTIMIZER.lr=0.5", "OPTIMIZER.momentum=0.5"), from_update=8)
STAGES = (
    "PHASES.stages=[{updates: 7}, {updates: 3, continues: true, "
    "OPTIMIZER: {lr: 0.5, momentum: 0.5}}]"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of ten updates with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train(folder, *WORDS)
    return folder


def used_at(base: Path, update: int) -> int:
    """Return a sample whose first update is the given one."""
    run = ComparedRun.open(resolve_config([*SMALL, *WORDS, f"RUN.dir={base}"]))
    for sample in range(1442):
        if next(find_updates(run.plan, run.train_sampler, np.array([sample])), 0) == update:
            return sample
    raise AssertionError(f"no sample is first used in update {update}")


def ask(
    base: Path, target: Path, question: Question, *words: str, hook: Hook | None = None
) -> tuple[RunResult, Receipt]:
    def run(overrides: Sequence[str], stored: StoredConfig) -> RunResult:
        hooks = {} if hook is None else {"kill": hook}
        quiet = Terminal(io.StringIO(), live=False)
        return run_engine(overrides, stored=stored, terminal=quiet, hooks=hooks)

    result, receipt = answer(str(base), [*words, f"RUN.dir={target}"], question, run=run)
    assert receipt is not None
    return result, receipt


@pytest.mark.feature(
    "what_if",
    "what if: a run without samples or with other values from an update on, trained from the "
    "last checkpoint before it matters",
    "`phasetrain rerun --without`, `--set --from-update`, `--keep-until`",
)
def test_run_without_a_sample_is_the_one_from_scratch(base: Path, tmp_path: Path) -> None:
    sample = used_at(base, 7)
    before = sorted((path, path.stat().st_mtime_ns) for path in base.rglob("*"))
    _, found = ask(base, tmp_path / "new", Question(without=(str(sample),)))
    assert sorted((path, path.stat().st_mtime_ns) for path in base.rglob("*")) == before
    scratch = train(tmp_path / "scratch", *WORDS, f"DATA.TRAIN.exclude=[{sample}]")
    assert differences_of_runs(tmp_path / "scratch", tmp_path / "new") == []
    assert found.digest == scratch.digest != found.original_digest
    assert (found.shared_updates, found.started_from, found.updates) == (6, 6, 10)
    assert (found.excluded, found.dataset, found.exit_code) == (1, FINGERPRINT, 0)
    assert found.original_digest == status(base)["digest"]
    assert json.loads((tmp_path / "new" / RECEIPT).read_text())["saved_updates"] == 6
    text = (tmp_path / "new" / RECEIPT_TEXT).read_text()
    assert scratch.digest in text
    assert len(text.splitlines()) <= 20


def test_sample_of_no_update_changes_no_bit(base: Path, tmp_path: Path) -> None:
    unused = used_at(base, 0)
    _, found = ask(base, tmp_path / "new", Question(without=(str(unused),)))
    assert (found.digest, found.is_same_run) == (found.original_digest, True)
    assert found.started_from == 10
    assert differences_of_runs(base, tmp_path / "new") == []


@pytest.mark.feature("what_if")
def test_setting_from_an_update_on_is_that_of_a_stage(base: Path, tmp_path: Path) -> None:
    _, found = ask(base, tmp_path / "new", SET_LR)
    scratch = train(tmp_path / "scratch", *WORDS, *found.changes)
    assert found.digest == scratch.digest != found.original_digest
    assert differences_of_runs(tmp_path / "scratch", tmp_path / "new") == []
    assert found.changes == ("PHASES.epochs=null", STAGES)
    assert found.started_from in (6, 7)


def test_kept_updates_are_those_of_the_original(base: Path, tmp_path: Path) -> None:
    _, found = ask(base, tmp_path / "new", Question(keep_until=4))
    assert (found.started_from, found.is_same_run) == (4, True)
    assert found.digest == found.original_digest
    assert differences_of_runs(base, tmp_path / "new") == []


def test_original_without_a_checkpoint_before_is_repeated_from_scratch(
    base: Path, tmp_path: Path
) -> None:
    _, found = ask(base, tmp_path / "new", Question(without=(str(used_at(base, 1)),)))
    assert (found.shared_updates, found.started_from) == (0, 0)
    assert found.digest != found.original_digest


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_and_asked_again(base: Path, tmp_path: Path, step: int) -> None:
    question = Question(without=(str(used_at(base, 7)),))
    with pytest.raises(Killed):
        ask(base, tmp_path / "new", question, hook=KillAfter(step))
    _, found = ask(base, tmp_path / "new", question)
    ask(base, tmp_path / "whole", question)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "new") == []
    assert found.started_from == 6


@pytest.mark.slow
def test_question_about_an_answer_adds_up(base: Path, tmp_path: Path) -> None:
    first, second = used_at(base, 7), used_at(base, 9)
    ask(base, tmp_path / "one", Question(without=(str(first),)))
    _, found = ask(tmp_path / "one", tmp_path / "two", Question(without=(str(second),)))
    _, direct = ask(base, tmp_path / "both", Question(without=(f"{first},{second}",)))
    assert (found.digest, found.excluded) == (direct.digest, 2)
    assert found.started_from == 8


def test_command_prints_the_receipt(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text(f"# dataset: {FINGERPRINT}\n{used_at(base, 9)}\n")
    words = ["rerun", str(base), "--without", str(ids), f"RUN.dir={tmp_path}/new", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["started_from"], found["excluded"]) == (8, 1)
    assert found["digest"] == status(tmp_path / "new")["digest"]


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (Question(without=("1442",)), "data.unknown_id"),
        (Question(without=("-1",)), "data.unknown_id"),
        (Question(without=("3,3",)), "data.duplicate_id"),
        (Question(without=(",".join(map(str, range(1400, 1500))),)), "data.unknown_id"),
        (Question(without=("three",)), "data.unreadable_ids"),
        (Question(settings=("OPTIMIZER.lr=1",)), "cli.usage"),
        (Question(from_update=3), "cli.usage"),
        (Question(settings=("OPTIMIZER.lr=1",), from_update=11), "rerun.no_such_update"),
        (Question(settings=("OPTIMIZER.lr=1",), from_update=1), "rerun.no_such_update"),
        (Question(keep_until=10), "rerun.no_such_update"),
        (Question(keep_until=-1), "rerun.no_such_update"),
        (Question(without=("",)), "cli.usage"),
        (Question(settings=("MODEL.width=9",), from_update=3), "config.unchangeable"),
    ],
)
def test_wrong_questions_are_rejected_and_write_nothing(
    base: Path, tmp_path: Path, question: Question, code: str
) -> None:
    with raises(ConfigError, code=code):
        ask(base, tmp_path / "new", question)
    assert not (tmp_path / "new").exists()


def test_ids_of_another_dataset_are_rejected(base: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("# dataset: digits:0\n3\n")
    with raises(ConfigError, key="DATA.TRAIN.exclude", code="data.other_dataset"):
        ask(base, tmp_path / "new", Question(without=(f"{tmp_path}/ids.txt",)))


def test_unfinished_and_changed_originals_are_rejected(tmp_path: Path) -> None:
    train(tmp_path / "run", *WORDS, "RUN.pause_at=2")
    with raises(ConfigError, code="rerun.not_finished"):
        ask(tmp_path / "run", tmp_path / "new", Question(keep_until=1))
    train(tmp_path / "run", *WORDS, "OPTIMIZER.lr=0.3", "RUN.allow=OPTIMIZER.lr")
    with raises(ConfigError, code="rerun.deviates"):
        ask(tmp_path / "run", tmp_path / "new", Question(keep_until=1))
    assert not (tmp_path / "new").exists()
