"""Runs on an emulated CUDA device: killed and resumed, and what one update costs there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_cuda import Device, emulate_cuda, why_not_emulated
from emulated_runs import (
    EVENT,
    READ,
    check_kernels,
    check_waits,
    count_kernels,
    group_kernels,
    kill_and_resume,
    record_bare_update,
    record_update,
)
from gan_parts import SHORT, make_words
from harness import SMALL

from phasetrain.checkpoint.snapshot import Snapshot, parse_safetensors
from phasetrain.testing.build import build_run

pytestmark = pytest.mark.skipif(why_not_emulated() is not None, reason=why_not_emulated() or "")

VISION = pytest.mark.addon("vision")
OPTIMIZERS = pytest.mark.addon("optimizers")
SLOW = pytest.mark.slow
AHEAD = (
    "DATA.TRAIN={workers: 1, pin_memory: true, prefetch_to_device: true}",
    "DATA.TEST.prefetch_to_device=true",
)
ADAMW = "OPTIMIZER={name: adamw, lr: 0.01, clip_norm: 1, accumulate: 2}"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with emulate_cuda() as made:
        yield made


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("LOSS.name=task_parts.Terms",), id="fp32, logged numbers"),
        pytest.param(
            (ADAMW, "MACHINE.precision=bf16", "MODEL.ema={decay: 0.9}"), id="bf16, adamw, ema"
        ),
        pytest.param(("MACHINE.precision=fp16", "MODEL.swa={start: 0.3}"), id="fp16, swa"),
        pytest.param(
            ("OPTIMIZER.sam={rho: 0.1}",), id="sam", marks=pytest.mark.addon("optimizers")
        ),
        pytest.param(
            (*AHEAD, "DATA.TRAIN.batch_transforms=[mixup, cutmix]"),
            id="workers, pinning, prefetch, mixing",
            marks=VISION,
        ),
        pytest.param(AHEAD, id="workers, pinning, prefetch", marks=SLOW),
        pytest.param((ADAMW, "MACHINE.precision=fp16"), id="fp16, adamw", marks=SLOW),
        pytest.param(("OPTIMIZER={name: RMSprop, lr: 0.001}",), id="not fused", marks=SLOW),
        pytest.param(("OPTIMIZER={name: lars, lr: 0.1}",), id="lars", marks=[SLOW, OPTIMIZERS]),
        pytest.param(("MACHINE.channels_last=true",), id="channels_last", marks=SLOW),
        pytest.param(
            ("MACHINE.activation_checkpointing=[features]",), id="checkpointing", marks=SLOW
        ),
    ],
)
def test_killed_and_resumed(tmp_path: Path, device: Device, words: tuple[str, ...]) -> None:
    kill_and_resume(tmp_path, *SMALL, *words)


@VISION
def test_killed_and_resumed_without_labels_and_with_logged_numbers(
    tmp_path: Path, device: Device
) -> None:
    kill_and_resume(tmp_path, "experiment=digits_barlow", *SHORT, "DATA.TRAIN.batch_size=16")


@VISION
def test_killed_and_resumed_with_several_updaters(tmp_path: Path, device: Device) -> None:
    kill_and_resume(tmp_path, *make_words(tmp_path), *SHORT, "METERS.frechet=null")


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        pytest.param((), [EVENT], id="sgd"),
        pytest.param(
            ("OPTIMIZER=adamw", "MACHINE.precision=fp16", "MODEL.ema={decay: 0.9}"),
            [EVENT],
            id="adamw, fp16, ema",
        ),
        pytest.param(
            ("MACHINE.precision=fp16",),
            [EVENT, "wait _local_scalar_dense phasetrain/optim/update/updater.py _step_scaled"],
            id="sgd, fp16",
        ),
        pytest.param(("OPTIMIZER={name: RMSprop, lr: 0.001}",), [READ], id="not fused"),
        pytest.param(
            ("DISTRIBUTED={reduction: ordered, virtual_shards: 2}",),
            [
                "wait copy to the host phasetrain/distributed/strategies/ordered.py _finish_update",
                EVENT,
            ],
            id="ordered",
        ),
    ],
)
def test_update_waits_for_the_device_only_where_it_is_known_to(
    tmp_path: Path, device: Device, words: tuple[str, ...], waits: list[str]
) -> None:
    records = record_update(tmp_path / "run", device, *words)
    check_waits(records, waits)


def test_update_starts_only_the_known_kernels(tmp_path: Path, device: Device) -> None:
    records = record_update(tmp_path / "run", device)
    check_kernels(records)
    bare = record_bare_update(device, measures=True)
    # 10 keep updates that are not finite from being made, 4 are for the ledger, and 6 let metrics
    # skip ignored targets, reject targets outside the classes, and weigh losses.
    assert (count_kernels(records), count_kernels(bare)) == (62, 42)


@pytest.mark.parametrize(
    ("words", "pins", "copies_ahead"),
    [
        ((), True, True),
        (("DATA.TRAIN={pin_memory: false, prefetch_to_device: false}",), False, False),
        (("MACHINE.device=cpu",), False, False),
    ],
)
def test_batches_are_pinned_and_copied_ahead_by_default(
    device: Device, words: tuple[str, ...], *, pins: bool, copies_ahead: bool
) -> None:
    run = build_run([*SMALL, "MACHINE.device=cuda", *words])
    settings = run.task.parts.loaders["train"].settings
    assert (settings.pin_memory, settings.device is not None) == (pins, copies_ahead)


def test_save_waits_for_the_device_once(device: Device) -> None:
    values = {"weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(7)}
    content = Snapshot().copy_tensors([(name, value.cuda()) for name, value in values.items()])
    assert [wait.operator for wait in device.waits[len(values) :]] == ["torch.cuda.synchronize"]
    read = parse_safetensors(content)
    assert all(torch.equal(read[name], value) for name, value in values.items())


def test_kernels_of_the_framework_do_not_grow_with_the_buffers(
    tmp_path: Path, device: Device
) -> None:
    counts = []
    for norms in (1, 20):
        words = ("RUN.imports=[emulated_parts]", f"MODEL={{name: many_norms, norms: {norms}}}")
        records = record_update(tmp_path / str(norms), device, *words)
        places = group_kernels(records)
        counts.append(
            {
                place: count
                for place, count in places.items()
                if not place.startswith("emulated_parts.py") and not place.endswith(" backward")
            }
        )
    assert counts[0] == counts[1]
