import pytest
import torch

from phasetrain.models import MLP


def test_layers_and_scores_have_the_shapes():
    model = MLP(10, (1, 8, 8), hidden=(32, 16))
    assert model(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert [tuple(p.shape) for p in model.parameters()] == [
        (32, 64),
        (32,),
        (16, 32),
        (16,),
        (10, 16),
        (10,),
    ]


def test_activation_is_relu():
    model = MLP(1, (1,), hidden=(1,))
    for value in model.parameters():
        value.data.fill_(1.0)
    assert model(torch.tensor([[2.0], [-5.0]])).tolist() == [[4.0], [1.0]]


def test_activation_can_be_another_one():
    model = MLP(1, (1,), hidden=(1,), activation="tanh")
    for value in model.parameters():
        value.data.fill_(1.0)
    assert model(torch.tensor([[0.0]])).item() == pytest.approx(1.761594, abs=1e-6)


def test_initial_weights_can_be_scaled():
    torch.manual_seed(0)
    usual = MLP(2, (3,)).state_dict()
    torch.manual_seed(0)
    scaled = MLP(2, (3,), init_scale=100.0).state_dict()
    assert all(torch.equal(scaled[name], 100 * usual[name]) for name in usual)


def test_model_without_hidden_layers_is_linear():
    assert sum(p.numel() for p in MLP(3, (2,), hidden=()).parameters()) == 9


def test_dropout_is_active_in_training_mode_only():
    model = MLP(4, (8,), dropout=0.5)
    batch = torch.ones(2, 8)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


@pytest.mark.parametrize(
    "given", [{"classes": 0}, {"hidden": (8, 0)}, {"input_shape": (0,)}, {"dropout": -0.1}]
)
def test_bad_parameters_are_rejected(given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))} = .*:"):
        MLP(**{"classes": 2, "input_shape": (4,)} | given)


@pytest.mark.feature("model.pooling")
def test_input_norm_standardizes_channels_of_maps_and_features_of_vectors():
    model = MLP(3, (2, 4, 4), hidden=(), input_norm=True)
    maps = torch.randn(6, 2, 4, 4) * 5 + 2
    mean, var = maps.mean((0, 2, 3)), maps.var((0, 2, 3), correction=0)
    normed = (maps - mean.view(1, 2, 1, 1)) / (var.view(1, 2, 1, 1) + 1e-5).sqrt()
    torch.testing.assert_close(model(maps), model.layers(normed))
    assert MLP(3, (7,), hidden=(), input_norm=True)(torch.randn(6, 7)).shape == (6, 3)


def test_batch_norm_is_before_each_activation():
    model = MLP(3, (4,), hidden=(5,), batch_norm=True)
    assert [type(one).__name__ for one in model.layers] == [
        "Flatten",
        "Linear",
        "BatchNorm1d",
        "ReLU",
        "Linear",
    ]
