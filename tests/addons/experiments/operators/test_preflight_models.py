"""Well-known models are traced, and those with operators of torch's list are named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasetrain.addons.experiments.operators.preflight import trace_passes

POOL = {"torch.nn.AdaptiveAvgPool2d"}
RESIZE = {"torch.nn.functional.interpolate"}


def torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        models = pytest.importorskip("torchvision.models")
        model: nn.Module = models.get_model(name, weights=None, **options)
        return model

    return make


def timm(name: str) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, pretrained=False)


def transformers(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = pytest.importorskip("transformers")
        model: nn.Module = getattr(library, kind)(getattr(library, config)(**options))
        return model

    return make


def total(output: Any) -> Tensor:
    """Return a sum over what a model returns."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.float().sum()


IMAGE = torch.zeros(2, 3, 64, 64)
LARGE = torch.zeros(2, 3, 224, 224)
TOKENS = torch.zeros(2, 8, dtype=torch.long)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_TEXT = {**SMALL, "intermediate_size": 32, "vocab_size": 50}

MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, set[str]]] = {
    "torchvision resnet18": (torchvision("resnet18"), IMAGE, set()),
    "torchvision densenet121": (torchvision("densenet121"), IMAGE, set()),
    "torchvision mobilenet_v3_small": (torchvision("mobilenet_v3_small"), IMAGE, set()),
    "torchvision efficientnet_b0": (torchvision("efficientnet_b0"), IMAGE, set()),
    "torchvision convnext_tiny": (torchvision("convnext_tiny"), IMAGE, set()),
    "torchvision swin_t": (torchvision("swin_t"), IMAGE, set()),
    "torchvision vit_b_16": (torchvision("vit_b_16"), LARGE, set()),
    "torchvision squeezenet1_1": (torchvision("squeezenet1_1"), IMAGE, set()),
    "torchvision alexnet": (torchvision("alexnet"), LARGE, POOL),
    "torchvision vgg11": (torchvision("vgg11"), IMAGE, POOL),
    "torchvision lraspp": (
        torchvision("lraspp_mobilenet_v3_large", weights_backbone=None),
        IMAGE,
        RESIZE,
    ),
    "torchvision fcn_resnet50": (
        torchvision("fcn_resnet50", weights_backbone=None),
        IMAGE,
        RESIZE,
    ),
    "timm resnet18": (timm("resnet18"), IMAGE, set()),
    "timm vit_tiny": (timm("vit_tiny_patch16_224"), LARGE, set()),
    "timm mixer_s16": (timm("mixer_s16_224"), LARGE, set()),
    "timm efficientnet_b0": (timm("efficientnet_b0"), IMAGE, set()),
    "timm convnext_atto": (timm("convnext_atto"), IMAGE, set()),
    "transformers bert": (transformers("BertModel", "BertConfig", **SMALL_TEXT), TOKENS, set()),
    "transformers llama": (
        transformers("LlamaModel", "LlamaConfig", num_key_value_heads=2, **SMALL_TEXT),
        TOKENS,
        set(),
    ),
    "transformers vit": (
        transformers("ViTModel", "ViTConfig", image_size=64, intermediate_size=32, **SMALL),
        IMAGE,
        set(),
    ),
}


@pytest.mark.feature("machine.no_kernel")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_is_traced_and_only_listed_operators_are_named(name: str) -> None:
    make, value, expected = MODELS[name]
    model = make()
    model.train()
    found = trace_passes(model, nn.Identity(), lambda fake: total(model(fake(value))))
    assert found.untraced == ""
    named = found.on_device("cuda", deterministic=False)
    assert {one.operation for one in named} == expected
    assert all(one.modules[0].startswith("MODEL") for one in named)
