"""Runs whose losses or gradients are not finite: stopped or skipped, killed in the midst, equal to
the last bit."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, die, differences, leftovers, newest, parted, train
from raising import raises

from phasetrain.commands.cli import main
from phasetrain.errors import NumericsError
from phasetrain.hooks import Hook
from phasetrain.hooks.numerics import read_dump
from phasetrain.runtime.storage import Storage

SKIP = (
    "OPTIMIZER.on_nonfinite=skip",
    "METERS.loss=null",
)  # a mean over losses that hold a NaN equals nothing


class Break(Hook):
    """Makes the loss of chosen updates NaN, a function of the position."""

    def __init__(self, updates: Collection[int]) -> None:
        self.updates = updates

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        if phase.is_train and run.state.updates + 1 in self.updates:
            out.loss = out.loss * math.nan


def dumps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "numerics").glob("*"))


def finite(folder: Path) -> bool:
    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, dict):
            return [found for item in value.values() for found in tensors(item)]
        return [value] if isinstance(value, torch.Tensor) else []

    task = newest(folder).state["task"]
    return all(
        bool(t.isfinite().all()) for part in ("model", "updater") for t in tensors(task[part])
    )


BAD = {3, 4, 6, 11}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    result = train(folder, *SKIP, hooks={"break": Break(BAD)})
    assert (result.state, result.updates) == ("finished", 15)
    return folder


def test_skipped_updates_are_counted_kept_and_leave_no_trace(unbroken: Path) -> None:
    updater = newest(unbroken).state["task"]["updater"]
    assert (updater["skipped"], updater["skipped_in_row"]) == (4, 0)
    assert dumps(unbroken) == ["u00000003", "u00000004", "u00000006"]
    assert finite(unbroken)
    assert leftovers(unbroken) == []


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "step", [2, 3, 6, 12]
)  # after one skip, after two, in a test phase, before the last
def test_killed_in_the_midst_of_skips_and_resumed(
    unbroken: Path, tmp_path: Path, step: int
) -> None:
    die(
        tmp_path,
        *SKIP,
        hooks={"save": SaveEachStep(), "kill": KillAfter(step), "break": Break(BAD)},
    )
    train(tmp_path, *SKIP, hooks={"break": Break(BAD)})
    assert parted(unbroken, tmp_path) == []
    assert dumps(tmp_path) == dumps(unbroken)


def test_without_the_skips_the_bits_are_others(unbroken: Path, tmp_path: Path) -> None:
    train(tmp_path, *SKIP)
    assert parted(unbroken, tmp_path) != []
    assert dumps(tmp_path) == []


def test_without_the_guard_the_weights_are_lost(tmp_path: Path) -> None:
    train(
        tmp_path, "OPTIMIZER.on_nonfinite=ignore", "METERS.loss=null", hooks={"break": Break(BAD)}
    )
    assert not finite(tmp_path)


class TestStop:
    def test_error_says_what_where_and_how_to_resume(self, tmp_path: Path) -> None:
        with pytest.raises(NumericsError) as caught:
            train(tmp_path, hooks={"save": SaveEachStep(), "break": Break({4})})
        text = str(caught.value)
        assert text.startswith(
            "OPTIMIZER.on_nonfinite = 'stop': update 4 is not finite (loss nan; gradients of "
        )
        assert (
            f"the step is saved in {tmp_path}/numerics/u00000004; inspect it with RUN.engine=replay RUN.step=4"
            in text
        )
        assert newest(tmp_path).manifest.state["updates"] == 3
        kept = read_dump(Storage(), f"{tmp_path}/numerics/u00000004")
        assert kept.position[:3] == ("train", 3, 3)
        assert tuple(kept.batches[0].ids.tolist()) == kept.found.ids
        assert len(kept.found.gradients or ()) == 10
        before = newest(tmp_path).state["task"]
        assert differences(kept.task["updater"], before["updater"]) == []
        learned = [
            name for name in before["model"] if "running" not in name and "tracked" not in name
        ]
        assert (
            differences(
                *({name: state["model"][name] for name in learned} for state in (kept.task, before))
            )
            == []
        )

    def test_same_command_stops_there_again_and_another_gets_past(self, tmp_path: Path) -> None:
        hooks = {"break": Break({4, 5})}
        for _ in range(2):
            with pytest.raises(NumericsError, match="update 4 is not finite"):
                train(tmp_path, "CHECKPOINT.every_updates=1", hooks=hooks)
        allow = "RUN.allow=[OPTIMIZER.on_nonfinite]"
        assert (
            train(tmp_path, "OPTIMIZER.on_nonfinite=skip", allow, hooks=hooks).state == "finished"
        )
        assert newest(tmp_path).state["task"]["updater"]["skipped"] == 2

    def test_on_the_command_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "torn_loss.py").write_text(TORN)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert (
            main(["RUN.imports=[torn_loss]", "LOSS.name=torn", "PHASES.epochs=1", "RUN.dir=run"])
            == 1
        )
        error = capsys.readouterr().err
        assert "OPTIMIZER.on_nonfinite = 'stop': update" in error
        assert "Traceback" not in error
        assert '"state": "failed"' in (tmp_path / "run" / "status.json").read_text()


TORN = '''
import torch
from phasetrain.losses import LOSSES


@LOSSES.register("torn")
def torn(output, target):
    """Cross-entropy, and the square root of 0 where a batch begins with a three: finite, its gradient is not."""
    loss = torch.nn.functional.cross_entropy(output, target)
    return loss + (output.sum() * 0).sqrt() if int(target[0]) == 3 else loss
'''


class TestBudget:
    def test_counting_resumes_after_a_kill(self, tmp_path: Path) -> None:
        words = (*SKIP, "OPTIMIZER.skip_budget=3")
        hooks = {"break": Break({2, 4, 5, 6, 7, 8})}
        with pytest.raises(
            NumericsError,
            match=r"^OPTIMIZER\.skip_budget = 3: 4 updates in a row .* update 7 is not",
        ):
            train(tmp_path / "unbroken", *words, hooks=hooks)
        die(
            tmp_path / "killed",
            *words,
            hooks={"save": SaveEachStep(), "kill": KillAfter(4), **hooks},
        )
        with pytest.raises(
            NumericsError,
            match=r"^OPTIMIZER\.skip_budget = 3: 4 updates in a row .* update 7 is not",
        ):
            train(tmp_path / "killed", *words, hooks=hooks)

    def test_skips_with_a_good_update_between_are_not_bounded(self, tmp_path: Path) -> None:
        result = train(
            tmp_path, *SKIP, "OPTIMIZER.skip_budget=1", hooks={"break": Break(range(1, 16, 2))}
        )
        assert result.state == "finished"
        assert newest(tmp_path).state["task"]["updater"]["skipped"] == 8

    def test_setting_may_change_on_resume(self, tmp_path: Path) -> None:
        hooks = {"break": Break({4, 5, 6})}
        with pytest.raises(NumericsError):
            train(
                tmp_path,
                *SKIP,
                "OPTIMIZER.skip_budget=2",
                "CHECKPOINT.every_updates=1",
                hooks=hooks,
            )
        assert train(tmp_path, *SKIP, "OPTIMIZER.skip_budget=3", hooks=hooks).state == "finished"

    def test_the_overflows_of_a_scaler_are_bounded_and_no_fault_before(
        self, tmp_path: Path
    ) -> None:
        words = (
            "MACHINE.precision=fp16",
            "OPTIMIZER.scaler={name: grad, init_scale: 1e12, growth_interval: 50}",
        )
        assert train(tmp_path / "enough", *words).state == "finished"
        skipped = newest(tmp_path / "enough").state["task"]["updater"]["skipped"]
        assert skipped > 2
        assert dumps(tmp_path / "enough") == []
        with raises(NumericsError, key="OPTIMIZER.skip_budget"):
            train(tmp_path / "short", *words, "OPTIMIZER.skip_budget=2")
        assert dumps(tmp_path / "short") == ["u00000003"]


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "words",
    [
        ("MACHINE.precision=bf16",),
        ("MACHINE.precision=fp16",),
        ("OPTIMIZER.accumulate=3", "OPTIMIZER.name=adamw", "OPTIMIZER.lr=0.01"),
        ("OPTIMIZER.clip_norm=0.5", "MACHINE.deterministic=false"),
    ],
    ids=lambda words: words[0],
)
def test_other_machines_and_updates(tmp_path: Path, words: tuple[str, ...]) -> None:
    hooks = {"break": Break({2, 3, 7})}
    words = (*SKIP, "PHASES.epochs=2", *words)
    train(tmp_path / "unbroken", *words, hooks=hooks)
    assert newest(tmp_path / "unbroken").state["task"]["updater"]["skipped"] >= 3
    assert finite(tmp_path / "unbroken")
    die(tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(2), **hooks})
    train(tmp_path / "killed", *words, hooks=hooks)
    assert parted(tmp_path / "unbroken", tmp_path / "killed") == []
