"""Models of torchvision by name (`MODEL.name=torchvision.resnet18`)."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from phasetrain.addons.libraries.models.model_calls import OutputSelector, check_params
from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.models.base import MODELS

WEIGHTS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")
"""Parameters of torchvision that load weights."""


@MODELS.bridge("torchvision", "torchvision")
def find_torchvision_model(name: str) -> Factory[nn.Module] | None:
    """Return the factory of torchvision's model `name`; None if `name` is a path inside
    torchvision.

    Raises:
        UnknownNameError: torchvision has no such model.
    """
    from torchvision import models

    if "." in name:
        return None
    names = models.list_models()
    if name not in names:
        raise UnknownNameError(name, names)
    takes = inspect.signature(models.get_model_builder(name)).parameters
    # Some models download a backbone by default.
    without = {key: None for key in ("weights", "weights_backbone") if key in takes}

    def build(
        classes: int | None = None,
        output: str | None = None,
        pretrained: bool = False,  # noqa: FBT001, FBT002 - it is named in the config
        params: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Build a torchvision model, for images with 3 channels.

        Args:
            classes: `num_classes` of the model.
            output: name of the output for the loss, if there are several; None passes all by name.
            pretrained: rejected, see MODEL.weights.
            params: other parameters of the model.
        """
        facts = {} if classes is None else {"num_classes": classes}
        made: nn.Module = models.get_model(
            name, **without | facts | check_params(params, WEIGHTS, pretrained=pretrained)
        )
        made.register_forward_hook(OutputSelector(output))
        return made

    return build
