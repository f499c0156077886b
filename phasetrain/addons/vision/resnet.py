"""Residual networks for ImageNet, of any width."""

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from phasetrain.config.checks import check_at_least
from phasetrain.models.base import MODELS

LAYERS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""Depth -> number of blocks in each of the four layers."""


@MODELS.register("resnet")
def make_resnet(
    classes: int = 1000,
    channels: int = 3,
    depth: int = 50,
    width: int = 1,
    last_stride: int = 2,
    params: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A ResNet whose layers are all wider: images `(N, channels, H, W)` to scores `(N, classes)`.

    At width 1 it is torchvision's model (He et al. 2015, arXiv:1512.03385), and its weights always
    have the same names. Needs torchvision.

    Args:
        classes: number of outputs.
        channels: channels of the images.
        depth: 18, 34, 50, 101, 152 or 200.
        width: factor of all widths, also of the first convolution (Kolesnikov et al. 2019,
            arXiv:1901.09005).
        last_stride: stride of the last layer; 1 doubles the size of its feature maps.
        params: parameters of torchvision's ResNet: `groups`, `width_per_group`,
            `zero_init_residual`.

    Raises:
        ValueError: an unknown depth, a width below 1, or another stride than 1 and 2.
    """
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    check_at_least(1, width=width)
    if depth not in LAYERS:
        raise ValueError(f"depth = {depth}: expected one of {', '.join(map(str, LAYERS))}")
    if last_stride not in (1, 2):
        raise ValueError(f"last_stride = {last_stride}: expected 1 or 2")
    options = dict(params or {})
    block: Any = BasicBlock if depth < 50 else Bottleneck
    counts = LAYERS[depth]
    model: Any = ResNet(block, list(counts), num_classes=classes, **options)
    if (channels, width, last_stride) == (3, 1, 2):
        return cast(nn.Module, model)
    # Rebuilt with torchvision's own function, which takes the width before it from `inplanes`.
    inner = 64 * width
    model.inplanes = inner
    model.conv1 = nn.Conv2d(channels, inner, 7, stride=2, padding=3, bias=False)
    model.bn1 = nn.BatchNorm2d(inner)
    strides = (1, 2, 2, last_stride)
    make_layer = model._make_layer
    for at, (count, stride) in enumerate(zip(counts, strides, strict=True)):
        model.add_module(f"layer{at + 1}", make_layer(block, inner * 2**at, count, stride=stride))
    model.fc = nn.Linear(inner * 8 * block.expansion, classes)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if options.get("zero_init_residual") and isinstance(module, block):
            last: Any = module.bn2 if block is BasicBlock else module.bn3
            nn.init.zeros_(last.weight)
    return cast(nn.Module, model)
