"""A LightningModule is the model of `phasetrain.fit`."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep
from raising import raises
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import phasetrain
from phasetrain.addons.libraries.lightning_module import describe_lightning_module
from phasetrain.errors import ConfigError
from phasetrain.models.digest import hash_model
from phasetrain.runtime.terminal import Terminal

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
mse = nn.functional.mse_loss


def make_data() -> TensorDataset:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :1])


class Base(lightning.LightningModule):
    """A network with dropout; `configure_optimizers` has the schedule of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = mse(self(inputs), targets)
        self.log("train_loss", 2 * loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Validated(Base):
    def validation_step(self, batch):
        loss = mse(self(batch[0]), batch[1])
        self.log_dict({"bias": self.net[0].bias[0], "loss": loss})
        return {"loss": loss}


class Plain(nn.Module):
    """The network of `Base` with the same names of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Base().net

    def forward(self, inputs):
        return self.net(inputs)


def fit(folder: Path, model: nn.Module, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "train": DataLoader(make_data(), batch_size=8, shuffle=True),
        "epochs": 2,
        "RUN": {"dir": str(folder)},
        "terminal": Terminal(io.StringIO(), live=False),
    }
    return phasetrain.fit(model, **{**arguments, **changes})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = Validated()
    return fit(tmp_path_factory.mktemp("unbroken"), model, test=make_data(), batch_size=8), model


@pytest.mark.feature(
    "python.lightning_module",
    "a LightningModule is trained by its own steps and optimizer",
    "`phasetrain.fit(lightning_module, train)`",
)
def test_a_module_has_the_bits_of_its_network_with_loss_and_optimizer(
    unbroken: Any, tmp_path: Path
) -> None:
    result, model = unbroken
    plain = fit(
        tmp_path,
        Plain(),
        loss=nn.MSELoss(),
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        OPTIMIZER={"SCHEDULES": {"lr": {"name": "torch.StepLR", "step_size": 3, "gamma": 0.5}}},
    )
    assert result.digest == plain.digest == hash_model(model)
    assert set(result.last) == {"train/loss", "train/train_loss", "test/loss", "test/bias"}
    assert result.last["train/train_loss"] == pytest.approx(2 * result.last["train/loss"])
    # The module is as it was, but for its weights.
    assert model._trainer is None
    assert not {"forward", "log", "log_dict"} & vars(model).keys()


@pytest.mark.parametrize("steps", [2, 6])
def test_a_killed_call_resumes_with_equal_bits(steps: int, unbroken: Any, tmp_path: Path) -> None:
    data = {"test": make_data(), "batch_size": 8}
    with pytest.raises(Killed):
        fit(tmp_path, Validated(), hooks=[SaveEachStep(), KillAfter(steps)], **data)
    assert fit(tmp_path, Validated(), **data).digest == unbroken[0].digest


class UsesTrainer(Base):
    def training_step(self, batch, batch_idx):
        return self.trainer.estimated_stepping_batches * super().training_step(batch, batch_idx)


class UsesEpoch(Base):
    def training_step(self, batch, batch_idx):
        return (1 + self.current_epoch) * super().training_step(batch, batch_idx)


class UsesIndex(Base):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 if batch_idx % 2 else 2)


class LogsObject(Base):
    def training_step(self, batch, batch_idx):
        self.log("metric", nn.Identity())
        return super().training_step(batch, batch_idx)


class Manual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class HasHook(Base):
    def on_train_epoch_start(self):
        self.net[0].requires_grad_(False)


class TwoOptimizers(Base):
    def configure_optimizers(self):
        return [SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class NoOptimizer(Base):
    def configure_optimizers(self):
        return None


class Lambda(Base):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)]


class NoLoss(Base):
    def training_step(self, batch, batch_idx):
        self.log("value", 1.0)


@pytest.mark.parametrize(
    ("module", "changes", "key"),
    [
        (UsesTrainer, {}, "MODEL"),
        (UsesEpoch, {}, "MODEL"),
        (UsesIndex, {}, "MODEL"),
        (LogsObject, {}, "METERS.metric"),
        (NoLoss, {}, "MODEL"),
        (Manual, {}, "MODEL"),
        (HasHook, {}, "MODEL"),
        (TwoOptimizers, {}, "OPTIMIZER"),
        (NoOptimizer, {}, "OPTIMIZER"),
        (Lambda, {}, "OPTIMIZER.SCHEDULES.lr"),
        (Base, {"test": make_data()}, "DATA.TEST"),
        (Base, {"loss": nn.MSELoss()}, "LOSS"),
    ],
)
def test_what_only_a_trainer_has_is_rejected(
    module: Any, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with raises(ConfigError, code="lightning.unsupported", key=key):
        fit(tmp_path, module(), batch_size=8, **changes)


def make_optimizer(module: Base) -> SGD:
    return SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("configured", "schedule"),
    [
        (lambda optimizer: optimizer, None),
        (lambda optimizer: [optimizer], None),
        (
            lambda optimizer: ([optimizer], [lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)]),
            {"name": "torch.MultiStepLR", "milestones": [2, 4], "gamma": 0.5, "every": "epoch"},
        ),
    ],
)
def test_each_form_of_configured_optimizers_is_described(
    configured: Any, schedule: dict[str, Any] | None
) -> None:
    module = Base()
    module.configure_optimizers = lambda: configured(make_optimizer(module))
    section = describe_lightning_module(module, None, None)[1]
    assert (section["name"], section["lr"]) == (SGD, 0.1)
    assert section.get("SCHEDULES", {}).get("lr") == schedule


def test_another_optimizer_takes_the_place_of_the_configured_one(tmp_path: Path) -> None:
    result = fit(tmp_path, TwoOptimizers(), optimizer=partial(SGD, lr=0.1))
    assert result.updates == 8
