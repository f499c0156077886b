"""Weight averages in whole runs: tested next to the weights, saved, resumed exactly, exported, on one
rank and on several."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from processes import Launcher
from raising import raises
from safetensors.torch import load_file
from test_numerics import SKIP, Break
from test_processes import ONE, STRIKE

from phasetrain.app.result import RunResult
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.optim.averaging import averages
from phasetrain.testing import assert_exact_resume, differences

EMA = "MODEL.ema={decay: 0.9}"
SWA = "MODEL.swa={start: 0.4, every: 2 updates, batches: 3}"
AVERAGED = (EMA, SWA, "OPTIMIZER.momentum=0.9")
CUT = [word for word in SMALL if not word.startswith(("PHASES", "HOOKS"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("averaged") / "run"
    return folder, train(
        folder, *AVERAGED, "CHECKPOINT.best.monitor=test@ema/accuracy", "CHECKPOINT.keep_last=20"
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """Return the same run without averages."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, train(folder, AVERAGED[-1])


class TestInTheRun:
    def test_each_average_is_tested_in_its_own_phase(self, trained: tuple[Path, RunResult]) -> None:
        splits = [record["split"] for record in records(trained[0]) if record["kind"] == "phase"]
        first, later = ["train", "test", "test@ema"], ["train", "test", "test@ema", "test@swa"]
        assert splits == [
            *first,
            *later,
            *later,
        ]  # SWA averages weights from update 6 of 15

    def test_metrics_are_those_of_the_averaged_weights(
        self, trained: tuple[Path, RunResult], tmp_path: Path
    ) -> None:
        folder, result = trained
        assert result.last is not None
        start = f"MODEL.weights={{path: {folder}, which: ema}}"
        other = train(
            tmp_path / "run",
            start,
            "PHASES.test_first=true",
            "PHASES.epochs=1",
            "PHASES.limit.train=1",
        )
        first = next(record for record in records(tmp_path / "run") if record["kind"] == "phase")
        assert first["metrics"]["loss"] == result.last["test@ema/loss"]
        assert result.last["test@ema/loss"] != result.last["test/loss"]
        assert other.state == "finished"

    def test_weights_are_those_of_a_run_without_averages(
        self, trained: tuple[Path, RunResult], plain: tuple[Path, RunResult]
    ) -> None:
        assert plain[1].digest == trained[1].digest
        steps = [
            [r for r in records(folder) if r["kind"] == "step"] for folder in (trained[0], plain[0])
        ]
        assert [r["loss"] for r in steps[0]] == [r["loss"] for r in steps[1]]

    def test_the_plan_counts_what_is_saved(
        self, trained: tuple[Path, RunResult], plain: tuple[Path, RunResult]
    ) -> None:
        each = [
            json.loads((folder / "plan.json").read_text())["checkpoints"]["bytes_each"]
            for folder in (trained[0], plain[0])
        ]
        model = sum(
            one.numel() * one.element_size()
            for one in newest(trained[0]).state["task"]["model"].values()
        )
        assert each[0] - each[1] == 2 * model


class TestAfterwards:
    def test_a_test_of_the_checkpoint_gives_the_metrics_of_the_run(
        self, trained: tuple[Path, RunResult]
    ) -> None:
        folder, before = trained
        found = train(folder, *AVERAGED, "RUN.engine=test")
        assert before.last is not None
        assert found.last == {
            name: value for name, value in before.last.items() if name.startswith("test")
        }
        assert len(found.last) == 6
        assert found.digest == before.digest

    def test_the_best_by_the_metric_of_an_average(self, trained: tuple[Path, RunResult]) -> None:
        folder = trained[0]
        measured = [
            r["metrics"]["accuracy"] for r in records(folder) if r.get("split") == "test@ema"
        ]
        words = (
            "RUN.engine=test",
            "RUN.checkpoint=best",
            "CHECKPOINT.best.monitor=test@ema/accuracy",
        )
        found = train(folder, *AVERAGED, *words)
        assert found.last is not None
        assert found.last["test@ema/accuracy"] == max(measured)

    @pytest.mark.addon("deploy")
    @pytest.mark.parametrize("which", ["ema", "swa"])
    def test_average_is_exported_and_started_from(
        self, trained: tuple[Path, RunResult], tmp_path: Path, which: str
    ) -> None:
        from phasetrain.addons.deploy.export import export

        folder = trained[0]
        task = newest(folder).state["task"]
        export(str(folder), str(tmp_path / "out.safetensors"), source={"which": which})
        assert differences(task[which], load_file(tmp_path / "out.safetensors"), "x") == []
        assert differences(task[which], task["model"], "x") != []
        start = (
            "OPTIMIZER.lr=0",
            "PHASES.epochs=1",
            "PHASES.limit.train=1",
            "MODEL.name=small_cnn",
        )
        train(tmp_path / "run", *start, f"MODEL.weights={{path: {folder}, which: {which}}}")
        found = newest(tmp_path / "run").state["task"]["model"]
        assert torch.equal(found["features.0.weight"], task[which]["features.0.weight"])

    def test_a_run_without_averages_has_none_to_test_or_to_start_from(
        self, plain: tuple[Path, RunResult], tmp_path: Path
    ) -> None:
        with pytest.raises(ChangedError, match=r"MODEL\.ema"):
            train(plain[0], AVERAGED[-1], "RUN.engine=test", EMA)
        with raises(ConfigError, key="MODEL.weights.path"):
            train(tmp_path / "other", f"MODEL.weights={{path: {plain[0]}, which: swa}}")


class TestExact:
    @pytest.mark.feature("model.ema_statistics")
    @pytest.mark.feature(
        "63",
        "EMA and SWA: tested, saved, exact, exported",
        "`MODEL.ema`, `MODEL.swa`, `test@ema`, `MODEL.weights.which`",
    )
    def test_killed_run_resumes_exactly(self) -> None:
        assert_exact_resume([*CUT, *AVERAGED], steps=[10], workers=None)

    @pytest.mark.feature("63")
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        ("task", "split"), [("WithoutEMA", "test@ema"), ("WithoutCount", "test@swa")]
    )
    def test_unsaved_average_is_detected(self, task: str, split: str) -> None:
        with pytest.raises(AssertionError, match=rf"step 5: .* differs .*, {split}, epoch 0"):
            assert_exact_resume(
                [*CUT, *AVERAGED, f"TASK.name=averaged_parts.{task}"], steps=[5], workers=None
            )


class Watch(Hook):
    """Records the averaged and the trained weights after each update."""

    def __init__(self) -> None:
        self.means: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.is_train:
            average: Any = run.task.parts.averages["ema"]
            self.means.append(average.module.head.weight.clone())
            self.weights.append(run.task.parts.model.get_parameter("head.weight").detach().clone())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_skipped_update_leaves_the_mean_unchanged(tmp_path: Path, precision: str) -> None:
    watch = Watch()
    words = (
        EMA,
        *SKIP,
        f"MACHINE.precision={precision}",
        "OPTIMIZER.scaler=none",
        "PHASES.epochs=1",
    )
    train(tmp_path / "run", *words, hooks={"break": Break({3}), "watch": watch})
    same = [torch.equal(one, other) for one, other in pairwise(watch.means)]
    assert same == [False, True, False, False]
    assert all(bool(one.isfinite().all()) for one in watch.means)


def test_mean_moves_once_per_update(tmp_path: Path) -> None:
    watch = Watch()
    words = ("MODEL.ema={decay: 0.9, warmup: false}", "PHASES.epochs=1")
    train(tmp_path / "run", *words, hooks={"watch": watch})
    for before, weight, after in zip(watch.means, watch.weights[1:], watch.means[1:], strict=False):
        torch.testing.assert_close(after, torch.lerp(before, weight, 0.1))


class Clamp(Hook):
    def on_update(self, run: Run, phase: Phase) -> None:
        with torch.no_grad():
            run.task.parts.model.get_parameter("head.weight").fill_(1.0)


@pytest.mark.parametrize("by_hook", [False, True])
def test_mean_is_taken_after_a_step_has_changed_the_weights(tmp_path: Path, by_hook: bool) -> None:
    hooks: dict[str, Hook] = {"watch": Watch()} | ({"clamp": Clamp()} if by_hook else {})
    words = ("MODEL.ema={decay: 0.5, warmup: false}", "PHASES.epochs=1")
    name = "supervised" if by_hook else "averaged_parts.Clamping"
    train(tmp_path / "run", *words, f"TASK.name={name}", hooks=hooks)
    watch: Any = hooks["watch"]
    for before, after in pairwise(watch.means):
        torch.testing.assert_close(1 - after, 0.5 * (1 - before))


def test_ungated_average_would_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = averages.EMA.update
    monkeypatch.setattr(
        averages.EMA, "update", lambda self, updates, skipped=False: real(self, updates)
    )
    watch = Watch()
    train(
        tmp_path / "run", EMA, *SKIP, "PHASES.epochs=1", hooks={"break": Break({3}), "watch": watch}
    )
    assert not torch.equal(watch.means[1], watch.means[2])


def test_averages_work_with_activation_checkpointing(
    tmp_path: Path, trained: tuple[Path, RunResult]
) -> None:
    train(tmp_path / "run", *AVERAGED, "MACHINE.activation_checkpointing=[Conv2d, Linear]")
    one, other = (newest(folder).state["task"] for folder in (trained[0], tmp_path / "run"))
    assert differences(one["ema"], other["ema"], "ema") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
class TestOnCUDA:
    """On CUDA the check of an update is late; a flag on the device holds the average back."""

    def test_skipped_update_leaves_the_mean_unchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
    ) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        watch = Watch()
        words = (EMA, *SKIP, "MACHINE.device=cuda", f"MACHINE.precision={precision}")
        train(
            tmp_path / "run", *words, "PHASES.epochs=1", hooks={"break": Break({3}), "watch": watch}
        )
        same = [torch.equal(one, other) for one, other in pairwise(watch.means)]
        assert same[1]
        assert precision == "fp16" or same == [
            False,
            True,
            False,
            False,
        ]  # a high initial loss scale skips more updates

    def test_killed_run_resumes_exactly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
    ) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        rule = "MODEL.freeze_updates=[{match: features.0, for: 4}]"
        words = (*AVERAGED, rule, "MACHINE.device=cuda", f"MACHINE.precision={precision}")
        train(tmp_path / "unbroken", *words)
        for step in (3, 10):
            run_until_killed(
                tmp_path / str(step),
                *words,
                hooks={"save": SaveEachStep(), "kill": KillAfter(step)},
            )
            train(tmp_path / str(step), *words)
            assert differences_of_runs(tmp_path / "unbroken", tmp_path / str(step)) == []


class TestRefused:
    def test_monitor_of_an_untested_average_is_rejected(self, tmp_path: Path) -> None:
        with raises(
            ConfigError, key="HOOKS.early_stopping.monitor", suggestion="test@ema/accuracy"
        ):
            train(tmp_path / "run", EMA, "HOOKS.early_stopping={monitor: test@emma/accuracy}")
        quiet = "MODEL.ema={test: false}"
        with raises(ConfigError, key="HOOKS.early_stopping.monitor"):
            train(tmp_path / "other", quiet, "HOOKS.early_stopping={monitor: test@ema/accuracy}")

    def test_unknown_key_is_rejected_with_a_suggestion(self, tmp_path: Path) -> None:
        with raises(ConfigError, key="MODEL.ema.decya", suggestion="MODEL.ema.decay"):
            train(tmp_path / "run", "MODEL.ema={decya: 0.9}")
        assert not (tmp_path / "run").exists()


class TestSeveralProcesses:
    @pytest.mark.slow
    def test_killed_and_resumed_on_three(self, launcher: Launcher, tmp_path: Path) -> None:
        words = (
            *SMALL,
            ONE,
            *AVERAGED,
            "PHASES.epochs=2",
            "MODEL.freeze_updates=[{match: features.0, for: 4}]",
        )
        assert launcher.run(tmp_path / "unbroken", 3, *words).codes == [0, 0, 0]
        strike = (STRIKE, "HOOKS.strike={rank: 1, update: 7}", "CHECKPOINT.every_updates=2")
        assert launcher.run(tmp_path / "run", 3, *words, *strike).codes[1] == -9
        assert launcher.run(tmp_path / "run", 3, *words, *strike).codes == [0, 0, 0]
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []
        metrics = [
            r["metrics"]
            for r in records(tmp_path / "unbroken")
            if r.get("split") in ("test@ema", "test@swa")
        ]
        assert len(metrics) == 4

    @pytest.mark.slow
    def test_ordered_sums_give_the_averages_of_one_process(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        words = (*SMALL, ONE, *AVERAGED, "PHASES.epochs=2", "DISTRIBUTED.reduction=ordered")
        for size in (1, 4):
            assert launcher.run(tmp_path / str(size), size, *words).codes == [0] * size
        one, other = (newest(tmp_path / str(size)).state["task"] for size in (1, 4))
        for name in ("model", "ema", "swa"):
            assert differences(one[name], other[name], name) == []

    @pytest.mark.addon("sharding")
    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["zero", "sharded_ddp", "fsdp"])
    def test_every_strategy_resumes_exactly(
        self, launcher: Launcher, tmp_path: Path, strategy: str
    ) -> None:
        words = (
            *SMALL,
            ONE,
            *AVERAGED,
            "PHASES.epochs=2",
            "MODEL.freeze_updates=[{match: features.0, for: 4}]",
        )
        words = (*words, "MODEL.freeze=[features.4]")
        assert launcher.run(tmp_path / "ddp", 3, *words).codes == [0, 0, 0]
        using = (*words, f"DISTRIBUTED.strategy={strategy}")
        ended = launcher.run(tmp_path / "unbroken", 3, *using)
        assert ended.codes == [0, 0, 0], ended.outputs
        one, other = (newest(tmp_path / name).state["task"] for name in ("ddp", "unbroken"))
        for name in ("model", "ema", "swa"):
            far = max(
                float((one[name][k].double() - other[name][k].double()).abs().max())
                for k in one[name]
            )
            assert far < 1e-4, (name, far)
        strike = (STRIKE, "HOOKS.strike={rank: 2, update: 7}", "CHECKPOINT.every_updates=2")
        assert launcher.run(tmp_path / "run", 3, *using, *strike).codes[2] == -9
        ended = launcher.run(tmp_path / "run", 3, *using, *strike)
        assert ended.codes == [0, 0, 0], ended.outputs
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []
