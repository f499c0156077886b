"""Small registries, and a folder of a user's options, for the tests of the config."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from phasetrain.config.registry import Registry, signature_of
from phasetrain.config.validation import PartLocation

Write = Callable[[Mapping[str, str]], Path]


@pytest.fixture(autouse=True)
def _options_for_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # `configs` in the folder of the tests would be found
    monkeypatch.syspath_prepend(Path(__file__).parent)
    for module in ("folders", "sources"):
        monkeypatch.setattr(f"phasetrain.config.compose.{module}.PACKAGE", "options_for_tests")


@pytest.fixture
def user_dir(tmp_path: Path) -> Write:
    """Return a function that writes option files and gives their folder."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "own" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path / "own"

    return write


def focal(gamma: float = 2.0, classes: int | None = None) -> None: ...
def cross_entropy(label_smoothing: float = 0.0) -> None: ...
def small_cnn(classes: int, width: int = 32, dropout: float = 0.0) -> None: ...
def mlp(classes: int, hidden: list[int] = [128], dropout: float = 0.0) -> None: ...  # noqa: B006
def resnet_cifar(classes: int, depth: int = 20) -> None: ...
def sgd(
    params: Any,
    lr: float,
    momentum: float = 0.0,
    *,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> None: ...
def adamw(
    params: Any,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None: ...
def digits(split: str) -> None: ...
def normalize(mean: list[float], std: list[float]) -> None: ...
def cosine(end: float = 0.0, warmup: float | str = 0.0) -> None: ...
def linear(end: float = 0.0, start: float = 1.0) -> None: ...
def accuracy(top: int = 1) -> None: ...
def console(every_steps: int = 10) -> None: ...
def stack(pad: int = 0) -> None: ...
def lora(layer: Any, rank: int = 8) -> None: ...
def plain() -> None: ...
def free(a: int = 1, **kwargs: Any) -> None: ...


WATCHING = ("ledger", "metrics", "numerics", "report", "stragglers", "watchdog")
"""Hooks of defaults.yaml next to `console`."""


def registry(kind: str, section: str, **parts: Callable[..., Any]) -> Registry[Any]:
    """Return a registry with these parts alone: none are declared for its kind."""
    made: Registry[Any] = Registry(kind, section, library=lambda: {"Free": free})
    for name, part in parts.items():
        made.register(name)(part)
    return made


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[PartLocation]:
    """Return a slot for each place where the program names a part."""
    by_kind = {
        "dataset": registry("test dataset", "DATA", digits=digits),
        "transform": registry(
            "test transform", "DATA.*.transforms", normalize=normalize, flatten=plain
        ),
        "sampler": registry("test sampler", "DATA.*.sampler", shuffled=plain, sequential=plain),
        "collate function": registry("test collate function", "DATA.*.collate", stack=stack),
        "task": registry("test task", "TASK", supervised=plain),
        "model": registry(
            "test model", "MODEL", small_cnn=small_cnn, mlp=mlp, resnet_cifar=resnet_cifar
        ),
        "adapter": registry("test adapter", "MODEL.adapters", lora=lora),
        "loss": registry("test loss", "LOSS", cross_entropy=cross_entropy, focal=focal),
        "meter": registry("test meter", "METERS", accuracy=accuracy, loss=plain),
        "optimizer": registry("test optimizer", "OPTIMIZER", sgd=sgd, adamw=adamw),
        "scaler": registry("test scaler", "OPTIMIZER.scaler", none=plain, auto=plain),
        "schedule": registry("test schedule", "OPTIMIZER.SCHEDULES", cosine=cosine, linear=linear),
        "hook": registry("test hook", "HOOKS", console=console, **dict.fromkeys(WATCHING, plain)),
    }
    for name, replacement in {
        "find_registry": by_kind.__getitem__,
        "list_names": lambda kind: list(by_kind[kind]),
        "list_parts": lambda kind: {},
        "find_signature": lambda kind, name, key: signature_of(by_kind[kind].find(name, key)),
    }.items():
        monkeypatch.setattr(f"phasetrain.config.validation.{name}", replacement)
    return [
        PartLocation("DATA.*", "dataset"),
        PartLocation("DATA.*.transforms[]", "transform"),
        PartLocation("DATA.*.sampler", "sampler"),
        PartLocation("DATA.*.collate", "collate function"),
        PartLocation("TASK", "task"),
        PartLocation("MODEL", "model"),
        PartLocation("MODEL.adapters", "adapter", provided=frozenset({"layer"})),
        PartLocation("LOSS", "loss"),
        PartLocation("METERS.*", "meter"),
        PartLocation("OPTIMIZER", "optimizer", provided=frozenset({"params"})),
        PartLocation("OPTIMIZER.scaler", "scaler"),
        PartLocation("OPTIMIZER.SCHEDULES.*", "schedule"),
        PartLocation("HOOKS.*", "hook"),
    ]
