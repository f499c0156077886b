"""Faults that only CUDA shows, planted one at a time: the emulation finds each."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import Device, api, emulate_cuda, tensor, why_not_emulated
from emulated_runs import EVENT, READ, check_kernels, check_waits, kill_and_resume, record_update
from harness import SMALL
from torch import Tensor

from phasetrain.checkpoint.snapshot import Snapshot
from phasetrain.distributed import world
from phasetrain.engine.batch import Batch
from phasetrain.errors import PhasetrainError
from phasetrain.optim import Updater
from phasetrain.optim.update.gradients import FiniteCheck
from phasetrain.optim.update.guard import RestorePoint
from phasetrain.optim.update.state import UpdaterState
from phasetrain.runtime.nested import map_tensors
from phasetrain.tasks.metering import LogMeans

pytestmark = [
    pytest.mark.slow,
    pytest.mark.addon("vision"),
    pytest.mark.skipif(why_not_emulated() is not None, reason=why_not_emulated() or ""),
]

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Path, Device, tuple[str, ...]], None]
CAUGHT = (AssertionError, RuntimeError, TypeError, PhasetrainError)
PREFETCH = ("DATA.TRAIN={workers: 1, pin_memory: true, prefetch_to_device: true}",)
PARTS = "RUN.imports=[emulated_parts]"
EMA_WORDS = ("MODEL.ema={decay: 0.9}", "OPTIMIZER={name: adamw, lr: 0.01}")
NOT_FUSED = ("OPTIMIZER={name: RMSprop, lr: 0.001}",)
FAULTS: list[Any] = []


@dataclass(frozen=True)
class Fault:
    """A fault and what finds it.

    Attributes:
        plant: changes the code.
        check: finds it.
        words: overrides of the run.
        message: pattern of a part of the message.
    """

    plant: Plant
    check: Check
    words: tuple[str, ...]
    message: str


def fault(check: Check, message: str, *words: str) -> Callable[[Plant], Plant]:
    def decorate(plant: Plant) -> Plant:
        made = Fault(plant, check, words, message)
        FAULTS.append(pytest.param(made, id=plant.__name__.replace("_", " ")))
        return plant

    return decorate


def update(folder: Path, device: Device, words: tuple[str, ...]) -> None:
    records = record_update(folder / "run", device, *words)
    check_waits(records, [READ] if words == NOT_FUSED else [EVENT])
    if not any(word.startswith(("MODEL", "LOSS", "OPTIMIZER")) for word in words):
        check_kernels(records)


def races(folder: Path, device: Device, words: tuple[str, ...]) -> None:
    record_update(folder / "run", device, *words)


def resume(folder: Path, device: Device, words: tuple[str, ...]) -> None:
    kill_and_resume(folder, *SMALL, *words)


def save_of_ranks(folder: Path, device: Device, words: tuple[str, ...]) -> None:
    world._pickle_on_cpu({"sum": torch.ones(3, device="cuda")})


def dump(folder: Path, device: Device, words: tuple[str, ...]) -> None:
    images = torch.ones(2, 3, device="cuda")
    batch = Batch(images, None, torch.arange(2), 2).to(torch.device("cpu"))
    assert batch.input.tolist() == [[1, 1, 1]] * 2, "the dump holds garbage"


# Devices that are mixed


@fault(resume, "same device", "LOSS.name=task_parts.Terms")
def restored_sums_stay_on_the_host(patch: pytest.MonkeyPatch) -> None:
    def add(self: LogMeans, out: Any) -> None:
        for name, value in out.logs.items():
            added = value.double() * out.weight
            total = self._totals.get(name)
            self._totals[name] = added if total is None else total.add_(added)
            self._weights[name] = self._weights.get(name, 0.0) + out.weight

    patch.setattr(LogMeans, "add", add)


@fault(resume, "same device")
def restored_momentum_stays_on_the_host(patch: pytest.MonkeyPatch) -> None:
    load = UpdaterState.load_state_dict

    def load_on_host(self: Any, state: dict[str, Any]) -> None:
        load(self, state)
        for entries in self.optimizer.state.values():
            entries.update(
                {name: map_tensors(value, Tensor.cpu) for name, value in entries.items()}
            )

    patch.setattr(UpdaterState, "load_state_dict", load_on_host)


@fault(update, "same device", PARTS, "MODEL={name: emulated_parts.Planted, how: constant}")
def constant_of_a_model_is_no_buffer(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "same device", PARTS, "METERS.mine={name: emulated_parts.HostMeter}")
def sum_of_a_meter_is_no_buffer(patch: pytest.MonkeyPatch) -> None:
    pass


# Copies that are read, or memory that is used, too early


@fault(update, "not finite")
def verdict_is_read_without_its_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(api.Event, "synchronize", lambda self: None)


@fault(resume, "without waiting", *PREFETCH)
def prefetched_batch_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(api.EmulatedStream, "wait_stream", lambda self, other: None)


@fault(races, "record_stream", *PREFETCH, "OPTIMIZER.on_nonfinite=ignore")
def allocator_does_not_know_the_use_of_a_prefetched_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor.CudaTensor, "record_stream", lambda self, stream: None)


@fault(dump, "garbage")
def batch_is_copied_to_the_host_without_blocking(patch: pytest.MonkeyPatch) -> None:
    def to(self: Batch, device: torch.device) -> Batch:
        return self._mapped(lambda one: one.to(device, non_blocking=True))

    patch.setattr(Batch, "to", to)


@fault(resume, "is not finite|differs")
def snapshot_is_written_before_it_is_complete(patch: pytest.MonkeyPatch) -> None:
    copy = Snapshot.copy_tensors

    def copy_early(self: Snapshot, tensors: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.cuda, "synchronize", lambda: None)
            return copy(self, tensors)

    patch.setattr(Snapshot, "copy_tensors", copy_early)


@fault(
    races,
    "race: memory was changed",
    PARTS,
    "HOOKS.mine={name: emulated_parts.StepHook, how: reuse}",
)
def pinned_memory_is_written_during_its_copy(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(save_of_ranks, "pickled")
def state_of_a_rank_is_pickled_on_its_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world._CpuPickler, "reducer_override", lambda self, value: NotImplemented)


# The host waits


@fault(update, "planted_parts.py", "HOOKS.mine={name: planted_parts.ItemHook}")
def hook_reads_the_loss(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "planted_parts.py", "HOOKS.mine={name: planted_parts.CpuHook}")
def hook_copies_the_loss(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "planted_parts.py", "METERS.mine={name: planted_parts.ForgetfulMeter}")
def meter_reads_the_loss(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "planted_parts.py", "LOSS.name=planted_parts.reading")
def loss_branches_on_its_value(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "emulated_parts.py", "LOSS.name=emulated_parts.masked")
def loss_selects_by_a_mask(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(
    update,
    "emulated_parts.py",
    PARTS,
    "HOOKS.mine={name: emulated_parts.StepHook, how: synchronize}",
)
def hook_synchronizes(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "numpy", PARTS, "HOOKS.mine={name: emulated_parts.StepHook, how: numpy}")
def hook_converts_the_loss_to_numpy(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "numpy", "HOOKS.ledger={deferred: false}")
def ledger_reads_each_update(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "step_twice", *NOT_FUSED)
def loss_and_gradients_are_read_one_by_one(patch: pytest.MonkeyPatch) -> None:
    step = Updater._step_at_once

    def step_twice(self: Updater, loss: Tensor | None, on_skip: Any) -> bool | Tensor:
        assert loss is not None
        loss.item()
        return step(self, loss, on_skip)

    patch.setattr(Updater, "_step_at_once", step_twice)


@fault(update, "copy to the device")
def batch_is_copied_with_blocking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Batch, "to", lambda self, device: self._mapped(lambda one: one.to(device)))


@fault(update, "mixing.py", "DATA.TRAIN.batch_transforms=[mixup]")
def partners_of_mixed_samples_stay_on_the_host(patch: pytest.MonkeyPatch) -> None:
    from phasetrain.addons.vision.batch_transforms import mixing

    draw = mixing.draw_partners
    patch.setattr(mixing, "draw_partners", lambda *arguments: draw(*arguments).cpu())


# Kernels


@fault(update, "guard.py")
def buffers_are_restored_one_by_one(patch: pytest.MonkeyPatch) -> None:
    def restore_where(self: RestorePoint, flag: Tensor) -> None:
        for now, copy in self._pairs():
            now.copy_(torch.where(flag != 0, copy, now))

    patch.setattr(RestorePoint, "restore_where", restore_where)


@fault(update, "gradients.py")
def gradients_are_checked_one_by_one(patch: pytest.MonkeyPatch) -> None:
    mark = FiniteCheck.mark

    def mark_each(self: FiniteCheck, tensors: list[Tensor], **options: bool) -> Tensor:
        return [mark(self, [one], **options) for one in tensors][-1]

    patch.setattr(FiniteCheck, "mark", mark_each)


@fault(
    update, "emulated_parts.py", PARTS, "HOOKS.mine={name: emulated_parts.StepHook, how: kernel}"
)
def hook_computes_on_the_device(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "deterministic", PARTS, "MODEL={name: emulated_parts.Planted, how: pool}")
def backward_pass_has_no_deterministic_kernel(patch: pytest.MonkeyPatch) -> None:
    pass


@fault(update, "deterministic", PARTS, "MODEL={name: emulated_parts.Planted, how: cumsum}")
def forward_pass_has_no_deterministic_kernel(patch: pytest.MonkeyPatch) -> None:
    pass


# Bits


@fault(resume, "differs")
def generator_of_the_device_is_not_seeded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(api.Generator, "manual_seed", lambda self, seed: self)


@fault(resume, "differs", *EMA_WORDS)
def first_update_moves_averages_by_other_kernels(patch: pytest.MonkeyPatch) -> None:
    step = Updater._step_gated

    def step_with_bool(self: Updater, loss: Tensor | None, on_skip: Any) -> bool | Tensor:
        skipped = step(self, loss, on_skip)
        return skipped if self.guard._pending else False

    patch.setattr(Updater, "_step_gated", step_with_bool)


@pytest.mark.parametrize("planted", FAULTS)
def test_planted_fault_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Fault
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with pytest.raises(CAUGHT) as caught, emulate_cuda() as device:  # noqa: PT012 - races at its end
        planted.plant(monkeypatch)
        planted.check(tmp_path, device, planted.words)
    assert re.search(planted.message, str(caught.value))
