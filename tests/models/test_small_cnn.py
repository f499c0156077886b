import pytest
import torch
from torch.nn.functional import cross_entropy

from phasetrain.data.datasets import load_digits
from phasetrain.models import SmallCNN


def test_images_of_any_size_give_scores():
    model = SmallCNN(10, channels=3)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    assert model(torch.zeros(2, 3, 33, 17)).shape == (2, 10)


def test_number_of_parameters_depends_on_the_width():
    assert sum(p.numel() for p in SmallCNN(10).parameters()) == 56554
    assert sum(p.numel() for p in SmallCNN(10, width=16).parameters()) == 14458


def test_dropout_is_active_in_training_mode_only():
    model = SmallCNN(4, dropout=0.5)
    batch = torch.rand(2, 1, 8, 8)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_grid_keeps_where_a_feature_is():
    torch.manual_seed(0)
    image = torch.zeros(1, 1, 28, 28)
    image[..., 8:12, 8:12] = 1.0
    moved = image.roll(8, dims=3)  # not over the border
    mean, grid = SmallCNN(10).eval(), SmallCNN(10, grid=7).eval()
    assert grid.head.in_features == 64 * 49
    torch.testing.assert_close(mean(moved), mean(image))
    assert (grid(moved) - grid(image)).abs().max() > 1e-3
    assert grid(torch.zeros(2, 1, 33, 28)).shape == (2, 10)
    with pytest.raises(ValueError, match=r"MODEL.grid = 7.* 9 x 5 "):
        grid(torch.zeros(2, 1, 33, 17))


@pytest.mark.parametrize(("size", "grid"), [((28, 28), 7), ((28, 28), 3), ((32, 24), 2)])
def test_grid_has_the_means_of_adaptive_windows(size: tuple[int, int], grid: int) -> None:
    torch.manual_seed(0)
    model = SmallCNN(4, width=4, grid=grid).eval()
    batch = torch.rand(2, 1, *size)
    means = torch.nn.functional.adaptive_avg_pool2d(model.features(batch), grid)
    torch.testing.assert_close(model(batch), model.head(means.flatten(1)))


@pytest.mark.parametrize(
    "given", [{"classes": 0}, {"channels": 0}, {"width": 0}, {"grid": 0}, {"dropout": 1.0}]
)
def test_bad_parameters_are_rejected(given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))} = .*:"):
        SmallCNN(**{"classes": 2} | given)


@pytest.mark.slow
def test_digits_are_learned_in_four_epochs():
    torch.manual_seed(0)
    train, test = load_digits("train"), load_digits("test")
    model = SmallCNN(10, width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for indices in torch.randperm(len(train)).split(64):
            inputs, targets = train.__getitems__(indices)
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    model.eval()
    assert (model(test.inputs).argmax(1) == test.targets).float().mean().item() > 0.95
