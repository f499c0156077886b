import pytest
import torch
from raising import raises
from torch import Tensor, nn

from phasetrain.addons.deploy.extract.layers import LayerOutputs, pool_output
from phasetrain.errors import ConfigError


class Net(nn.Module):
    """Two layers, of which the second changes what it gets in place; one more that is never called,
    and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.second = nn.ReLU(inplace=True)
        self.unused = nn.Identity()
        self.twice = nn.Identity()
        self.several = nn.LSTM(2, 2)

    def forward(self, batch: Tensor) -> Tensor:
        self.several(batch.flatten(1)[:, :2])
        return self.twice(self.twice(self.second(self.first(batch))))


def test_outputs_are_copied_and_hooks_are_removed() -> None:
    net, batch = Net(), torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    with LayerOutputs(net, ["second", "first", "second"]) as layers:
        net(batch.clone())
        found = layers.pop_outputs()
        assert list(found) == ["second", "first"]
        assert found["first"].tolist() == [
            [-1, 2],
            [3, -4],
        ]  # before the second layer changed it in place
        assert found["second"].tolist() == [[0, 2], [3, 0]]
        net(torch.zeros(1, 2))
        assert len(layers.pop_outputs()["first"]) == 1
    assert not any(module._forward_hooks for module in net.modules())
    net(batch)
    with raises(ConfigError, key="EXTRACT.layers"):
        layers.pop_outputs()


def take(net: Net, name: str) -> None:
    with LayerOutputs(net, [name]) as layers:
        net(torch.zeros(1, 2))
        layers.pop_outputs()


def test_output_without_a_copy_is_changed_by_the_next_layer() -> None:
    kept = []
    net = Net()
    net.first.register_forward_hook(lambda module, inputs, output: kept.append(output))
    net(torch.tensor([[-1.0, 2.0]]))
    assert kept[0].tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "frist",
            {"key": "EXTRACT.layers[0]", "given": "'frist'", "suggestion": "first"},
        ),
        ("", {"key": "EXTRACT.layers[0]", "given": "''"}),
        ("unused", {"key": "EXTRACT.layers"}),
        ("twice", {"key": "EXTRACT.layers"}),
        ("several", {"key": "EXTRACT.layers"}),
    ],
)
def test_unsuitable_layers_are_rejected(name: str, problem: dict[str, str]) -> None:
    net = Net()
    with raises(ConfigError, **problem):
        take(net, name)
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize(
    ("shape", "pool", "expected"),
    [
        ((2, 3, 4, 5), "none", (2, 3, 4, 5)),
        ((2, 3, 4, 5), "mean", (2, 3)),
        ((2, 3, 2, 4, 5), "mean", (2, 3)),
        ((2, 7, 3), "mean", (2, 3)),
        ((2, 7, 3), "first", (2, 3)),
        ((2, 3), "mean", (2, 3)),
    ],
)
def test_pooled_output_has_the_shape(
    shape: tuple[int, ...], pool: str, expected: tuple[int, ...]
) -> None:
    assert pool_output(torch.zeros(shape), pool, "x").shape == expected  # type: ignore[arg-type]


def test_pooling_averages_or_takes_the_first_token() -> None:
    images = torch.arange(8.0).view(1, 2, 2, 2)
    assert pool_output(images, "mean", "x").tolist() == [[1.5, 5.5]]
    tokens = torch.tensor([[[1.0, 2.0], [3.0, 6.0]]])
    assert pool_output(tokens, "mean", "x").tolist() == [[2, 4]]
    assert pool_output(tokens, "first", "x").tolist() == [[1, 2]]
    with pytest.raises(
        ConfigError,
        match=r"\(1, 2, 2, 2\).*EXTRACT\.pool = 'first'",
    ):
        pool_output(images, "first", "x")
