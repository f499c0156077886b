"""Complex weights, optimizer states and buffers: trained as in a plain loop, saved and resumed
exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from complex_parts import Spectral
from harness import SMALL, newest
from processes import Launcher
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import phasetrain
from phasetrain.testing import assert_exact_resume, differences

IMAGES = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 10
WORDS = (
    *(word for word in SMALL if not word.startswith(("MODEL", "HOOKS", "PHASES", "RUN"))),
    "MODEL={name: complex_parts.Spectral, ema: {decay: 0.9}}",
    "OPTIMIZER={name: adamw, lr: 0.01, weight_decay: 0.1, clip_norm: 1, on_nonfinite: skip}",
    "RUN.rehearse=false",
    "HOOKS={console: null, report: null}",
    "PHASES={epochs: 2, limit: {train: 2, test: 1}}",
)


@pytest.mark.feature(
    "optimizer.complex",
    "complex weights and buffers: trained as in plain torch, saved and resumed exactly",
    "`torch.cfloat`, `torch.cdouble`",
)
@pytest.mark.parametrize(
    ("name", "options"), [("adamw", {"weight_decay": 0.1}), ("sgd", {"momentum": 0.9})]
)
def test_weights_are_those_of_a_plain_loop(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model, plain = Spectral(), Spectral()
    plain.load_state_dict(model.state_dict())
    average = [parameter.detach().clone() for parameter in plain.parameters()]
    phasetrain.fit(
        model,
        train=TensorDataset(IMAGES, LABELS),
        loss="cross_entropy",
        epochs=4,
        batch_size=64,
        MODEL={"ema": {"decay": 0.75, "warmup": False}},
        OPTIMIZER={"name": name, "lr": 0.01, "clip_norm": 0.5, **options},
        DATA={"TRAIN": {"sampler": {"name": "sequential"}}},
        RUN={"dir": str(tmp_path)},
    )
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[name](plain.parameters(), lr=0.01, **options)
    for _ in range(4):
        cross_entropy(plain(IMAGES), LABELS).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for mean, parameter in zip(average, plain.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.25)
    saved = newest(tmp_path).state["task"]
    assert differences(plain.state_dict(), saved["model"], "model") == []
    averaged = [saved["ema"][key] for key, _ in plain.named_parameters()]
    assert differences(average, averaged, "ema") == []
    assert model.state_dict()["mean"].abs().min() > 0


def test_killed_run_resumes_exactly() -> None:
    assert_exact_resume(list(WORDS), steps=[1], workers=None)


def test_a_skipped_update_restores_complex_buffers_and_weights(tmp_path: Path) -> None:
    images = IMAGES.clone()
    images[40] = torch.nan
    model = Spectral()
    phasetrain.fit(
        model,
        train=TensorDataset(images, LABELS),
        loss="cross_entropy",
        epochs=1,
        batch_size=32,
        OPTIMIZER={"name": "adamw", "lr": 0.01, "on_nonfinite": "skip"},
        RUN={"dir": str(tmp_path)},
    )
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_checkpoints_and_exports_hold_the_numbers(tmp_path: Path) -> None:
    phasetrain.run([*WORDS, f"RUN.dir={tmp_path / 'run'}"])
    state = newest(tmp_path / "run").state["task"]
    kinds = {name: str(tensor.dtype) for name, tensor in state["model"].items()}
    assert (kinds["weight"], kinds["wide"]) == ("torch.complex64", "torch.complex128")
    assert state["updater"]["optimizer"][0]["exp_avg"].dtype == torch.complex64
    loaded = phasetrain.load(tmp_path / "run").parts.model
    assert differences(state["model"], loaded.state_dict(), "model") == []
    # The second run starts with these weights, and trains nothing.
    start = (f"MODEL.weights={tmp_path / 'run'}", "OPTIMIZER.lr=0", "OPTIMIZER.weight_decay=0")
    phasetrain.run([*WORDS, *start, f"RUN.dir={tmp_path / 'other'}"])
    other = newest(tmp_path / "other").state["task"]["model"]
    assert differences(state["model"]["weight"], other["weight"], "weight") == []


@pytest.mark.slow
def test_buffers_that_each_rank_computes_are_reported(launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.run(tmp_path / "run", 2, *WORDS, "RUN.rehearse=true")
    assert ended.codes == [0, 0], ended.outputs
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("`mean` of MODEL and 1 more: forward computes new values from a batch") == 1


@pytest.mark.slow
def test_ordered_sums_take_complex_and_real_gradients(launcher: Launcher, tmp_path: Path) -> None:
    ordered = "DISTRIBUTED={reduction: ordered, virtual_shards: 2}"
    for size in (1, 2):
        ended = launcher.run(tmp_path / str(size), size, *WORDS, ordered)
        assert ended.codes == [0] * size, ended.outputs
    one, two = (newest(tmp_path / str(size)).state["task"]["model"] for size in (1, 2))
    assert differences(one, two, "model") == []
