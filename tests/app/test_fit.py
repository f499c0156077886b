"""`phasetrain.fit`: training with objects of Python."""

import ast
import copy
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs
from omegaconf import OmegaConf
from raising import raises
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import phasetrain
from phasetrain.app.api import overrides_of
from phasetrain.app.python_objects.describe_optimizer import describe_optimizer
from phasetrain.app.result import RunResult
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import on
from phasetrain.meters import Accuracy
from phasetrain.models.digest import hash_model
from phasetrain.runtime.terminal import Terminal


class Points(Dataset[tuple[Tensor, int]]):
    """Points on a line with noise from torch's generator, labelled by their sign."""

    def __init__(self, count: int) -> None:
        self.values = torch.linspace(-1, 1, count)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        value = self.values[index]
        return value + 0.1 * torch.randn(4), int(value > 0)


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def fit(folder: Path, model: Any = None, **changes: Any) -> RunResult:
    """Train a small model for two epochs of five updates, with a test after each."""
    model = make_net() if model is None else model
    arguments: dict[str, Any] = {
        "train": DataLoader(Points(80), batch_size=16, shuffle=True),
        "test": Points(32),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD,
        "metrics": [Accuracy()],
        "epochs": 2,
        "RUN": {"dir": str(folder)},
        "HOOKS": {"metrics": {"every_updates": 1}},
    }
    silent = {"terminal": Terminal(io.StringIO(), live=False)}
    return phasetrain.fit(model, **{**arguments, **silent, **changes})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult, nn.Module]:
    folder = tmp_path_factory.mktemp("unbroken")
    model = make_net()
    return folder, fit(folder, model), model


@pytest.mark.feature("fingerprint.torch")
def test_call_with_other_indices_of_a_subset_is_rejected(tmp_path: Path) -> None:
    fit(tmp_path, train=Subset(Points(80), range(64)), batch_size=16)
    assert fit(tmp_path, train=Subset(Points(80), range(64)), batch_size=16).updates == 8
    with raises(ChangedError, code="resume.data_changed", key="DATA.TRAIN"):
        fit(tmp_path, train=Subset(Points(80), range(16, 80)), batch_size=16)


def test_result_of_a_call_is_that_of_a_run(unbroken: tuple[Path, RunResult, nn.Module]) -> None:
    _, result, model = unbroken
    assert (result.state, result.updates) == ("finished", 10)
    assert set(result.last) == {"train/loss", "train/accuracy", "test/loss", "test/accuracy"}
    # The metrics of the call come before the loss, so that the first of them chooses.
    assert result.best is not None
    assert result.best.metric == "test/accuracy"
    assert hash_model(model) == result.digest != hash_model(make_net())


@pytest.mark.feature(
    "python.fit",
    "training with objects of Python; classes as names",
    '`phasetrain.fit`, `phasetrain.run({"MODEL": Net})`',
)
# In a train phase, and in a test.
@pytest.mark.by_default("1", "6")
@pytest.mark.parametrize("steps", [1, 6, 8, 11])
def test_killed_call_resumes_with_equal_bits_although_the_new_weights_differ(
    steps: int, unbroken: tuple[Path, RunResult, nn.Module], tmp_path: Path
) -> None:
    hooks = {"save": SaveEachStep(), "kill": KillAfter(steps)}
    with pytest.raises(Killed):
        fit(tmp_path, hooks=hooks)
    model = make_net()
    nn.init.zeros_(model[0].weight)  # a program without a seed has other weights in each process
    result = fit(tmp_path, model)
    assert differences_of_runs(unbroken[0], tmp_path) == []
    assert hash_model(model) == result.digest == unbroken[1].digest


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("MultiMarginLoss", {"name": "MultiMarginLoss"}),
        ("label_smoothing", {"name": "cross_entropy", "label_smoothing": 0.1}),
    ],
)
def test_loss_is_given_by_the_name_of_a_part_or_of_a_file(
    name: str, described: dict[str, Any], tmp_path: Path
) -> None:
    result = fit(tmp_path, loss=name, test=None, epochs=0)
    assert OmegaConf.load(Path(result.folder) / "config.yaml")["LOSS"] == described


def test_call_leaves_the_global_generators_as_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, ...]:
        return float(torch.rand(())), np.random.random(), random.random()

    model = make_net()
    drawn = []
    # The last call finds a finished run.
    for call in (lambda: None, lambda: fit(tmp_path, model), lambda: fit(tmp_path, model)):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        call()
        drawn.append(draw())
    assert drawn[0] == drawn[1] == drawn[2]


def test_finished_run_returns_its_weights_at_once(
    unbroken: tuple[Path, RunResult, nn.Module],
) -> None:
    folder, result, _ = unbroken
    model = make_net()
    again = fit(folder, model)
    assert (again.digest, again.last) == (result.digest, result.last)
    assert hash_model(model) == result.digest


def test_first_and_repeated_call_return_the_best_weights_and_their_metrics(tmp_path: Path) -> None:
    @on("metrics")
    def replace(run: Any, phase: Any, metrics: dict[str, float]) -> None:
        if phase.split == "test":
            metrics["accuracy"] = (0.9, 0.5)[phase.epoch]

    nets = make_net(), make_net()
    load_best = {"load_best": True, "best": {"monitor": "test/accuracy"}}
    results = [fit(tmp_path, net, hooks=[replace], CHECKPOINT=load_best) for net in nets]
    assert results[0].loaded_checkpoint.endswith("p0002-s00000000")
    assert [hash_model(net) for net in nets] == [result.digest for result in results]
    assert results[0].last == results[1].last
    assert results[0].last["test/accuracy"] == 0.9


def test_model_gets_the_weights_that_hooks_leave_at_the_end(tmp_path: Path) -> None:
    @on("end")
    def zero(run: Any) -> None:
        nn.init.zeros_(run.task.model[0].weight)

    for _ in range(2):
        net = make_net()
        result = fit(tmp_path, net, hooks=[zero])
        assert not net[0].weight.any()
        assert hash_model(net) == result.digest


def test_failed_call_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    @on("end")
    def fail(run: Any) -> None:
        raise OSError("no space")

    net = make_net()
    with pytest.raises(OSError, match="no space"):
        fit(tmp_path, net, hooks=[fail])
    assert hash_model(net) == hash_model(make_net())


def test_another_model_in_the_same_folder_is_refused(
    unbroken: tuple[Path, RunResult, nn.Module],
) -> None:
    with raises(ChangedError, key="MODEL.name", code="resume.forbidden_key"):
        fit(unbroken[0], nn.Linear(4, 2))


def test_objects_are_recorded(unbroken: tuple[Path, RunResult, nn.Module]) -> None:
    folder, _, _ = unbroken
    environment = json.loads((folder / "environment.json").read_text())
    by_key = {one["key"]: one for one in environment["objects"].values()}
    assert by_key["MODEL"]["class"] == "torch.nn.modules.container.Sequential"
    assert by_key["MODEL"]["sha256"] == hash_model(make_net())
    assert by_key["DATA.TEST.dataset"]["class"] == f"{__name__}.Points"
    (deviation,) = environment["departures"]
    assert deviation["updates"] == 0
    assert [line.partition(":")[0] for line in deviation["what"]] == list(by_key)


def test_load_takes_the_model_or_knows_the_objects_of_the_call(
    unbroken: tuple[Path, RunResult, nn.Module],
) -> None:
    folder, result, model = unbroken
    inputs = torch.randn(3, 4)
    expected = model.eval()(inputs)
    assert torch.equal(result.load().predict(inputs), expected)
    assert torch.equal(phasetrain.load(folder, model=make_net()).predict(inputs), expected)
    with raises(ConfigError, key="MODEL.name", code="config.missing_object"):
        phasetrain.load(folder)


def test_run_trains_longer_as_its_last_lines_say(tmp_path: Path) -> None:
    screen = io.StringIO()
    model = make_net()
    fit(tmp_path, model, epochs=1, terminal=Terminal(screen, live=False))
    (hint,) = re.findall(r"the same call: fit\(\.\.\., \*\*(\{.*\})\) or run", screen.getvalue())
    assert fit(tmp_path, model, epochs=1, **ast.literal_eval(hint)).updates == 10
    assert "phasetrain resume" not in (tmp_path / "RUN.md").read_text()


def test_loaders_in_processes_of_their_own_give_equal_bits(
    unbroken: tuple[Path, RunResult, nn.Module], tmp_path: Path
) -> None:
    train = DataLoader(Points(80), batch_size=16, shuffle=True, num_workers=1)
    assert fit(tmp_path, train=train).digest == unbroken[1].digest


@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda net: lambda weights: torch.optim.SGD(weights, 0.1, 0.9),
        lambda net: {"name": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
    ],
    ids=["object", "partial", "function", "mapping"],
)
def test_optimizers_of_every_form_give_the_same_run(
    make: Callable[[nn.Module], Any],
    tmp_path: Path,
    digests: set[str],
) -> None:
    model = make_net()
    digests.add(fit(tmp_path, model, optimizer=make(model), epochs=1).digest)
    assert len(digests) == 1


@pytest.fixture(scope="module")
def digests() -> set[str]:
    return set()


def plain_loop(model: nn.Module, samples: TensorDataset, epochs: int) -> str:
    """Train as a loop without phasetrain does; return the digest of the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for inputs, targets in DataLoader(samples, batch_size=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return hash_model(model)


def test_optimizer_object_gives_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    samples = TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    expected = plain_loop(copy.deepcopy(model), samples, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(samples, batch_size=8)
    result = fit(tmp_path, model, train=train, test=None, optimizer=optimizer, epochs=3)
    assert result.digest == expected


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        ("adam", {"name": "adam", "lr": 1e-3}),
        ({"name": "adamw"}, {"name": "adamw", "lr": 1e-3}),
        ({"name": "sgd", "lr": 0.5}, {"name": "sgd", "lr": 0.5}),
        pytest.param("lars", {"name": "lars"}, marks=pytest.mark.addon("optimizers")),
        (torch.optim.Adam, {"name": torch.optim.Adam, "lr": 1e-3, "fused": None}),
        (torch.optim.Rprop, {"name": torch.optim.Rprop, "lr": 1e-2}),
    ],
)
def test_optimizer_has_the_learning_rate_and_kernel_of_torch(
    optimizer: Any, keys: dict[str, Any]
) -> None:
    assert describe_optimizer(optimizer) == keys


def test_misspelt_argument_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, code="config.unknown_argument") as caught:
        fit(tmp_path, batch_sise=20)
    assert "'batch_size'" in str(caught.value)


def test_groups_of_an_optimizer_become_rules() -> None:
    net = make_net()
    groups = [
        {"params": [net[0].weight, net[0].bias], "lr": 0.01},
        {"params": [*net[1].parameters(), *net[3].parameters()], "weight_decay": 0.1},
    ]
    found = describe_optimizer(torch.optim.AdamW(groups, lr=0.1), net)
    assert found["groups"] == [
        {"match": ["0.weight", "0.bias"], "lr_scale": 0.1},
        {"match": ["1.weight", "1.bias", "3.weight", "3.bias"], "weight_decay": 0.1},
    ]


def used_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.randn(4, 4)).sum().backward()
    made.step()
    return made


@pytest.mark.parametrize(
    "make",
    [
        used_optimizer,
        lambda net: torch.optim.SGD(nn.Linear(2, 2).parameters()),
        lambda net: torch.optim.SGD(net[0].parameters()),
        lambda net: 3,
    ],
    ids=["used", "other model", "part of the model", "number"],
)
def test_optimizer_that_no_config_describes_is_refused(
    make: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    model = make_net()
    with raises(ConfigError, code="config.invalid_optimizer", key="OPTIMIZER"):
        fit(tmp_path, model, optimizer=make(model))


@pytest.mark.addon("libraries")
def test_function_lambda_and_metrics_of_torchmetrics(tmp_path: Path) -> None:
    from torchmetrics.classification import MulticlassRecall  # slow: not for all files

    result = fit(
        tmp_path,
        loss=lambda output, labels: nn.functional.cross_entropy(output, labels),
        metrics={"recall": MulticlassRecall(2), "accuracy": Accuracy, "top": "accuracy"},
        epochs=1,
    )
    assert {"test/recall", "test/accuracy", "test/top", "test/loss"} <= set(result.last)
    assert result.last["test/top"] == result.last["test/accuracy"]


def test_sampler_of_a_loader_is_drawn_from_the_seed_of_the_run(tmp_path: Path) -> None:
    def train() -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * 40 + [3.0] * 40, 48)
        return DataLoader(Points(80), batch_size=16, sampler=sampler, collate_fn=collate)

    one = fit(tmp_path / "one", train=train())
    assert one.updates == 6
    with pytest.raises(Killed):
        fit(tmp_path / "two", train=train(), hooks={"a": SaveEachStep(), "b": KillAfter(2)})
    assert fit(tmp_path / "two", train=train()).digest == one.digest


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return torch.stack(inputs), torch.tensor(labels)


class Forward(IterableDataset[Any]):
    """Points, one after the other, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return map(Points(80).__getitem__, range(80))


class Items(IterableDataset[Any]):
    """Yields the items of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.mark.parametrize("kind", [list, Items])
@pytest.mark.parametrize("size", [1, 4])
def test_items_that_look_like_batches_are_named(kind: Any, size: int, tmp_path: Path) -> None:
    inputs = torch.ones(12, size, 4)
    samples = [(each, each[:, :2]) if size > 1 else (each[0], each[0, :2]) for each in inputs]
    stream = io.StringIO()
    words = {"loss": nn.MSELoss(), "metrics": None, "test": None, "epochs": 1, "batch_size": 4}
    terminal = Terminal(stream, live=False)
    done = fit(tmp_path, nn.Linear(4, 2), train=kind(samples), terminal=terminal, **words)
    assert done.updates == 3
    # The layer and the loss take both, so that nothing else fails.
    assert stream.getvalue().count("like a batch") == (size > 1)


def test_loader_of_an_iterable_is_read_as_the_iterable(tmp_path: Path) -> None:
    loader = DataLoader(Forward(), batch_size=16)
    plain = fit(tmp_path / "a", train=Forward(), batch_size=16, test=Forward(), epochs=2)
    found = fit(tmp_path / "b", train=loader, test=DataLoader(Forward(), batch_size=20), epochs=2)
    assert (plain.updates, found.updates) == (10, 10)
    assert found.digest == plain.digest
    assert found.last is not None
    assert plain.last is not None
    assert found.last["test/accuracy"] == plain.last["test/accuracy"]


def test_loader_that_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    for loader in (
        DataLoader(Forward(), batch_size=None),
        DataLoader(Points(4), batch_sampler=[[0, 1]]),
        DataLoader(Points(4), batch_size=None),
    ):
        with raises(ConfigError, code="config.invalid_loader", key="DATA.TRAIN"):
            fit(tmp_path, train=loader)


def test_replaced_arguments_of_a_loader_are_told(tmp_path: Path) -> None:
    train = DataLoader(
        Points(80), batch_size=16, shuffle=True, generator=torch.Generator(), drop_last=True
    )
    fit(tmp_path, train=train, epochs=1)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert any("generator" in line for line in environment["departures"][0]["what"])


@pytest.mark.parametrize("missing", ["loss", "optimizer", "train"])
def test_missing_argument_is_named(missing: str, tmp_path: Path) -> None:
    key = {"train": "DATA"}.get(missing, missing.upper())
    with raises(ConfigError, code="config.missing_argument", key=key):
        fit(tmp_path, **{missing: None})


def test_fit_without_training_data_tests_the_model(tmp_path: Path) -> None:
    model = make_net()
    digest = hash_model(model)
    nothing = {"train": None, "optimizer": None, "epochs": None}
    found = fit(tmp_path / "only", model, **nothing, test={"valid": Points(32), "test": Points(8)})
    assert (found.state, found.updates, found.digest) == ("tested", 0, digest)
    assert hash_model(model) == digest
    assert found.last is not None
    assert list(found.last) == [
        *("test/accuracy", "test/loss", "valid/accuracy", "valid/loss"),
    ]
    first = fit(tmp_path / "first", model, epochs=0, PHASES={"test_first": True}, test=Points(8))
    assert first.last is not None
    assert first.last["test/loss"] == found.last["test/loss"]


def test_epochs_without_training_data_are_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, code="config.missing_argument", key="DATA"):
        fit(tmp_path, train=None, epochs=1)


def test_header_names_the_classes_of_objects(tmp_path: Path) -> None:
    stream = io.StringIO()
    fit(tmp_path, nn.Linear(4, 2), epochs=1, terminal=Terminal(stream, live=False))
    lines = [line.split(maxsplit=2)[1:] for line in stream.getvalue().splitlines()]
    header = dict(line for line in lines if len(line) == 2)
    assert header["model"] == "Linear, 10 parameters"
    assert header["data"].startswith("Points (train 80, test 32 samples), 16 per update")


def test_missing_arguments_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, loss=None, optimizer=None)
    assert [problem.key for problem in caught.value.problems] == ["LOSS", "OPTIMIZER"]


class Moved:
    """Adds a number to inputs."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs + self.by

    def __repr__(self) -> str:
        return f"Moved({self.by})"


def test_stages_take_objects(tmp_path: Path) -> None:
    def stages(*by: float) -> dict[str, Any]:
        return {
            "stages": [
                {"epochs": 1, "DATA": {"TRAIN": {"transforms": [Moved(number)]}}} for number in by
            ]
        }

    changes: dict[str, Any] = {"epochs": None, "test": None}
    whole = fit(tmp_path / "whole", PHASES=stages(0.0, 3.0), **changes)
    same = fit(tmp_path / "same", PHASES=stages(0.0, 0.0), **changes)
    assert whole.updates == same.updates == 10
    assert whole.digest != same.digest
    hooks = {"save": SaveEachStep(), "kill": KillAfter(7)}
    with pytest.raises(Killed):
        fit(tmp_path / "run", PHASES=stages(0.0, 3.0), hooks=hooks, **changes)
    fit(tmp_path / "run", PHASES=stages(0.0, 3.0), **changes)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


STEP_LR = torch.optim.lr_scheduler.StepLR


@pytest.mark.addon("libraries")
@pytest.mark.parametrize(
    "schedule",
    [partial(STEP_LR, step_size=4), {"name": STEP_LR, "step_size": 4}],
    ids=["partial", "class"],
)
def test_schedulers_of_torch_are_taken_as_classes(schedule: Any, tmp_path: Path) -> None:
    groups = [{"match": "3.*", "SCHEDULES": {"lr": schedule}}]
    for name, changes in {
        "all": {"SCHEDULES": {"lr": schedule}},
        "one": {"groups": groups},
    }.items():
        fit(tmp_path / name, OPTIMIZER=changes)
    logged = (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()
    rates = [row["lr"] for row in map(json.loads, logged) if row["kind"] == "step"]
    assert rates == pytest.approx([1e-3] * 4 + [1e-4] * 4 + [1e-5] * 2)
    assert "StepLR" in (tmp_path / "one" / "config.yaml").read_text()


class Wide(nn.Module):
    """A linear model."""

    def __init__(self, width: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


@pytest.mark.feature("python.fit")
def test_classes_in_a_config_are_names() -> None:
    from torchmetrics.classification import MulticlassRecall

    words = overrides_of(
        {
            "MODEL": {"name": Wide, "width": 4},
            "LOSS": nn.CrossEntropyLoss,
            "OPTIMIZER.name": torch.optim.RAdam,
            "METERS": {"hits": Accuracy, "recall": {"name": MulticlassRecall, "top_k": 1}},
            "DATA": {"TRAIN": {"dataset": Points, "count": 80, "collate": collate}},
            "HOOKS.mine": KillAfter,
        }
    )
    assert words == [
        f"MODEL.name='{__name__}.Wide'",
        "MODEL.width=4",
        "LOSS.name='CrossEntropyLoss'",
        "OPTIMIZER.name='RAdam'",
        "METERS.hits={name: 'accuracy'}",
        "METERS.recall={name: 'torchmetrics.classification.precision_recall.MulticlassRecall', top_k: 1}",
        f"DATA.TRAIN={{dataset: '{__name__}.Points', count: 80, collate: '{__name__}.collate'}}",
        "HOOKS.mine={name: 'phasetrain.testing.kills.KillAfter'}",
    ]


def test_class_that_cannot_be_imported_is_an_object(tmp_path: Path) -> None:
    class Local(Wide):
        """Defined in a function, where no name reaches."""

    class Flat:
        """Makes a vector of an image."""

        def __call__(self, image: Tensor) -> Tensor:
            return image.flatten()

    config = {
        "MODEL": {"name": Local, "width": 64},
        "DATA": {"TRAIN": {"transforms": [Flat()]}, "TEST": {"transforms": [{"name": Flat}]}},
        "PHASES": {"epochs": 1, "limit": {"train": 2, "test": 1}},
        "RUN": {"dir": str(tmp_path)},
    }
    result = phasetrain.run(["experiment=digits", config], terminal=Terminal(io.StringIO()))
    assert result.updates == 2
    assert torch.is_tensor(result.load().predict(torch.randn(2, 64)))


def test_dataset_of_tensors_is_identified_by_its_content(tmp_path: Path) -> None:
    def data(value: float) -> TensorDataset:
        return TensorDataset(torch.full((32, 4), value), torch.zeros(32, dtype=torch.int64))

    fit(tmp_path, train=data(1.0), batch_size=16, epochs=1)
    with raises(ChangedError, key="DATA.TRAIN", code="resume.data_changed"):
        fit(tmp_path, train=data(2.0), batch_size=16, epochs=1)


def test_adapters_of_a_model_that_is_an_object_are_rejected() -> None:
    with raises(ConfigError, code="config.conflict", key="MODEL.adapters"):
        phasetrain.fit(
            nn.Linear(2, 2),
            train=[(0, 0)],
            loss="mse",
            optimizer="sgd",
            epochs=1,
            MODEL={"adapters": {}},
        )


@pytest.mark.feature("fit.interrupt", "Ctrl-C in `fit` saves and stops the program", "`fit`")
def test_ctrl_c_saves_the_run_and_is_raised(tmp_path: Path) -> None:
    @on("step")
    def press(run: Any, phase: Any, out: Any) -> None:
        if run.state.updates == 3:
            os.kill(os.getpid(), signal.SIGINT)

    net, whole = make_net(), make_net()
    before = hash_model(net)
    with pytest.raises(KeyboardInterrupt, match="after 3 updates"):
        fit(tmp_path / "run", net, hooks=[press])
    assert hash_model(net) != before
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "interrupted"
    net = make_net()
    assert fit(tmp_path / "run", net).updates == 10
    fit(tmp_path / "whole", whole)
    assert hash_model(net) == hash_model(whole)


@pytest.mark.slow  # a new process that imports the compiler of torch
def test_uncaught_ctrl_c_ends_the_process_as_in_any_program() -> None:
    lines = (
        "import torch._dynamo",  # as optimizers of torch do
        "from phasetrain.app.fit import RunResult, _raise_interrupt",
        "_raise_interrupt(RunResult('interrupted'))",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGINT, done.stderr  # a shell shows 130


@pytest.mark.parametrize(
    ("split", "data"),
    [
        ("train", (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))),
        ("test", [Points(8)]),
        ("test", (Points(8), Points(8))),
        ("train", [DataLoader(Points(8))]),
    ],
)
def test_list_of_datasets_or_of_tensors_is_no_dataset(
    split: str, data: Any, tmp_path: Path
) -> None:
    with raises(ConfigError, key=f"DATA.{split.upper()}", code="config.wrong_part"):
        fit(tmp_path, **{split: data})


def test_list_of_samples_is_a_dataset(tmp_path: Path) -> None:
    samples = [Points(32)[index] for index in range(32)]
    assert fit(tmp_path, train=samples, batch_size=16, epochs=1).updates == 2


def test_missing_value_names_what_the_run_provides(tmp_path: Path) -> None:
    class Weighted(nn.CrossEntropyLoss):
        def __init__(self, alpha: float, train_samples: int) -> None:
            super().__init__()

    with raises(ConfigError, key="LOSS.alpha", code="config.missing_parameter") as caught:
        fit(tmp_path, loss=Weighted)
    assert "train_samples" in str(caught.value)


def accuracy(target: Tensor, output: Tensor) -> Tensor:
    """Has the arguments in the order of scikit-learn, not in the one of a metric."""
    return (output.argmax(1) == target).float().mean()


def test_function_of_another_form_is_rejected_with_a_meter_named(tmp_path: Path) -> None:
    with raises(
        ConfigError, key="METERS.accuracy.target", code="config.missing_parameter"
    ) as caught:
        fit(tmp_path, metrics=accuracy)
    assert "phasetrain.meters.Meter" in str(caught.value)
