"""Models of timm by name."""

from pathlib import Path

import pytest
import torch
from harness import newest, train

from phasetrain.errors import ConfigError
from phasetrain.models import MODELS
from phasetrain.testing.build import resolve_overrides

pytest.importorskip("timm", reason="the extra `timm` is not installed")


def test_facts_of_the_data_and_free_parameters_reach_it() -> None:
    model = MODELS.build(
        "timm.resnet18", {"params": {"drop_rate": 0.25}}, facts={"classes": 7, "channels": 1}
    )
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert sum(p.numel() for p in model.parameters()) == 11_173_831
    assert (model.drop_rate, model.conv1.weight.shape) == (0.25, (64, 1, 7, 7))


def test_what_the_config_says_wins_over_the_data() -> None:
    params = {"classes": 3, "params": {"in_chans": 2}}
    model = MODELS.build("timm.test_resnet", params, facts={"classes": 7, "channels": 1})
    assert model(torch.zeros(2, 2, 32, 32)).shape == (2, 3)


def test_a_phase(tmp_path: Path) -> None:
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


def test_a_name_with_a_tag_and_a_path_of_timm_are_understood() -> None:
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
    ("words", "message"),
    [
        (["MODEL.name=timm.resnet81"], r"timm has no model 'resnet81'; did you mean 'resnet18'\?"),
        (
            ["MODEL.name=timm.resnet18", "MODEL.clases=3"],
            r"MODEL\.clases = 3 .*; did you mean MODEL\.classes\?",
        ),
        (
            ["MODEL.name=timm.resnet18", "MODEL.params=3"],
            r"MODEL\.params = 3 \(command line\):",
        ),
    ],
)
def test_what_is_refused_with_the_config(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_overrides(words)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"pretrained": True},
            r"^MODEL\.pretrained: .* MODEL\.weights to its path$",
        ),
        (
            {"params": {"checkpoint_path": "a.pth"}},
            r"^MODEL\.params\.checkpoint_path: no weights are downloaded",
        ),
        (
            {"params": {"drop_rat": 0.1}},
            r"^MODEL \(model 'timm\.resnet18'\): .* unexpected keyword argument 'drop_rat'",
        ),
    ],
)
def test_what_is_refused_when_it_is_built(params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODELS.build("timm.resnet18", params)
