"""Models of torchvision by name."""

from pathlib import Path

import pytest
import torch
from harness import newest, train

from phasetrain.errors import ConfigError
from phasetrain.models import MODELS

pytest.importorskip("torchvision", reason="the extra `torchvision` is not installed")


def test_a_phase(tmp_path: Path) -> None:
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


def test_free_parameters_and_facts_reach_it() -> None:
    model = MODELS.build(
        "torchvision.resnet18", {"params": {"width_per_group": 64}}, facts={"classes": 4}
    )
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


def test_one_of_several_outputs() -> None:
    params = {"classes": 3, "output": "out"}
    model = MODELS.build(
        "torchvision.lraspp_mobilenet_v3_large", params
    )  # which by itself would download a backbone
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3, 32, 32)


def test_a_path_of_torchvision_stands_as_it_is() -> None:
    model = MODELS.build("torchvision.models.resnet18", {"params": {"num_classes": 6}})
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 6)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "resnet81",
            {},
            r"MODEL\.name = 'torchvision\.resnet81': torchvision has no model 'resnet81'; did you mean",
        ),
        ("resnet18", {"pretrained": True}, r"MODEL\.pretrained: no weights are downloaded"),
        (
            "resnet18",
            {"params": {"weights": "DEFAULT"}},
            r"MODEL\.params\.weights: no weights are downloaded",
        ),
        ("resnet18", {"params": {"with": 3}}, r"unexpected keyword argument 'with'"),
    ],
)
def test_what_is_refused(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODELS.build(f"torchvision.{name}", params)
