"""The model returns the loss itself, or a mapping that contains it."""

import pytest
import torch

from phasetrain.losses import FromModel

LOSSES = {"box": torch.tensor(2.0), "class": torch.tensor(0.5)}


def test_scalar_is_the_loss() -> None:
    assert float(FromModel()(torch.tensor(3.0), None)) == 3.0


def test_mapping_of_losses_is_summed_and_each_is_logged() -> None:
    loss = FromModel()
    assert float(loss(LOSSES, None)) == 2.5
    assert {name: float(value) for name, value in loss.pop_logs().items()} == {
        "loss_box": 2.0,
        "loss_class": 0.5,
    }


def test_nonscalar_entries_are_outputs() -> None:
    assert float(FromModel()({**LOSSES, "scores": torch.ones(4, 2)}, None)) == 2.5


def test_keys_select_the_losses() -> None:
    loss = FromModel(["box"])
    assert float(loss(LOSSES, None)) == 2.0
    assert list(loss.pop_logs()) == ["loss_box"]
    with pytest.raises(ValueError, match=r"LOSS\.keys = 'boxes': .*\bbox\b"):
        FromModel(["boxes"])(LOSSES, None)


def test_gradient_reaches_every_loss() -> None:
    value = torch.tensor(3.0, requires_grad=True)
    FromModel()({"a": 2 * value, "b": value.square()}, None).backward()
    assert value.grad is not None
    assert float(value.grad) == 8.0


TRAINED = torch.tensor(1.0, requires_grad=True)


@pytest.mark.feature(
    "loss.from_model",
    "of the scalars that a model returns, the losses are added and the others are logged",
    "`LOSS.name=from_model`, `LOSS.keys`",
)
@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize(
    ("names", "others", "total"),
    [
        (("loss",), {"acc": 0.1, "n": 1000}, 1.0),
        (("loss_box", "Loss_class"), {"map": 0.5}, 2.0),
        (("nll", "kl"), {}, 2.0),
    ],
)
def test_scalars_that_are_no_losses_are_logged(
    names: tuple[str, ...], others: dict[str, float], total: float, *, has_gradient: bool
) -> None:
    loss = FromModel()
    term = TRAINED if has_gradient else TRAINED.detach()  # as in a test
    output = {name: torch.tensor(value) for name, value in others.items()}
    assert float(loss({**output, **dict.fromkeys(names, term)}, None).detach()) == total
    logs = {name: float(value) for name, value in loss.pop_logs().items()}
    assert logs == {f"loss_{name}": 1.0 for name in names if name != "loss"} | {
        name: pytest.approx(value) for name, value in others.items()
    }
    assert loss.pop_logs() == {}


@pytest.mark.parametrize(
    ("output", "keys"),
    [
        ({"loss": TRAINED, "kl": TRAINED}, ["loss", "kl"]),
        ({"nll": TRAINED, "acc": torch.tensor(0.5)}, ["nll"]),
    ],
)
def test_losses_that_a_test_could_not_find_have_to_be_named(
    output: dict[str, torch.Tensor], keys: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"LOSS\.keys="):
        FromModel()(output, None)
    assert float(FromModel(keys)(output, None).detach()) == len(keys)


@pytest.mark.parametrize("output", [{"scores": torch.ones(2)}, {}, None, [torch.tensor(1.0)]])
def test_output_without_a_loss_is_rejected(output: object) -> None:
    with pytest.raises(ValueError, match="the model"):
        FromModel()(output, None)


def test_empty_keys_are_rejected() -> None:
    with pytest.raises(ValueError, match="keys = "):
        FromModel([])
