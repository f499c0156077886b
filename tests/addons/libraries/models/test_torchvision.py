"""Models of torchvision are available by name."""

from pathlib import Path

import pytest
import torch
from harness import newest, train
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.models import MODELS

pytest.importorskip("torchvision", reason="the extra `torchvision` is not installed")


@pytest.mark.feature("libraries.models")
@pytest.mark.slow
def test_run_trains_and_saves_the_model(tmp_path: Path) -> None:
    splits = [
        f"DATA.{split}={{dataset: synthetic, samples: 16, input_shape: [3, 16, 16], classes: 5, batch_size: 8}}"
        for split in ("TRAIN", "TEST")
    ]
    words = (
        "~MODEL.width",
        "~MODEL.dropout",
        "OPTIMIZER.lr=0.01",
        "PHASES.epochs=1",
        "METERS.accuracy={}",
    )
    train(
        tmp_path / "run",
        "MODEL.name=torchvision.resnet18",
        *splits,
        "DATA.TRAIN.transforms=[]",
        *words,
    )
    loaded = newest(tmp_path / "run")
    learned = loaded.state["task"]["model"]
    assert loaded.manifest.state["updates"] == 2
    assert (learned["conv1.weight"].shape, learned["fc.weight"].shape) == ((64, 3, 7, 7), (5, 512))


def test_facts_and_params_reach_the_model() -> None:
    model = MODELS.build(
        "torchvision.resnet18", {"params": {"width_per_group": 64}}, facts={"classes": 4}
    )
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


def test_one_of_several_outputs_is_selected() -> None:
    params = {"classes": 3, "output": "out"}
    model = MODELS.build(
        "torchvision.lraspp_mobilenet_v3_large", params
    )  # which by itself would download a backbone
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3, 32, 32)


def test_dotted_path_gets_params_alone() -> None:
    model = MODELS.build("torchvision.models.resnet18", {"params": {"num_classes": 6}})
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 6)


@pytest.mark.parametrize(
    ("name", "params", "problem"),
    [
        ("resnet81", {}, {"given": "'torchvision.resnet81'", "suggestion": "resnet18"}),
        ("resnet18", {"pretrained": True}, {"code": "config.download", "key": "MODEL.pretrained"}),
        (
            "resnet18",
            {"params": {"weights": "DEFAULT"}},
            {"code": "config.download", "key": "MODEL.params.weights"},
        ),
        ("resnet18", {"params": {"with": 3}}, {"key": "MODEL"}),
    ],
)
def test_bad_parameters_are_rejected(
    name: str, params: dict[str, object], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        MODELS.build(f"torchvision.{name}", params)
