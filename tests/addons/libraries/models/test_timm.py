"""Models of timm are available by name."""

from pathlib import Path

import pytest
import torch
from harness import newest, train
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.models import MODELS
from phasetrain.testing.build import resolve_overrides

pytest.importorskip("timm", reason="the extra `timm` is not installed")


def test_facts_and_params_reach_the_model() -> None:
    model = MODELS.build(
        "timm.resnet18", {"params": {"drop_rate": 0.25}}, facts={"classes": 7, "channels": 1}
    )
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert sum(p.numel() for p in model.parameters()) == 11_173_831
    assert (model.drop_rate, model.conv1.weight.shape) == (0.25, (64, 1, 7, 7))


def test_config_has_priority_over_facts() -> None:
    params = {"classes": 3, "params": {"in_chans": 2}}
    model = MODELS.build("timm.test_resnet", params, facts={"classes": 7, "channels": 1})
    assert model(torch.zeros(2, 2, 32, 32)).shape == (2, 3)


@pytest.mark.feature(
    "libraries.models",
    "models from timm, torchvision and transformers",
    "`MODEL.name=timm.resnet18`",
)
def test_run_trains_and_saves_the_model(tmp_path: Path) -> None:
    words = (
        "DATA.TRAIN.batch_size=8",
        "DATA.TEST.batch_size=8",
        "PHASES.epochs=1",
        "PHASES.limit.train=2",
    )
    train(
        tmp_path / "run",
        "MODEL.name=timm.resnet18",
        "~MODEL.width",
        "~MODEL.dropout",
        "OPTIMIZER.lr=0.01",
        *words,
    )
    loaded = newest(tmp_path / "run")
    learned = loaded.state["task"]["model"]
    assert loaded.manifest.state["updates"] == 2
    assert (learned["conv1.weight"].shape, learned["fc.weight"].shape) == ((64, 1, 7, 7), (10, 512))
    assert int(learned["bn1.num_batches_tracked"]) == 2


def test_name_with_a_tag_and_dotted_path_are_found() -> None:
    assert MODELS.build("timm.resnet10t.c3_in1k", {}, facts={"classes": 2})(
        torch.zeros(2, 3, 32, 32)
    ).shape == (2, 2)
    assert MODELS.build("timm.layers.SqueezeExcite", {"channels": 16}).fc1.weight.shape == (
        8,
        16,
        1,
        1,
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["MODEL.name=timm.resnet81"], {"key": "MODEL.name", "suggestion": "resnet18"}),
        (
            ["MODEL.name=timm.resnet18", "MODEL.clases=3"],
            {"key": "MODEL.clases", "given": "3", "suggestion": "MODEL.classes"},
        ),
        (["MODEL.name=timm.resnet18", "MODEL.params=3"], {"key": "MODEL.params", "given": "3"}),
    ],
)
def test_mistakes_are_found_when_the_config_is_validated(
    words: list[str], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        resolve_overrides(words)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"pretrained": True}, {"code": "config.download", "key": "MODEL.pretrained"}),
        (
            {"params": {"checkpoint_path": "a.pth"}},
            {"code": "config.download", "key": "MODEL.params.checkpoint_path"},
        ),
        ({"params": {"drop_rat": 0.1}}, {"key": "MODEL"}),
    ],
)
def test_bad_parameters_are_rejected_when_the_model_is_built(
    params: dict[str, object], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        MODELS.build("timm.resnet18", params)
