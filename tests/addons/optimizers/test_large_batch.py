"""LARS, LARC and LAMB against their formulas in float64."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from phasetrain.addons.optimizers.large_batch import LAMB, LARS
from phasetrain.optim import OPTIMIZERS

W = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)  # norm 5
G = torch.tensor([[0.0, 6.0], [8.0, 0.0]], dtype=torch.float64)  # norm 10
BIAS, BIAS_G = (
    torch.tensor([1.0, 2.0], dtype=torch.float64),
    torch.tensor([0.5, -0.5], dtype=torch.float64),
)


def moved(make: type[LARS] | type[LAMB], updates: int, **options: object) -> tuple[Tensor, Tensor]:
    weight, bias = nn.Parameter(W.clone()), nn.Parameter(BIAS.clone())
    optimizer = make([weight, bias], **options)  # type: ignore[arg-type]
    for _ in range(updates):
        weight.grad, bias.grad = G.clone(), BIAS_G.clone()
        optimizer.step()
    return weight.detach(), bias.detach()


class TestLars:
    @pytest.mark.feature(
        "57", "LARS, LARC, LAMB; torch's and timm's optimizers", "`OPTIMIZER.name`"
    )
    def test_step_of_a_matrix_is_proportional_to_its_norm(self) -> None:
        weight, bias = moved(LARS, 1, lr=0.5, momentum=0.0, weight_decay=0.1, trust=0.02)
        local = 0.02 * 5 / (10 + 0.1 * 5)
        assert torch.allclose(weight, W - 0.5 * local * (G + 0.1 * W), rtol=0, atol=1e-15)
        assert torch.equal(bias, BIAS - 0.5 * BIAS_G)

    def test_momentum_accumulates_scaled_gradients(self) -> None:
        _, bias = moved(LARS, 2, lr=0.5, momentum=0.9)
        assert torch.allclose(bias, BIAS - 0.5 * BIAS_G * (1 + 1.9), rtol=0, atol=1e-15)
        _, ahead = moved(LARS, 1, lr=0.5, momentum=0.9, nesterov=True)
        assert torch.allclose(ahead, BIAS - 0.5 * BIAS_G * 1.9, rtol=0, atol=1e-15)

    def test_larc_step_is_at_most_that_of_sgd(self) -> None:
        fast, _ = moved(LARS, 1, lr=0.1, momentum=0.0, trust=1.0, clip=True)  # 5 / 10 is above lr
        assert torch.allclose(fast, W - 0.1 * G, rtol=0, atol=1e-15)
        slow, _ = moved(LARS, 1, lr=0.1, momentum=0.0, trust=0.02, clip=True)
        assert torch.allclose(slow, W - 0.01 * G, rtol=0, atol=1e-15)

    def test_larc_of_all_weights_scales_biases_and_lets_them_decay(self) -> None:
        options = {"momentum": 0.0, "weight_decay": 0.1, "trust": 0.02, "clip": True}
        _, bias = moved(LARS, 1, lr=0.1, all_weights=True, **options)
        size, norm = 5**0.5, 0.5**0.5
        scale = min(0.02 * size / (norm + 0.1 * size) / 0.1, 1.0)
        expected = BIAS - 0.1 * scale * (BIAS_G + 0.1 * BIAS)
        assert torch.allclose(bias, expected, rtol=0, atol=1e-15)

    @pytest.mark.parametrize(("weight", "gradient"), [(0.0, 1.0), (1.0, 0.0)])
    def test_larc_of_all_weights_leaves_others_to_sgd(self, weight: float, gradient: float) -> None:
        parameter = nn.Parameter(torch.full((2,), weight))
        parameter.grad = torch.full((2,), gradient)
        options = {"momentum": 0.0, "weight_decay": 0.5, "clip": True, "all_weights": True}
        LARS([parameter], lr=4.0, **options).step()
        assert parameter.tolist() == [weight - 4 * gradient] * 2

    def test_joint_norm_is_of_gradient_and_decay_together(self) -> None:
        options = {"momentum": 0.0, "weight_decay": 0.5, "trust": 0.02, "joint_norm": True}
        weight, bias = moved(LARS, 1, lr=0.5, **options)
        assert torch.allclose(bias, BIAS - 0.5 * (BIAS_G + 0.5 * BIAS), rtol=0, atol=1e-15)
        step = G + 0.5 * W
        local = 0.02 * 5 / float(step.norm())
        assert torch.allclose(weight, W - 0.5 * local * step, rtol=0, atol=1e-15)

    def test_state_without_the_later_options_is_restored(self) -> None:
        optimizer = LARS([nn.Parameter(W.clone())], lr=0.1)
        state = optimizer.state_dict()
        for key in ("all_weights", "joint_norm"):
            del state["param_groups"][0][key]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["all_weights"] is False

    def test_weights_of_zero_are_updated(self) -> None:
        weight = nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.ones(2, 2)
        LARS([weight], lr=0.1, momentum=0.0).step()
        assert torch.equal(weight.detach(), torch.full((2, 2), -0.1))

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"lr": -1.0}, "lr = -1.0"),
            ({"lr": 1.0, "momentum": 1.0}, r"momentum = 1.0: .* \[0, 1\)"),
        ],
    )
    def test_bad_parameters_are_rejected(self, options: dict[str, float], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            LARS([nn.Parameter(W.clone())], **options)


class TestLamb:
    def test_biases_are_updated_as_with_adam(self) -> None:
        _, bias = moved(LAMB, 1, lr=0.01, eps=0.0, weight_decay=0.1)
        assert torch.allclose(bias, BIAS - 0.01 * BIAS_G.sign(), rtol=0, atol=1e-12)

    @pytest.mark.feature("57")
    def test_three_steps_follow_the_formula(self) -> None:
        weight, _ = moved(LAMB, 3, lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
        expected, mean, square = W.clone(), torch.zeros_like(W), torch.zeros_like(W)
        for step in (1, 2, 3):
            mean, square = 0.9 * mean + 0.1 * G, 0.99 * square + 0.01 * G**2
            move = (mean / (1 - 0.9**step)) / (
                (square / (1 - 0.99**step)).sqrt() + 1e-6
            ) + 0.1 * expected
            expected = expected - 0.01 * (expected.norm() / move.norm()) * move
        assert torch.allclose(weight, expected, rtol=0, atol=1e-12)

    def test_betas_outside_of_their_range_are_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"betas = \(1.0, 0.9\)"):
            LAMB([nn.Parameter(W.clone())], 0.1, betas=(1.0, 0.9))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_loaded_state_continues_bit_identically(name: str) -> None:
    def made() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(W.clone())
        return weight, OPTIMIZERS.build(name, {"lr": 0.1}, facts={"params": [weight]})

    (through, one), (second, two) = made(), made()
    for _ in range(2):
        through.grad = G.clone()
        one.step()
    second.data.copy_(through.data)
    two.load_state_dict(deepcopy(one.state_dict()))
    for weight, optimizer in ((through, one), (second, two)):
        weight.grad = G.clone()
        optimizer.step()
    assert torch.equal(through, second)
    assert not torch.equal(through.data, W)
