"""Errors about input, output and target name shapes and samples; micro-batches add up."""

import re
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Split, make_test_phase
from phasetrain.errors import ConfigError, NumericsError
from phasetrain.losses import LOSSES, FromModel
from phasetrain.meters import METERS
from phasetrain.optim import Updater
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, Position, Supervised
from phasetrain.tasks.parts import StepEvents


def task(model: nn.Module, loss: nn.Module) -> Supervised:
    return Supervised(Parts(model, loss, {}, None, {}, Machine(torch.device("cpu")), World(), 0))


def batch(target: Any, inputs: Any = None) -> Batch:
    inputs = torch.ones(4, 3) if inputs is None else inputs
    return Batch(inputs, target, torch.tensor([40, 41, 42, 43]), 4)


CLASSES = torch.tensor([0, 1, 1, 0])


class Two(nn.Module):
    """Has two outputs."""

    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": value, "b": value}


def test_forward_returns_output_loss_and_weight() -> None:
    out = task(nn.Linear(3, 2), nn.CrossEntropyLoss()).forward(batch(CLASSES))
    assert out.output.shape == (4, 2)
    assert (out.weight, out.samples, out.loss.ndim) == (4, 4, 0)
    assert out.target is CLASSES


class TestMisfits:
    def test_killed_worker_is_no_config_error(self) -> None:
        class Interrupted(nn.Module):
            def forward(self, value: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

        with pytest.raises(RuntimeError, match="pid 7") as caught:
            task(Interrupted(), nn.CrossEntropyLoss()).forward(batch(CLASSES))
        assert not isinstance(caught.value, ConfigError)

    def message(self, model: nn.Module, loss: nn.Module, given: Batch) -> str:
        with pytest.raises(ConfigError) as caught:
            task(model, loss).forward(given)
        return str(caught.value)

    def test_input_that_the_model_rejects_is_a_config_error(self) -> None:
        found = self.message(nn.Linear(5, 2), nn.CrossEntropyLoss(), batch(CLASSES))
        assert re.search(r"^MODEL: Linear .*\(4, 3\) float32 .*40, 41, 42 and 1 more", found)

    def test_error_describes_nested_inputs(self) -> None:
        given = batch(CLASSES, {"a": torch.ones(4, 1), "b": [torch.ones(4), 3]})
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(), given)
        assert "{a: (4, 1) float32, b: [(4,) float32, int]}" in found

    @pytest.mark.parametrize("label", [2, 9, -1])
    def test_label_outside_the_classes_is_named_with_its_sample(self, label: int) -> None:
        found = self.message(
            nn.Linear(3, 2), nn.CrossEntropyLoss(), batch(torch.tensor([0, 1, label, 0]))
        )
        assert re.search(rf"^DATA\.TRAIN: sample 42 .*label {label}, .*2 classes", found)

    def test_label_outside_the_classes_is_in_the_split_under_way(self) -> None:
        tested = task(nn.Linear(3, 2), nn.CrossEntropyLoss())
        tested.begin(make_test_phase(Split("valid", 4, 4, drop_last=False)), fresh=True)
        with raises(ConfigError, key="DATA.VALID"):
            tested.forward(batch(torch.tensor([0, 1, 2, 0])))

    def test_targets_of_the_wrong_type_are_rejected(self) -> None:
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(), batch(torch.ones(4)))
        assert re.search(r"^LOSS: CrossEntropyLoss .*\(4, 2\) float32 .*Linear .*\(4,\) ", found)

    @pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss()])
    @pytest.mark.filterwarnings("ignore:Using a target size")
    def test_shapes_that_would_be_broadcast_are_rejected(self, loss: nn.Module) -> None:
        found = self.message(nn.Linear(3, 1), loss, batch(torch.ones(4)))
        assert re.search(rf"^LOSS: {type(loss).__name__} .*\(4, 1\) float32 .*\(4,\)", found)
        task(nn.Linear(3, 1), loss).forward(batch(torch.ones(4, 1)))

    @pytest.mark.parametrize("outputs", [1, 2])
    def test_class_numbers_are_no_labels_of_binary_cross_entropy(self, outputs: int) -> None:
        found = self.message(nn.Linear(3, outputs), nn.BCEWithLogitsLoss(), batch(CLASSES))
        assert re.search(r"^LOSS: BCEWithLogitsLoss .*\(4,\) int64.*float32", found)

    def test_loss_that_is_no_scalar_is_rejected(self) -> None:
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"), batch(CLASSES))
        assert re.search(r"^LOSS: .*\(4,\) float32", found)

    @pytest.mark.parametrize("model", [nn.Linear(3, 2), Two()])
    def test_loss_with_more_arguments_needs_a_loss_that_calls_it(self, model: nn.Module) -> None:
        found = self.message(model, nn.CTCLoss(), batch(CLASSES))
        assert "docs/loss.md#custom-losses" in found
        assert "weighted_sum" not in found

    def test_missing_target_is_rejected(self) -> None:
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(), batch(None))
        assert "NoneType" in found


class TestSeveralOutputs:
    @pytest.mark.parametrize(
        "name", ["CrossEntropyLoss", pytest.param("dice", marks=pytest.mark.addon("vision"))]
    )
    def test_mapping_of_outputs_needs_weighted_sum(self, name: str) -> None:
        with pytest.raises(ConfigError) as caught:
            task(Two(), LOSSES.build(name)).forward(batch(CLASSES))
        assert "{a: (4, 3) float32, b: (4, 3) float32}" in str(caught.value)
        assert "LOSS.name=weighted_sum" in str(caught.value)

    def test_multilabel_and_regression_losses_need_float_targets(self) -> None:
        labels = torch.tensor([[0.0, 1.0]] * 4)
        out = task(nn.Linear(3, 2), nn.BCEWithLogitsLoss()).forward(batch(labels))
        assert (out.output.shape, out.weight) == ((4, 2), 4)
        task(nn.Linear(3, 2), nn.MSELoss()).forward(batch(labels))
        with pytest.raises(ConfigError, match="float32"):
            task(nn.Linear(3, 2), nn.BCEWithLogitsLoss()).forward(batch(labels.long()))
        with pytest.raises(ConfigError, match=r"LOSS\.name=BCEWithLogitsLoss"):
            task(nn.Linear(3, 2), nn.CrossEntropyLoss()).forward(batch(labels.long()))


class TestModelsWithTheirOwnLoss:
    def test_model_gets_the_target_if_the_loss_asks_for_it(self) -> None:
        class Own(nn.Module):
            def forward(self, value: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"one": value.mean(), "two": target.float().mean(), "scores": value}

        out = task(Own(), FromModel(with_target=True)).run_forward(
            batch(CLASSES), Position("train", 0, 0, 0.0)
        )
        assert float(out.loss) == 1.5
        assert {name: float(value) for name, value in out.logs.items()} == {
            "loss_one": 1.0,
            "loss_two": 0.5,
        }
        assert out.output["scores"].shape == (4, 3)


class TestSplitsWithoutTargets:
    def made(self, criterion: nn.Module, **meters: Any) -> Supervised:
        parts = Parts(
            nn.Linear(3, 2), criterion, meters, None, {}, Machine(torch.device("cpu")), World(), 0
        )
        return Supervised(parts)

    def test_loss_that_needs_targets_is_rejected(self) -> None:
        with raises(ConfigError, key="DATA.TEST", code="data.no_targets") as caught:
            self.made(nn.CrossEntropyLoss()).check_targets("test", None)
        assert "LOSS (CrossEntropyLoss)" in str(caught.value)
        assert "DATA.TEST.label_type=zero" in str(caught.value)
        assert "instead of targets: []" in str(caught.value)
        self.made(nn.CrossEntropyLoss()).check_targets("test", 3)

    def test_task_without_a_loss_needs_targets_for_meters_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Supervised, "uses_loss", False)
        self.made(nn.CrossEntropyLoss()).check_targets("test", None)
        with raises(ConfigError, key="DATA.TEST", code="data.no_targets"):
            self.made(nn.CrossEntropyLoss(), top=METERS.build("accuracy")).check_targets(
                "test", None
            )

    def test_loss_that_ignores_targets_is_accepted(self) -> None:
        class Spread(nn.Module):
            needs_target = False

            def forward(self, output: torch.Tensor, target: None) -> torch.Tensor:
                return output.square().mean()

        made = self.made(Spread())
        made.check_targets("train", None)
        assert float(made.forward(batch(None)).loss.detach()) > 0

    def test_meter_that_needs_targets_is_rejected(self) -> None:
        loss, accuracy = METERS.build("loss"), METERS.build("accuracy")
        self.made(FromModel(), loss=loss).check_targets("test", None)
        with raises(ConfigError, key="DATA.VALID"):
            self.made(FromModel(), loss=loss, top=accuracy).check_targets("valid", None)
        with raises(ConfigError, key="DATA.TRAIN"):
            self.made(FromModel(with_target=True)).check_targets("train", None)


class TestAccumulation:
    PIECES = ((0, 2), (2, 4), (4, 6), (6, 7))

    def trained(
        self, pieces: Any, sizes: Any = None, loss: nn.Module | None = None
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(7, 3, generator=generator, dtype=torch.float64)
        targets = torch.randint(2, (7,), generator=generator)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        updater = Updater(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
        made = Supervised(
            Parts(
                model,
                loss or nn.CrossEntropyLoss(),
                {},
                updater,
                {},
                Machine(torch.device("cpu")),
                World(),
                0,
            )
        )
        for step in range(3):
            batches = [
                Batch(
                    inputs[a:b], targets[a:b], torch.arange(a, b), b - a if sizes is None else sizes
                )
                for a, b in pieces
            ]
            made.train_step(batches, Position("train", step, step, 0.0), StepEvents())
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    @pytest.mark.feature(
        "44", "the last partial accumulation window is weighted correctly", "`OPTIMIZER.accumulate`"
    )
    def test_uneven_micro_batches_give_the_update_of_the_whole_batch(self) -> None:
        assert float((self.trained(self.PIECES) - self.trained([(0, 7)])).abs().max()) < 1e-12

    @pytest.mark.parametrize(
        "loss",
        [
            nn.CrossEntropyLoss(ignore_index=1),
            nn.CrossEntropyLoss(weight=torch.tensor([0.1, 3.0], dtype=torch.float64)),
            nn.CrossEntropyLoss(
                weight=torch.tensor([0.0, 3.0], dtype=torch.float64), ignore_index=0
            ),
        ],
    )
    def test_micro_batches_of_weighted_losses_give_the_update_of_the_whole_batch(
        self, loss: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pieces = [
            *self.PIECES[:2],
            (4, 5),
            (5, 6),
            (6, 7),
        ]  # some of one sample that may not count at all
        whole = self.trained([(0, 7)], loss=loss)
        assert float((self.trained(pieces, loss=loss) - whole).abs().max()) < 1e-12
        monkeypatch.setattr("phasetrain.tasks.supervised.find_target_counter", lambda loss: None)
        if loss.ignore_index >= 0:  # type: ignore[operator]
            with pytest.raises(NumericsError):  # a mean over nothing is no number
                self.trained(pieces, loss=loss)
        else:
            assert float((self.trained(pieces, loss=loss) - whole).abs().max()) > 1e-3, (
                "weighed by samples"
            )

    def test_mean_of_means_gives_another_update(self) -> None:
        assert (
            float((self.trained(self.PIECES, sizes=1) - self.trained([(0, 7)])).abs().max()) > 1e-3
        )
