"""A skipped step is kept whole, read back equal, and a disk that is full ends nothing."""

import errno
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.engines import list_engines
from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.interleave import interleave
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase, PhaseSettings, Plan, Split, Stage
from phasetrain.engine.position import RunState
from phasetrain.errors import InvalidCheckpointError, NumericsError
from phasetrain.hooks import Hook, Hooks, Numerics
from phasetrain.hooks.numerics import folder_name, read_dump
from phasetrain.optim import GuardSettings, Updater
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import Parts, Supervised, Task


class Loader:
    """Two micro-batches of two samples each per step; the targets of chosen steps are not a
    number."""

    bad = None

    def __init__(self, *broken: int) -> None:
        self.broken = broken

    def batches(self, phase: Phase, start: int) -> Any:
        for step in range(start, phase.steps):
            yield [self.batch(step, number) for number in range(2)]

    def batch(self, step: int, number: int) -> Batch:
        generator = torch.Generator().manual_seed(2 * step + number)
        ids = torch.arange(4 * step + 2 * number, 4 * step + 2 * number + 2)
        target = torch.randn(2, 1, generator=generator)
        if number == 1 and step in self.broken:
            target[0, 0] = math.nan
        return Batch(torch.randn(2, 3, generator=generator), target, ids, 2)

    def stateful(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def engine(
    folder: Path | None, hook: Hook, *broken: int, storage: Storage | None = None, **guard: Any
) -> PhaseEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    settings = GuardSettings(names=[name for name, _ in model.named_parameters()], **guard)
    updater = Updater(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True), guard=settings
    )
    loaders: Any = {"train": Loader(*broken)}
    parts = Parts(
        model,
        nn.MSELoss(),
        {},
        updater,
        loaders,
        Machine(torch.device("cpu")),
        World(),
        0,
        config=AttrDict({"RUN": {"seed": 0}}),
    )
    plan: Plan = interleave(
        [Stage({"train": Split("train", 24, 4, True)}, PhaseSettings(epochs=1))]
    )
    run_folder = None if folder is None else RunFolder(str(folder), storage or Storage())
    task: Task = Supervised(parts)
    return PhaseEngine(task, plan, RunState(), Hooks({"numerics": hook}), folder=run_folder)


def dumps(folder: Path) -> list[str]:
    return (
        sorted(path.name for path in (folder / "numerics").iterdir())
        if (folder / "numerics").exists()
        else []
    )


class TestStop:
    def test_dump_contains_batch_state_and_finding(self, tmp_path: Path) -> None:
        run = engine(tmp_path, Numerics(), 3)
        with pytest.raises(NumericsError) as caught:
            run.run()
        folder = f"{tmp_path}/numerics/u00000004"
        assert caught.value.key == "OPTIMIZER.on_nonfinite"
        for part in ("update 4 ", "0.weight", "2.bias", "12, 13, 14, 15", folder):
            assert part in str(caught.value)
        assert ("RUN.step=4" in str(caught.value)) is ("replay" in list_engines())
        assert (run.state.updates, run.state.step) == (3, 3)
        assert sorted(path.name for path in Path(folder).iterdir()) == [
            "state.json",
            "tensors.safetensors",
        ]
        kept = read_dump(Storage(), folder)
        assert kept.position == ("train", 3, 3, 0.5, 0, 0, 0.0, None)
        assert kept.position.updates == 3
        for number, batch in enumerate(kept.batches):
            expected = Loader(3).batch(3, number)
            assert torch.equal(batch.input, expected.input)
            assert torch.equal(batch.target.nan_to_num(9.0), expected.target.nan_to_num(9.0))
            assert torch.equal(batch.ids, expected.ids)
            assert (batch.size, batch.mask) == (2, None)
        assert math.isnan(kept.found.loss)
        assert (kept.found.updates, kept.found.ids, kept.found.stops) == (4, (12, 13, 14, 15), True)

    def test_running_it_again_gives_the_same_loss(self, tmp_path: Path) -> None:
        with pytest.raises(NumericsError):
            engine(tmp_path, Numerics(), 3).run()
        kept = read_dump(Storage(), f"{tmp_path}/numerics/{folder_name(4)}")
        task = engine(None, Numerics(), 3).task
        fresh = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
        for name, part in task.stateful().items():
            part.load_state_dict(kept.task[name])
        assert not torch.equal(
            fresh["0.weight"], task.model.state_dict()["0.weight"]
        )  # three updates lie between
        task.model.train()
        losses = [task.forward(batch).loss.item() for batch in kept.batches]
        assert math.isfinite(losses[0])
        assert math.isnan(losses[1])


class TestSamplesOfTests:
    @pytest.mark.feature(
        "test.nonfinite", "samples of tests with NaN are counted and named", "`HOOKS.numerics`"
    )
    def test_those_that_are_not_finite_are_counted_once(self, caplog: Any) -> None:
        hook = Numerics()
        run = engine(None, hook)
        phase = replace(run.plan.phases[0], split="test@ema")
        loader = Loader(1, 2)
        for step in (1, 2, 3):
            hook.on_batch(run, phase, loader.batch(step, 1))
        hook.on_batch(run, phase, loader.batch(1, 1).as_padding())
        resumed = Numerics()
        resumed.load_state_dict(hook.state_dict())
        assert hook.state_dict() == resumed.state_dict() == {"marked": [6, 10]}
        resumed.on_batch(run, phase, loader.batch(2, 1))
        resumed.on_phase_end(run, phase, {})
        (warned,) = caplog.messages
        assert warned.startswith("DATA.TEST: samples with NaN or infinite values: 2 (6, 10), ")
        assert "HOOKS.numerics.tests=false" in warned
        resumed.on_phase_end(run, phase, {})
        assert resumed.state_dict() == {"marked": []}
        assert len(caplog.messages) == 1

    def test_warning_can_be_silenced(self, caplog: Any) -> None:
        hook = Numerics(tests=False)
        run = engine(None, hook)
        phase = replace(run.plan.phases[0], split="test")
        hook.on_batch(run, phase, Loader(1).batch(1, 1))
        assert hook.state_dict() == {"marked": []}
        hook.on_phase_end(run, phase, {})
        assert caplog.messages == []

    def test_train_batches_are_left_to_the_guard(self) -> None:
        hook = Numerics()
        run = engine(None, hook)
        hook.on_batch(run, run.plan.phases[0], Loader(1).batch(1, 1))
        assert hook.state_dict() == {"marked": []}


class TestSkip:
    def test_the_first_steps_are_kept(self, tmp_path: Path) -> None:
        run = engine(tmp_path, Numerics(keep=2), 0, 2, 3, on_nonfinite="skip")
        run.run()
        assert dumps(tmp_path) == ["u00000001", "u00000003"]
        assert (run.state.updates, run.task.updater.guard.skipped) == (6, 3)
        assert all(tensor.isfinite().all() for tensor in run.task.model.state_dict().values())

    def test_a_second_attempt_that_comes_by_again_finds_its_step_kept(self, tmp_path: Path) -> None:
        for _ in range(2):
            engine(tmp_path, Numerics(keep=2), 0, 2, 3, on_nonfinite="skip").run()
        assert dumps(tmp_path) == ["u00000001", "u00000003"]

    def test_with_a_lag_it_is_the_step_before_that_is_kept(self, tmp_path: Path) -> None:
        class Listen(Numerics):
            def on_skip(self, run: Any, phase: Any, batches: Any, found: Any) -> None:
                heard.append((run.state.updates, found.updates, found.ids, found.gradients))
                super().on_skip(run, phase, batches, found)

        heard: list[Any] = []
        run = engine(tmp_path, Listen(), 2, 5, on_nonfinite="skip", lag=1)
        run.run()
        assert heard == [
            (3, 3, (8, 9, 10, 11), None),
            (6, 6, (20, 21, 22, 23), None),
        ]  # the last one at the phase's end
        assert read_dump(Storage(), f"{tmp_path}/numerics/u00000003").position.updates == 2
        assert run.task.updater.guard.skipped == 2

    @pytest.mark.parametrize("lag", [0, 1])
    def test_what_stops_at_the_end_of_a_phase_stops_before_the_phase_is_counted(
        self, tmp_path: Path, lag: int
    ) -> None:
        run = engine(tmp_path, Numerics(), 5, lag=lag)
        with pytest.raises(NumericsError, match="update 6 "):
            run.run()
        assert run.state.phase == 0

    def test_keep_zero_writes_no_dump(self, tmp_path: Path) -> None:
        engine(tmp_path, Numerics(keep=0), 0, on_nonfinite="skip").run()
        assert dumps(tmp_path) == []

    def test_a_run_that_leaves_nothing_behind(self) -> None:
        run = engine(None, Numerics(), 0, on_nonfinite="skip")
        run.run()
        assert run.task.updater.guard.skipped == 1


class TestFaults:
    @pytest.mark.parametrize("operation", ["make_folder", "create", "write", "fsync", "rename"])
    def test_a_full_disk_is_warned_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, operation: str
    ) -> None:
        def fail(now: str, path: str) -> None:
            if now == operation and "u0000" in path:
                raise OSError(errno.ENOSPC, "No space left on device", path)

        run = engine(tmp_path, Numerics(), 0, storage=Storage(fail), on_nonfinite="skip")
        with caplog.at_level(logging.WARNING, "phasetrain"):
            run.run()
        assert run.state.updates == 6
        assert "HOOKS.numerics: " in caplog.text
        assert "No space left on device" in caplog.text
        assert dumps(tmp_path) == []

    def test_a_half_written_step_is_cleared_away(self, tmp_path: Path) -> None:
        half = tmp_path / "numerics" / "u00000001.tmp-0123abcd"
        half.mkdir(parents=True)
        (half / "state.json").write_text("{")
        engine(tmp_path, Numerics()).run()
        assert dumps(tmp_path) == []

    def test_invalid_dump_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidCheckpointError, match=f"{tmp_path}/u00000001"):
            read_dump(Storage(), f"{tmp_path}/u00000001")
        with pytest.raises(NumericsError):
            engine(tmp_path, Numerics(), 0).run()
        folder = tmp_path / "numerics" / "u00000001"
        (folder / "state.json").write_text("{}")
        with pytest.raises(InvalidCheckpointError, match=str(folder)):
            read_dump(Storage(), str(folder))

    def test_keep_is_checked(self) -> None:
        with pytest.raises(ValueError, match="keep = -1"):
            Numerics(keep=-1)
