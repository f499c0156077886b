"""Modules with operators that have no deterministic kernel are named, without values and a GPU."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasetrain.addons.experiments.operators.nondeterministic import (
    ALIASES,
    NEVER_TRAINED,
    OPERATIONS,
    READ_FROM,
)
from phasetrain.addons.experiments.operators.preflight import (
    Preflight,
    describe_findings,
    trace_passes,
)
from phasetrain.errors import ConfigError
from phasetrain.testing.kills import run_quietly


class Operator(nn.Module):
    """A weight, and an operator after it."""

    def __init__(self, operator: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.operator = operator

    def forward(self, value: Tensor) -> Any:
        return self.operator(value * self.weight)


class Sum(nn.Module):
    def forward(self, output: Any) -> Tensor:
        total: Tensor = output.sum()
        return total


def trace(model: nn.Module, value: Tensor) -> Preflight:
    loss = Sum()
    return trace_passes(model, loss, lambda fake: loss(model(fake(value))))


def indices(*values: int) -> Tensor:
    return torch.tensor(values)


def unpool(dimensions: int) -> Callable[[Tensor], Tensor]:
    pool = getattr(nn, f"MaxPool{dimensions}d")(2, return_indices=True)
    back = getattr(nn, f"MaxUnpool{dimensions}d")(2)
    return lambda value: back(*pool(value))


def ctc(value: Tensor) -> Tensor:
    targets = torch.ones(2, 3, dtype=torch.long)
    return F.ctc_loss(value.log_softmax(-1), targets, indices(5, 5), indices(3, 3))


def image_loss(value: Tensor) -> Tensor:
    return F.cross_entropy(value, torch.zeros(2, 4, 4, dtype=torch.long))


def counts(value: Tensor) -> Tensor:
    return value.sum() + torch.bincount(indices(0, 1, 1), weights=value.detach()).sum()


def reduced(how: str) -> Callable[[Tensor], Tensor]:
    return lambda value: torch.zeros(3).scatter_reduce(0, indices(0, 0, 1), value, how)


def put(*, accumulate: bool) -> Callable[[Tensor], Tensor]:
    return lambda value: value.clone().put_(indices(0, 1), torch.ones(2), accumulate=accumulate)


def resized(mode: str, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda value: F.interpolate(value, scale_factor=2, mode=mode, **options)


def sampled(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda value: F.grid_sample(value, torch.zeros(shape), align_corners=False)


LISTED: list[tuple[str, Callable[[Tensor], Any], tuple[int, ...]]] = [
    ("torch.nn.AvgPool3d", nn.AvgPool3d(2), (1, 1, 4, 4, 4)),
    ("torch.nn.AdaptiveAvgPool2d", nn.AdaptiveAvgPool2d(2), (1, 1, 4, 4)),
    ("torch.nn.AdaptiveAvgPool3d", nn.AdaptiveAvgPool3d(2), (1, 1, 4, 4, 4)),
    ("torch.nn.AdaptiveMaxPool2d", nn.AdaptiveMaxPool2d(2), (1, 1, 4, 4)),
    ("torch.nn.FractionalMaxPool2d", nn.FractionalMaxPool2d(2, output_size=2), (1, 1, 6, 6)),
    ("torch.nn.FractionalMaxPool3d", nn.FractionalMaxPool3d(2, output_size=2), (1, 1, 6, 6, 6)),
    ("torch.nn.MaxUnpool2d", unpool(1), (1, 1, 4)),
    ("torch.nn.MaxUnpool2d", unpool(2), (1, 1, 4, 4)),
    ("torch.nn.MaxUnpool3d", unpool(3), (1, 1, 4, 4, 4)),
    ("torch.nn.functional.interpolate", resized("linear"), (1, 1, 4)),
    ("torch.nn.functional.interpolate", resized("bilinear"), (1, 1, 4, 4)),
    ("torch.nn.functional.interpolate", resized("bilinear", antialias=True), (1, 1, 4, 4)),
    ("torch.nn.functional.interpolate", resized("bicubic"), (1, 1, 4, 4)),
    ("torch.nn.functional.interpolate", resized("trilinear"), (1, 1, 4, 4, 4)),
    ("torch.nn.ReflectionPad1d", nn.ReflectionPad1d(1), (1, 1, 4)),
    ("torch.nn.ReflectionPad2d", nn.ReflectionPad2d(1), (1, 1, 4, 4)),
    ("torch.nn.ReflectionPad3d", nn.ReflectionPad3d(1), (1, 1, 4, 4, 4)),
    ("torch.nn.NLLLoss", image_loss, (2, 3, 4, 4)),
    ("torch.nn.CTCLoss", ctc, (5, 2, 4)),
    ("torch.Tensor.put_", put(accumulate=False), (3,)),
    ("torch.Tensor.put_", put(accumulate=True), (3,)),
    ("torch.histc", lambda value: value.sum() + torch.histc(value.detach()).sum(), (3,)),
    ("torch.bincount", counts, (3,)),
    ("torch.median", lambda value: value.median(0).values, (3,)),
    ("torch.nn.functional.grid_sample", sampled(1, 2, 2, 2), (1, 1, 4, 4)),
    ("torch.nn.functional.grid_sample", sampled(1, 2, 2, 2, 3), (1, 1, 4, 4, 4)),
    ("torch.cumsum", lambda value: value.cumsum(0), (3,)),
    ("torch.Tensor.scatter_reduce", reduced("prod"), (3,)),
]

SILENT: list[tuple[Callable[[Tensor], Any], tuple[int, ...]]] = [
    (nn.AdaptiveAvgPool2d(1), (1, 1, 4, 4)),  # a mean
    (nn.MaxPool2d(2), (1, 1, 4, 4)),
    (resized("nearest"), (1, 1, 4, 4)),
    (nn.ReplicationPad2d(1), (1, 1, 4, 4)),
    (lambda value: F.cross_entropy(value, indices(0, 1)), (2, 3)),
    (lambda value: value.median(), (3,)),
    (lambda value: value.sum() + indices(1, 2, 3).cumsum(0).sum(), (3,)),
    (reduced("sum"), (3,)),
    (lambda value: torch.zeros(3).scatter_add(0, indices(0, 0, 1), value), (3,)),
    (lambda value: torch.zeros(3).index_add(0, indices(0, 0, 1), value), (3,)),
    (lambda value: F.adaptive_max_pool2d(value.detach(), 2).sum() + value.sum(), (1, 1, 4, 4)),
]


@pytest.mark.feature(
    "machine.no_kernel",
    "modules whose operators have no deterministic kernel are named before training, with a "
    "replacement, for CUDA also without a GPU",
    "`phasetrain plan`, `MACHINE.deterministic`",
)
@pytest.mark.parametrize(
    ("operation", "operator", "shape"), LISTED, ids=[f"{n}-{r[0]}" for n, r in enumerate(LISTED)]
)
def test_listed_operator_is_named_with_its_module(
    operation: str, operator: Callable[[Tensor], Any], shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Identity(), Operator(operator))
    found = trace(model, torch.zeros(shape)).on_device("cuda", deterministic=False)
    assert operation in {one.operation for one in found}
    [first, *_] = [one for one in found if one.operation == operation]
    assert first.modules[0].startswith("MODEL.1")
    assert first.replacement


@pytest.mark.parametrize(("operator", "shape"), SILENT)
def test_other_operators_are_not_named(
    operator: Callable[[Tensor], Any], shape: tuple[int, ...]
) -> None:
    assert trace(Operator(operator), torch.zeros(shape)) == Preflight()


@pytest.mark.parametrize(("mode", "named"), [("max", True), ("sum", False), ("mean", False)])
def test_embedding_bag_is_named_for_its_maximum_only(mode: str, named: bool) -> None:
    model = nn.EmbeddingBag(10, 3, mode=mode)
    found = trace(model, torch.zeros(2, 3, dtype=torch.long))
    assert bool(found.findings) == named


def test_a_model_keeps_its_weights_and_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(2))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    found = trace(model, torch.zeros(2, 1, 8, 8))
    assert [one.modules for one in found.findings] == [("MODEL.2",)]
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(type(one) is nn.Parameter and one.grad is None for one in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("read", [float, lambda mean: mean.item(), lambda mean: 2 if mean else 1])
def test_value_that_is_read_is_explained(read: Callable[[Any], Any]) -> None:
    found = trace(Operator(lambda value: value * read(value.mean())), torch.zeros(1, 1, 4))
    assert found.untraced.startswith("it reads the value of a tensor, as `.item()`")
    assert "aten" not in found.untraced


def test_model_that_needs_values_says_so_in_one_line() -> None:
    model = Operator(lambda value: nn.ReflectionPad1d(1)(value)[value.sum() > 0])
    found = trace(model, torch.zeros(1, 1, 4))
    assert [one.operation for one in found.findings] == ["torch.nn.ReflectionPad1d"]
    assert found.untraced.startswith("it reads the value of a tensor")
    assert "test_preflight.py" in found.untraced
    lines = describe_findings(found, "cuda", deterministic=True)
    assert len(lines) == 2
    assert "\n" not in lines[1]


def test_what_torch_replaces_is_named_without_determinism_only() -> None:
    found = trace(Operator(resized("bilinear")), torch.zeros(1, 1, 4, 4))
    assert found.on_device("cuda", deterministic=True) == []
    assert len(found.on_device("cuda", deterministic=False)) == 1


def test_table_has_every_operation_that_the_installed_torch_documents() -> None:
    text = torch.use_deterministic_algorithms.__doc__ or ""
    raising = text.partition("operations will throw a")[2].partition("In addition")[0]
    documented = set(re.findall(r"\* :(?:class|func):`([\w.]+)`", raising))
    rows = {one.name for one in OPERATIONS}
    assert documented == rows | ALIASES.keys() | set(NEVER_TRAINED)
    assert torch.__version__.startswith(READ_FROM)


MODEL = """
import torch
from torch import nn
class Mirrored(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.pad = nn.ReflectionPad2d(1)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(256, classes))
    def forward(self, batch):
        return self.body(self.pad(batch))
"""


def test_plan_names_the_module_for_another_device_than_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mirrored_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["RUN.engine=plan", "MODEL.name=mirrored_model.Mirrored", "RUN.dir=planned"]
    found = run_quietly(words).details["nondeterministic"]
    # The input of the first layer needs no gradient.
    assert (found["findings"], found["lines"]) == ([], [])
    (tmp_path / "mirrored_twice.py").write_text(
        MODEL.replace("self.body(self.pad(batch))", "self.body[1:](self.pad(self.body[0](batch)))")
    )
    words[1] = "MODEL.name=mirrored_twice.Mirrored"
    found = run_quietly(words).details["nondeterministic"]
    [finding] = found["findings"]
    assert (finding["modules"], finding["operator"]) == (["MODEL.pad"], "reflection_pad2d")
    [line] = found["lines"]
    assert line.startswith("on cuda, ")


@pytest.mark.feature("machine.no_kernel")
@pytest.mark.parametrize("rehearse", ["true", "false"])
def test_operator_that_torch_rejects_is_an_error_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearse: str
) -> None:
    (tmp_path / "unpooling.py").write_text(
        MODEL.replace("nn.ReflectionPad2d(1)", "nn.MaxPool2d(2, return_indices=True)").replace(
            "self.body(self.pad(batch))",
            "self.body(nn.functional.pad(nn.functional.max_unpool2d(*self.pad(batch), 2), [1] * 4))",
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["MODEL.name=unpooling.Mirrored", "RUN.dir=run", f"RUN.rehearse={rehearse}"]
    with pytest.raises(ConfigError) as caught:
        run_quietly(words)
    assert caught.value.code == "machine.no_deterministic_kernel"
    assert any("torch.nn.MaxUnpool2d (max_unpool2d)" in one for one in caught.value.__notes__)
    assert not Path("run", "status.json").exists()
