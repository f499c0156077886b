"""Runs from Python: the result of `run`, custom hooks and loops, and that a run leaves nothing
behind."""

import io
import json
import logging
import re
import signal
import threading
from dataclasses import replace
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
from raising import raises

from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.app.setup import resolve_config
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.cli import main
from phasetrain.config.sections import CheckpointSection
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.distributed import Consensus, World
from phasetrain.engine.batch import Batch
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks import CheckpointHook, Hook, Hooks, LedgerHook, Metrics, on
from phasetrain.models.digest import hash_model, hash_state
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.signals import Signals
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder

ROOT = Path(__file__).parents[2]


def run_quietly(*overrides: str) -> RunResult:
    """Run without printing."""
    return run(overrides, terminal=Terminal(io.StringIO(), live=False))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(folder)


def last_metrics(folder: Path) -> dict[str, float]:
    """Return the last value of every metric in metrics.jsonl, by `split/name`."""
    phases = [record for record in records(folder) if record["kind"] == "phase"]
    return {f"{p['split']}/{name}": value for p in phases for name, value in p["metrics"].items()}


def only_test_metrics(result: RunResult) -> dict[str, float]:
    """Return the metrics of test splits in a result."""
    return {name: value for name, value in (result.last or {}).items() if "test/" in name}


class TestResult:
    def test_fields_of_a_finished_run(self, trained: tuple[Path, RunResult]) -> None:
        folder, result = trained
        assert (result.state, result.reason, result.exit_code, result.updates) == (
            "finished",
            "completed",
            0,
            15,
        )
        assert result.folder == str(folder)
        assert result.seconds > 0

    def test_has_the_last_value_of_every_metric(self, trained: tuple[Path, RunResult]) -> None:
        folder, result = trained
        assert result.last == last_metrics(folder)
        assert result.last is not None
        assert result.last.keys() == {
            "train/accuracy",
            "train/loss",
            "test/accuracy",
            "test/loss",
        }

    def test_digest_is_of_the_last_weights(self, trained: tuple[Path, RunResult]) -> None:
        folder, result = trained
        assert result.digest == hash_state(newest(folder).state["task"]["model"])
        assert json.loads((folder / "status.json").read_text())["digest"] == result.digest

    def test_running_a_finished_run_again_gives_its_result(
        self, trained: tuple[Path, RunResult]
    ) -> None:
        folder, result = trained
        again = train(folder)
        assert (again.state, again.reason, again.updates) == (
            result.state,
            result.reason,
            result.updates,
        )


class TestHooks:
    def test_function_is_called_every_n_updates(self, tmp_path: Path) -> None:
        heard: list[tuple[int, float]] = []

        @on("step", every=5)
        def look(run: Any, phase: Any, out: Any) -> None:
            if phase.is_train:
                heard.append((run.state.updates, float(out.loss)))

        train(tmp_path, hooks={"look": look})
        logged = {r["updates"]: r["loss"] for r in records(tmp_path) if r["kind"] == "step"}
        assert heard == [(at, logged[at]) for at in (5, 10, 15)]

    @pytest.mark.feature("42", "hook state in checkpoints", "`Hook.state_dict`")
    def test_hook_state_resumes_after_a_kill(self, tmp_path: Path) -> None:
        class Count(Hook):
            def __init__(self) -> None:
                self.steps = 0

            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                self.steps += 1

            def state_dict(self) -> dict[str, Any]:
                return {"steps": self.steps}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.steps = state["steps"]

        run_until_killed(tmp_path, hooks={"count": Count(), "kill": KillAfter(12)})
        train(tmp_path, hooks={"count": (count := Count())})
        assert count.steps == 3 * (5 + 2)

    @pytest.mark.feature("hooks.added")
    def test_hook_added_by_another_resumes_exactly(self, tmp_path: Path) -> None:
        class Brighten(Hook):
            """Brightens each batch a little more than the one before."""

            main_only = False

            def __init__(self) -> None:
                self.batches = 0

            def on_batch(self, run: Any, phase: Any, batch: Batch) -> Batch:
                self.batches += 1
                return replace(batch, input=batch.input + 0.01 * self.batches)

            def state_dict(self) -> dict[str, Any]:
                return {"batches": self.batches}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.batches = state["batches"]

        class Adds(Hook):
            main_only = False

            def on_start(self, run: Any) -> None:
                if run.state.updates >= 4:
                    run.hooks.add("brighten", Brighten())

            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                if run.state.updates == 4 and phase.is_train:
                    run.hooks.add("brighten", Brighten())

        whole = tmp_path / "whole"
        train(whole, hooks={"adds": Adds()})
        plain = tmp_path / "plain"
        train(plain)
        assert newest(whole).manifest.state == newest(plain).manifest.state
        assert differences_of_runs(whole, plain) != []
        killed = tmp_path / "killed"
        hooks = {"adds": Adds(), "save": SaveEachStep(), "kill": KillAfter(9)}
        run_until_killed(killed, hooks=hooks)
        train(killed, hooks={"adds": Adds()})
        assert differences_of_runs(whole, killed) == []

    @pytest.mark.feature(
        "77", "a hook or a signal to any rank stops all at the same step", '`run.stop("why")`'
    )
    def test_hook_ends_the_run_for_good(self, tmp_path: Path) -> None:
        class Stop(Hook):
            def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
                run.stop("enough")

        result = train(tmp_path, hooks={"stop": Stop()})
        assert (result.state, result.reason, result.updates) == ("finished", "enough", 5)
        assert "test/accuracy" in result.last
        assert train(tmp_path).updates == 5

    @pytest.mark.feature("86-89")
    def test_checkpoint_that_a_hook_names_is_kept_and_found(self, tmp_path: Path) -> None:
        @on("step")
        def ask(run: Any, phase: Any, out: Any) -> None:
            if phase.is_train and run.state.updates == 3:
                run.consensus.ask_save("third")

        words = ("CHECKPOINT.every_updates=2", "CHECKPOINT.keep_last=2")
        train(tmp_path, *words, hooks={"ask": ask})
        saved = Checkpointer(f"{tmp_path}/checkpoints", Storage()).list_checkpoints()
        assert [one.manifest.state["updates"] for one in saved] == [3, 15, 15]
        assert (saved[0].manifest.facts.name, saved[0].manifest.facts.why) == ("third", "hook")
        tested = train(tmp_path, *words, "RUN.engine=test", "RUN.checkpoint=third")
        assert (tested.state, tested.updates) == ("tested", 3)

    @pytest.mark.parametrize("name", ["", "a/b", "latest", "best", "two words"])
    def test_invalid_checkpoint_name_is_rejected(self, name: str) -> None:
        with pytest.raises(ValueError, match=re.escape(repr(name))):
            Consensus(World()).ask_save(name)

    @pytest.mark.parametrize("label", ["checkpoint", "latest", "metrics"])
    def test_labels_of_built_in_hooks_are_reserved(self, tmp_path: Path, label: str) -> None:
        with raises(ConfigError, key=f"HOOKS.{label}"):
            train(tmp_path / "python", hooks={label: Hook()})
        if label == "metrics":  # a key under HOOKS, whose hook a config may well replace
            return
        with raises(ConfigError, key=f"HOOKS.{label}"):
            train(tmp_path / "config", f"HOOKS.{label}={{name: console}}")


def join_lease_threads() -> None:
    """Wait for the lease threads of closed runs, which end shortly after `close`."""
    for thread in threading.enumerate():
        if thread.name == "phasetrain-lease":
            thread.join(timeout=30)


class TestNothingIsLeftBehind:
    @pytest.mark.feature(
        "105",
        "hooks and custom loops from Python; runs leave no global state",
        "`phasetrain.run(hooks=..., loop=...)`",
    )
    def test_several_runs_in_one_process_restore_global_state(self, tmp_path: Path) -> None:
        logger = logging.getLogger("phasetrain")

        def traces() -> tuple[Any, ...]:
            numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
            threads = {thread.name for thread in threading.enumerate()}
            switches = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
            return (
                threads,
                switches,
                [*logger.handlers],
                logger.level,
                [signal.getsignal(n) for n in numbers],
            )

        join_lease_threads()
        before = traces()
        seen: list[tuple[Any, ...]] = []

        @on("start")
        def look(run: Any) -> None:
            seen.append(traces())

        train(tmp_path / "a", "DATA.TRAIN.workers=1", hooks={"look": look})
        train(tmp_path / "b", "MACHINE.threads=1", hooks={"look": look})
        run_until_killed(
            tmp_path / "c", "MACHINE.threads=2", hooks={"look": look, "kill": KillAfter(2)}
        )
        run_quietly(f"RUN.dir={tmp_path / 'a'}", "RUN.engine=test", *SMALL)
        join_lease_threads()
        assert traces() == before
        threads, switches, handlers, level, signals = (
            list(column) for column in zip(*seen, strict=True)
        )
        assert all("phasetrain-lease" in names for names in threads), (
            "the comparison sees a run's traces"
        )
        assert [found[0] for found in switches] == [True] * 3
        assert switches[1][1] == 1
        assert switches[2][1] == 2
        assert all(len(found) > len(before[2]) for found in handlers)
        assert all(found != before[3] for found in level)
        assert all(found != before[4] for found in signals)


class CustomLoop:
    """A program with a custom loop, as docs/task.md shows it."""

    def __init__(self, folder: Path) -> None:
        self.setup = resolve_config([*SMALL, f"RUN.dir={folder}"])
        builder = Builder(self.setup.config, self.setup.machine, self.setup.world)
        data = builder.data()
        self.plan = builder.plan(data)
        self.task = builder.task(builder.parts(data, self.plan))
        self.folder = RunFolder(str(folder))
        self.checkpointer = Checkpointer(self.folder.file("checkpoints"), self.folder.storage)
        self.loaded: LoadedCheckpoint | None = self.checkpointer.load_newest()
        self.state = RunState()
        if self.loaded is not None:
            self.state.load_state_dict(self.loaded.manifest.state)

    def run(self, *, until: int | None = None) -> PhaseEngine:
        """Run the loop, or leave it after the update `until` as a crash would."""
        settings = CheckpointSection(every_updates=1, every_epochs=None)
        with Signals() as signals, self.setup.machine.apply_settings():
            save = CheckpointHook(
                self.checkpointer, settings, signals, promised={}, loaded=self.loaded
            )
            hooks = {
                "checkpoint": save,
                "ledger": LedgerHook(),
                "metrics": Metrics(every_updates=1),
            }
            engine = PhaseEngine(self.task, self.plan, self.state, Hooks(hooks), folder=self.folder)
            for batches in engine.steps():
                if engine.state.updates == until:
                    break
                engine.finish(self.task.train_step(batches, engine.position(), engine.events()))
        return engine


class TestCustomLoop:
    def test_custom_loop_is_bit_identical_to_run(
        self, trained: tuple[Path, RunResult], tmp_path: Path
    ) -> None:
        engine = CustomLoop(tmp_path).run()
        assert engine.state == RunState(
            phase=6, step=0, updates=15, samples=360, finished="completed"
        )
        assert hash_model(engine.task.model) == trained[1].digest
        assert differences_of_runs(trained[0], tmp_path) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("updates", [1, 5, 12])
    def test_custom_loop_resumes_after_a_crash(
        self, trained: tuple[Path, RunResult], tmp_path: Path, updates: int
    ) -> None:
        CustomLoop(tmp_path).run(until=updates)
        assert newest(tmp_path).manifest.state["updates"] == updates
        CustomLoop(tmp_path).run()
        assert differences_of_runs(trained[0], tmp_path) == []

    def test_step_that_is_not_finished_is_reported(self, tmp_path: Path) -> None:
        loop = CustomLoop(tmp_path)
        with (
            loop.setup.machine.apply_settings(),
            pytest.raises(RuntimeError, match=r"engine\.finish"),
        ):
            list(PhaseEngine(loop.task, loop.plan, loop.state, Hooks()).steps())


def run_loop(folder: Path, *, fail_at: int = -1) -> RunResult:
    """Train with a custom loop that fails within a step, after the weights have been updated."""

    def loop(engine: PhaseEngine) -> None:
        for batches in engine.steps():
            out = engine.task.train_step(batches, engine.position(), engine.events())
            if engine.state.updates == fail_at:
                raise ArithmeticError("within a step")
            engine.finish(out)

    words = [*SMALL, f"RUN.dir={folder}", "CHECKPOINT.every_updates=1"]
    return run(words, loop=loop, terminal=Terminal(io.StringIO(), live=False))


def test_loop_passed_to_run_resumes_exactly_after_an_error_within_a_step(
    trained: tuple[Path, RunResult], tmp_path: Path
) -> None:
    with pytest.raises(ArithmeticError):
        run_loop(tmp_path, fail_at=7)
    assert newest(tmp_path).manifest.state["updates"] == 7
    assert run_loop(tmp_path).digest == trained[1].digest
    assert differences_of_runs(trained[0], tmp_path) == []


class TestEngines:
    def test_plan_writes_the_plan_and_reads_no_sample(
        self,
        trained: tuple[Path, RunResult],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        read: list[list[int]] = []
        items = TensorSamples.__getitems__

        def counted(self: TensorSamples, indices: list[int]) -> Any:
            read.append(indices)
            return items(self, indices)

        monkeypatch.setattr(TensorSamples, "__getitems__", counted)
        result = run_quietly(
            *SMALL, f"RUN.dir={tmp_path / 'planned'}", "RUN.engine=plan", "RUN.rehearse=false"
        )
        assert (result.state, result.exit_code, read) == ("planned", 0, [])
        assert [path.name for path in (tmp_path / "planned").iterdir()] == ["plan.json"]
        planned = json.loads((tmp_path / "planned" / "plan.json").read_text())
        assert [(phase["split"], phase["steps"]) for phase in planned["phases"]] == [
            ("train", 5),
            ("test", 2),
        ] * 3
        made = json.loads((trained[0] / "plan.json").read_text())
        assert made["phases"] == planned["phases"]
        run_quietly(*SMALL, f"RUN.dir={trained[0]}", "RUN.engine=test")
        assert read, "the count sees samples that are read"

    def test_test_gives_the_metrics_of_the_last_test(self, trained: tuple[Path, RunResult]) -> None:
        folder, result = trained
        tested = run_quietly(*SMALL, f"RUN.dir={folder}", "RUN.engine=test")
        assert tested.last == only_test_metrics(result)
        assert tested.digest == result.digest
        written = json.loads((folder / "test-p0006-s00000000.json").read_text())
        assert written["metrics"] == tested.last
        assert written["updates"] == 15

    @pytest.mark.slow
    def test_limit_may_change_for_a_test(
        self, trained: tuple[Path, RunResult], tmp_path: Path
    ) -> None:
        folder, result = trained
        overrides = (*SMALL, f"RUN.dir={folder}", "RUN.engine=test")
        tested = run_quietly(*overrides, "PHASES.limit.test=null")
        full = train(tmp_path, "PHASES.limit.test=null")
        assert full.digest == result.digest == tested.digest
        assert tested.last == only_test_metrics(full)


@pytest.mark.addon("experiments")
@pytest.mark.slow
def test_sweep_of_two_values_makes_two_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # each run is a process of its own
    words = ["-m", *SMALL, "PHASES.epochs=1", "OPTIMIZER.lr=0.1,0.01", "hydra.sweep.dir=sweep"]
    assert main(words) == 0, capfd.readouterr()
    folders = [path.parent for path in (tmp_path / "sweep").glob("*/status.json")]
    states = [json.loads((folder / "status.json").read_text()) for folder in folders]
    assert [state["state"] for state in states] == ["finished", "finished"]
    assert len({state["digest"] for state in states}) == 2
    rates = {
        line.strip()
        for f in folders
        for line in (f / "config.yaml").read_text().splitlines()
        if "  lr: 0" in line
    }
    assert rates == {"lr: 0.1", "lr: 0.01"}
