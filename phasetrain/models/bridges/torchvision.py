"""Models of torchvision by name (`MODEL.name=torchvision.resnet18`)."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.models.base import MODELS
from phasetrain.models.bridges.base import Selected, free

WEIGHTS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")
"""Parameters of torchvision that load weights."""


@MODELS.bridge("torchvision", "torchvision")
def torchvision_model(name: str) -> Factory[nn.Module] | None:
    """Return what makes torchvision's model `name`; None for what is the path of a module of
    torchvision.

    Raises:
        UnknownNameError: torchvision has no such model.
    """
    from torchvision import models

    if "." in name:
        return None
    known = models.list_models()
    if name not in known:
        raise UnknownNameError(name, known)
    takes = inspect.signature(models.get_model_builder(name)).parameters
    without = {key: None for key in ("weights", "weights_backbone") if key in takes}

    def build(
        classes: int | None = None,
        output: str | None = None,
        pretrained: bool = False,  # noqa: FBT001, FBT002 - it is named in the config
        params: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Return a model of torchvision; it takes images of 3 channels.

        Args:
            classes: its `num_classes`.
            output: name of the output for the loss, of a model that has several; None gives all of
                them by name.
            pretrained: refused, see MODEL.weights.
            params: what else the model takes.
        """
        facts = {} if classes is None else {"num_classes": classes}
        made: nn.Module = models.get_model(
            name, **without | facts | free(params, WEIGHTS, pretrained=pretrained)
        )
        made.register_forward_hook(Selected(output))
        return made

    return build
