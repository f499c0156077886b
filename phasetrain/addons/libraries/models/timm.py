"""Models of timm by name (`MODEL.name=timm.resnet18`)."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

from phasetrain.addons.libraries.models.model_calls import check_params
from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.models.base import MODELS

WEIGHTS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path")
"""Parameters of timm that load weights."""


@MODELS.bridge("timm", "timm")
def find_timm_model(name: str) -> Factory[nn.Module] | None:
    """Return the factory of timm's model `name`; None if `name` is a path inside a module of timm.

    Raises:
        UnknownNameError: timm has no such model.
    """
    import timm

    first, dot, _ = name.partition(".")
    # timm's own names contain dots too, before the tag of the weights, as in `resnet18.a1_in1k`.
    if dot and find_spec(f"timm.{first}") is not None:
        return None
    if not timm.is_model(name):
        raise UnknownNameError(name, timm.list_models())

    def build(
        classes: int | None = None,
        channels: int | None = None,
        pretrained: bool = False,  # noqa: FBT001, FBT002 - it is named in the config
        params: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Build a timm model.

        Args:
            classes: `num_classes` of the model.
            channels: `in_chans` of the model, the channels of the images.
            pretrained: rejected, see MODEL.weights.
            params: other parameters of `timm.create_model`, such as `drop_path_rate`.
        """
        facts = {"num_classes": classes, "in_chans": channels}
        arguments = {key: value for key, value in facts.items() if value is not None}
        made: nn.Module = timm.create_model(
            name, **arguments | check_params(params, WEIGHTS, pretrained=pretrained)
        )
        return made

    return build
