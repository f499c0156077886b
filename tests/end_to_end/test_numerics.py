"""Runs whose losses or gradients are not finite: stopped, or skipped and killed between skips, with
the same bits."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    KillAfter,
    SaveEachStep,
    differences,
    differences_of_runs,
    leftovers,
    newest,
    run_until_killed,
    train,
)
from raising import raises

from phasetrain.cli import main
from phasetrain.config.engines import list_engines
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


class SpoilInput(Hook):
    """Writes NaN into the second and third sample of each batch."""

    def on_batch(self, run: Any, phase: Any, batch: Any) -> Any:
        batch.input[1:3] = math.nan
        return batch


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


def test_skipped_updates_are_counted_dumped_and_leave_no_trace(unbroken: Path) -> None:
    updater = newest(unbroken).state["task"]["updater"]
    assert (updater["skipped"], updater["skipped_in_row"]) == (4, 0)
    assert dumps(unbroken) == ["u00000003", "u00000004", "u00000006"]
    assert finite(unbroken)
    assert leftovers(unbroken) == []


@pytest.mark.feature(
    "67",
    "non-finite loss or gradient: all ranks stop or skip; the step is dumped",
    "`OPTIMIZER.on_nonfinite`, `OPTIMIZER.skip_budget`, `HOOKS.numerics`",
)
@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "step", [2, 3, 6, 12]
)  # after one skip, after two, in a test phase, before the last
def test_run_killed_between_skips_resumes_exactly(
    unbroken: Path, tmp_path: Path, step: int
) -> None:
    run_until_killed(
        tmp_path,
        *SKIP,
        hooks={"save": SaveEachStep(), "kill": KillAfter(step), "break": Break(BAD)},
    )
    train(tmp_path, *SKIP, hooks={"break": Break(BAD)})
    assert differences_of_runs(unbroken, tmp_path) == []
    assert dumps(tmp_path) == dumps(unbroken)


@pytest.mark.slow
def test_weights_differ_without_the_skips(unbroken: Path, tmp_path: Path) -> None:
    train(tmp_path, *SKIP)
    assert differences_of_runs(unbroken, tmp_path) != []
    assert dumps(tmp_path) == []


def test_weights_are_lost_if_nonfinite_losses_are_ignored(tmp_path: Path) -> None:
    words = ("PHASES.epochs=1", "OPTIMIZER.on_nonfinite=ignore", "METERS.loss=null")
    train(tmp_path, *words, hooks={"break": Break(BAD)})
    assert not finite(tmp_path)


class TestStop:
    def test_error_names_the_update_and_its_dump(self, tmp_path: Path) -> None:
        with raises(NumericsError, key="OPTIMIZER.on_nonfinite", given="'stop'") as caught:
            train(tmp_path, hooks={"save": SaveEachStep(), "break": Break({4})})
        text = str(caught.value)
        assert "update 4 is not finite (loss nan; gradients of " in text
        assert f"{tmp_path}/numerics/u00000004" in text
        assert ("RUN.engine=replay RUN.step=4" in text) is ("replay" in list_engines())
        assert newest(tmp_path).manifest.state["updates"] == 3
        kept = read_dump(Storage(), f"{tmp_path}/numerics/u00000004")
        assert kept.position[:3] == ("train", 3, 3)
        assert tuple(kept.batches[0].ids.tolist()) == kept.found.ids
        assert len(kept.found.gradients or ()) == 10
        before = newest(tmp_path).state["task"]
        # Update 4 has begun, so its learning rate is the last one.
        assert differences(kept.task["updater"], before["updater"]) == ["state.used_lr"]
        learned = [
            name for name in before["model"] if "running" not in name and "tracked" not in name
        ]
        assert (
            differences(
                *({name: state["model"][name] for name in learned} for state in (kept.task, before))
            )
            == []
        )

    def test_error_names_the_samples_whose_input_is_not_finite(self, tmp_path: Path) -> None:
        with raises(NumericsError, key="OPTIMIZER.on_nonfinite") as caught:
            train(tmp_path, hooks={"spoil": SpoilInput()})
        found = read_dump(Storage(), f"{tmp_path}/numerics/u00000001").found
        assert found.bad_inputs == found.ids[1:3]
        assert found.bad_targets == ()
        samples = f"2 of {len(found.ids)} samples: {found.ids[1]}, {found.ids[2]}"
        assert f"the input has NaN or infinite values in {samples}" in str(caught.value)
        assert "skip" not in str(caught.value)

    def test_same_command_stops_again_and_skip_gets_past(self, tmp_path: Path) -> None:
        hooks = {"break": Break({4, 5})}
        for _ in range(2):
            with pytest.raises(NumericsError, match="update 4 "):
                train(tmp_path, "PHASES.epochs=1", "CHECKPOINT.every_updates=1", hooks=hooks)
        words = ("OPTIMIZER.on_nonfinite=skip", "RUN.allow=[OPTIMIZER.on_nonfinite]")
        assert train(tmp_path, "PHASES.epochs=1", *words, hooks=hooks).state == "finished"
        assert newest(tmp_path).state["task"]["updater"]["skipped"] == 2

    def test_command_line_ends_with_exit_code_1_and_no_traceback(
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
        assert "OPTIMIZER.on_nonfinite = 'stop'" in error
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
    def test_count_of_skips_survives_a_kill(self, tmp_path: Path) -> None:
        words = (*SKIP, "OPTIMIZER.skip_budget=3")
        hooks = {"break": Break({2, 4, 5, 6, 7, 8})}
        run_until_killed(
            tmp_path, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(4), **hooks}
        )
        with raises(NumericsError, key="OPTIMIZER.skip_budget", given="3") as caught:
            train(tmp_path, *words, hooks=hooks)
        assert "update 7 " in str(caught.value)

    def test_skips_with_a_good_update_between_them_are_not_bounded(self, tmp_path: Path) -> None:
        result = train(
            tmp_path,
            *SKIP,
            "PHASES.epochs=1",
            "OPTIMIZER.skip_budget=1",
            hooks={"break": Break(range(1, 16, 2))},
        )
        assert result.state == "finished"
        assert newest(tmp_path).state["task"]["updater"]["skipped"] == 3

    @pytest.mark.slow
    def test_budget_may_change_on_resume(self, tmp_path: Path) -> None:
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

    def test_overflows_of_a_scaler_are_dumped_only_beyond_the_budget(self, tmp_path: Path) -> None:
        words = (
            "PHASES.epochs=1",
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


@pytest.mark.slow
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
def test_skips_resume_exactly_under_other_settings(tmp_path: Path, words: tuple[str, ...]) -> None:
    hooks = {"break": Break({2, 3, 7})}
    words = (*SKIP, "PHASES.epochs=2", *words)
    train(tmp_path / "unbroken", *words, hooks=hooks)
    assert newest(tmp_path / "unbroken").state["task"]["updater"]["skipped"] >= 3
    assert finite(tmp_path / "unbroken")
    run_until_killed(
        tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(2), **hooks}
    )
    train(tmp_path / "killed", *words, hooks=hooks)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
