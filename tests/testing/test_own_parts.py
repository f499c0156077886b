"""Every part of our own that learns, accumulates or draws at random passes the checks that users' parts pass."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

from phasetrain.batch import StepOutput
from phasetrain.data import DATASETS, SAMPLERS, TRANSFORMS
from phasetrain.hooks import HOOKS
from phasetrain.losses import LOSSES
from phasetrain.meters import METERS
from phasetrain.models import MODELS
from phasetrain.optim import OPTIMIZERS, SCALERS, SCHEDULES
from phasetrain.testing import (
    assert_exact_resume,
    assert_learns_one_batch,
    assert_no_device_sync,
    assert_state_round_trip,
    assert_world_size_invariant,
)
from phasetrain.testing.build import built

BATCHES = ["DATA.TRAIN.batch_size=25", "DATA.TEST.batch_size=32"]
"""A size that neither 2, 3 nor 4 processes divide."""

MODEL_WORDS = {
    "mlp": ["MODEL.dropout=0.2"],
    "small_cnn": ["MODEL.width=8", "MODEL.dropout=0.1"],
}
OPTIMIZER_WORDS = {
    "sgd": ["OPTIMIZER.lr=0.1", "OPTIMIZER.momentum=0.9", "OPTIMIZER.weight_decay=1e-4"],
    "adam": ["OPTIMIZER.lr=0.01"],
    "adamw": ["OPTIMIZER.lr=0.01"],
    "RMSprop": ["OPTIMIZER.lr=0.001", "OPTIMIZER.momentum=0.5"],
    "NAdam": ["OPTIMIZER.lr=0.01"],
    "lamb": ["OPTIMIZER.lr=0.01"],
    "lars": ["OPTIMIZER.lr=1.0", "OPTIMIZER.weight_decay=1e-4"],
}
SCALER_WORDS = {
    "auto": ["MACHINE.precision=fp16"],
    "grad": ["MACHINE.precision=fp16", "OPTIMIZER.scaler={name: grad, init_scale: 1e9, growth_interval: 2}"],
}
SCHEDULE_WORDS = {
    "composite": "parts: [{name: linear, start: 0, end: 1, length: 2 updates}, {name: cosine}]",
    "constant": "warmup: 0.5",
    "cosine": "end: 0.1",
    "cosine_restarts": "period: 2 updates, decay: 0.5",
    "exponential": "end: 0.1",
    "inverse_sqrt": "warmup: 2 updates",
    "linear": "end: 0.1",
    "multistep": "milestones: [0.5]",
    "one_cycle": "rise: 0.5",
    "polynomial": "power: 2",
    "step": "every: 1 epochs, factor: 0.5",
    "wsd": "decay: 0.5",
}
TRANSFORM_WORDS = {
    "center_crop": ["size: 6"],
    "noise": ["std: 0.1"],
    "normalize": ["mean: [0.5], std: [0.25]"],
    "random_crop": ["size: 6"],
    "random_shift": ["pixels: 1"],
    "resize": ["size: 10"],
}
DATASET_WORDS = {
    "synthetic": ["DATA.TRAIN.samples=100", "DATA.TRAIN.transforms=[]", "DATA.TEST.samples=64", "MODEL.name=mlp"]
}
NEED_FILES = {"idx", "image_folder", "lines"}
NEED_SHARDS = {"lanes"}
"""Samplers for data sets that are read forward; `tests/runs/test_world_size.py` has runs of them."""
OTHER_TARGETS = {
    "grouped_auroc": (torch.arange(8.0), {"label": torch.arange(8) % 2, "group": torch.arange(8) // 4}),
    "multilabel_accuracy": (torch.arange(80.0).view(8, 10) - 40, torch.arange(80).view(8, 10) % 2),
    "regression": (torch.arange(8.0), torch.arange(8.0) * 2),
}
"""Outputs and targets of meters that do not take those of classification."""
HOOK_WORDS = {
    "early_stopping": "monitor: test/accuracy",
    "metrics": "every_updates: 1",
    "plateau": "monitor: -test/loss, patience: 1, min_delta: 100",
    "reload_weights": "folder: weights, every_updates: 1",
}


def transform(name: str) -> str:
    return f"DATA.TRAIN.transforms=[{{{', '.join([f'name: {name}', *TRANSFORM_WORDS.get(name, [])])}}}]"


def schedule(name: str) -> str:
    return f"OPTIMIZER.SCHEDULES.lr={{name: {name}, {SCHEDULE_WORDS[name]}}}"


def data(name: str) -> list[str]:
    return [*DATASET_WORDS.get(name, []), f"DATA.TRAIN.dataset={name}", f"DATA.TEST.dataset={name}"]


def hook(name: str) -> str:
    return f"HOOKS.{name}={{{HOOK_WORDS.get(name, '')}}}"


def own(registry: Mapping[str, Any], leave_out: Collection[str] = ()) -> list[str]:
    """Return the names of the parts that phasetrain brings along."""
    found = [name for name, part in registry.items() if part.__module__.startswith("phasetrain.")]
    return sorted(set(found) - set(leave_out))


def test_words_are_for_parts_that_exist() -> None:
    assert set(MODEL_WORDS) <= set(MODELS)
    assert set(SCALER_WORDS) <= set(SCALERS)
    assert set(SCHEDULE_WORDS) <= set(SCHEDULES)
    assert set(TRANSFORM_WORDS) <= set(TRANSFORMS)
    assert set(DATASET_WORDS) <= set(DATASETS) - NEED_FILES
    assert set(HOOK_WORDS) <= set(HOOKS)
    assert set(own(OPTIMIZERS)) < set(OPTIMIZER_WORDS)


def used(parts: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
    """Make one update and return the loss."""
    loss = parts["loss"](parts["model"](images), labels)
    if "updater" in parts:
        parts["updater"].backward(loss)
        parts["updater"].step()
    return loss.detach()


def assert_parts_say_all(words: list[str]) -> None:
    parts = built([*BATCHES, *words]).task.parts
    images = torch.rand(8, *parts.facts.get("MODEL.input_shape", (1, 8, 8)))
    labels = torch.arange(8)
    assert parts.updater is not None
    together = {"model": parts.model, "loss": parts.loss, "updater": parts.updater}
    assert_state_round_trip(together, lambda parts: used(parts, images, labels))


@pytest.mark.parametrize("name", own(MODELS))
def test_models_say_all(name: str) -> None:
    assert_parts_say_all([f"MODEL.name={name}", *MODEL_WORDS.get(name, [])])


@pytest.mark.parametrize("name", OPTIMIZER_WORDS)
def test_optimizers_say_all(name: str) -> None:
    assert_parts_say_all([f"OPTIMIZER.name={name}", *OPTIMIZER_WORDS[name]])


@pytest.mark.parametrize("name", own(SCALERS))
def test_scalers_say_all(name: str) -> None:
    assert_parts_say_all([f"OPTIMIZER.scaler={name}", *SCALER_WORDS.get(name, [])])


@pytest.mark.parametrize("name", own(LOSSES))
def test_losses_say_all(name: str) -> None:
    assert_parts_say_all([f"LOSS.name={name}"])


@pytest.mark.parametrize("name", own(METERS))
def test_meters_say_all(name: str) -> None:
    def step(meter: Any) -> Any:
        output, target = OTHER_TARGETS.get(name, (torch.randn(8, 10), torch.arange(8)))
        meter.update(StepOutput(torch.rand(()), 8.0, 8, output, target, ids=torch.arange(8)))
        return meter.compute()

    assert_state_round_trip(METERS.build(name, facts={"classes": 10}), step)


@pytest.mark.parametrize("name", own(TRANSFORMS))
def test_transforms_do_not_depend_on_processes(name: str) -> None:
    assert_world_size_invariant([*BATCHES, transform(name)], sizes=(1, 3))


@pytest.mark.parametrize("sampler", own(SAMPLERS, NEED_SHARDS))
@pytest.mark.parametrize("name", own(DATASETS, NEED_FILES))
def test_orders_do_not_depend_on_processes(name: str, sampler: str) -> None:
    assert_world_size_invariant([*BATCHES, *data(name), f"DATA.TRAIN.sampler={sampler}"])


@pytest.mark.parametrize("name", own(METERS, OTHER_TARGETS))
def test_meters_do_not_wait(name: str) -> None:
    assert_no_device_sync([*BATCHES, f"METERS={{{name}: {{}}}}"])


def test_hooks_do_not_wait() -> None:
    assert_no_device_sync([*BATCHES, *map(hook, own(HOOKS))])


LEARNING = [
    *([f"MODEL.name={name}", *MODEL_WORDS.get(name, [])] for name in own(MODELS)),
    *([f"OPTIMIZER.name={name}", *words] for name, words in OPTIMIZER_WORDS.items()),
    *([f"LOSS.name={name}"] for name in own(LOSSES)),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", LEARNING, ids=lambda words: words[0])
def test_every_part_learns(words: list[str]) -> None:
    assert_learns_one_batch([*BATCHES, *words], updates=100)


RESUMED = [
    *([f"MODEL.name={name}", *MODEL_WORDS.get(name, [])] for name in own(MODELS)),
    *([f"OPTIMIZER.name={name}", *words, "OPTIMIZER.accumulate=5"] for name, words in OPTIMIZER_WORDS.items()),
    *([f"OPTIMIZER.scaler={name}", *SCALER_WORDS.get(name, [])] for name in own(SCALERS)),
    *([schedule(name)] for name in own(SCHEDULES)),
    *([transform(name), *(["MODEL.name=mlp"] if name == "flatten" else [])] for name in own(TRANSFORMS)),
    *(data(name) for name in own(DATASETS, NEED_FILES)),
    *([hook(name)] for name in own(HOOKS)),
    *([f"LOSS.name={name}"] for name in own(LOSSES)),
    *([f"METERS.{name}={{}}"] for name in own(METERS, OTHER_TARGETS)),
    *([f"DATA.TRAIN.sampler={name}"] for name in own(SAMPLERS, NEED_SHARDS)),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", RESUMED, ids=lambda words: words[0])
def test_every_part_resumes_exactly(words: list[str]) -> None:
    assert_exact_resume([*BATCHES, *words])


def test_many_parts_resume_exactly_together() -> None:
    words = ["MODEL.name=small_cnn", "MODEL.width=4", "MODEL.dropout=0.3", "OPTIMIZER.name=adamw", "OPTIMIZER.lr=0.01"]
    words += ["OPTIMIZER.accumulate=5", schedule("cosine"), "METERS={accuracy: {}, loss: {}}"]
    words += ["DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}, random_erase, {name: noise, std: 0.1}]"]
    assert_exact_resume([*BATCHES, *words, "HOOKS.tensorboard={}"], workers=(0, 1))
