"""Models of transformers, built from a config without a download."""

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from phasetrain.addons.libraries.models.model_calls import (
    MappingSpreader,
    OutputSelector,
    PositionalSelector,
    check_params,
    list_input_names,
)
from phasetrain.config.nested import leaves
from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.models.base import MODELS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OF_ALL = ("num_labels", "attn_implementation")
"""Settings that every config class accepts without listing them."""

OF_A_HUB = ("hf-hub:", "hf_hub:")
"""Prefixes of models that timm, which some models of transformers use, gets from a hub."""


@MODELS.bridge("transformers", "transformers")
def find_transformers_model(name: str) -> Factory[nn.Module] | None:
    """Return the factory of the transformers class `name`; None if `name` is a path inside
    transformers.

    Raises:
        UnknownNameError: transformers has no such model class.
    """
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass
    from transformers.utils.generic import TransformersKwargs

    if "." in name:
        return None
    names = dir(transformers)  # listing is cheap: a class is imported on first access
    model_class: Any = attrgetter(name)(transformers) if name in names else None
    is_auto = inspect.isclass(model_class) and issubclass(model_class, _BaseAutoModelClass)
    if not is_auto and not (
        inspect.isclass(model_class) and issubclass(model_class, transformers.PreTrainedModel)
    ):
        raise UnknownNameError(
            name,
            (
                class_name
                for class_name in names
                if "For" in class_name or class_name.endswith("Model")
            ),
        )

    def build(
        config: Mapping[str, Any] | None = None,
        classes: int | None = None,
        output: str | None = "logits",
        pretrained: bool = False,  # noqa: FBT001, FBT002 - it is named in the config
    ) -> nn.Module:
        """Build a transformers model with initial weights.

        Called with one positional argument, as tasks do, it returns `output`; a mapping is passed
        as keyword arguments. Called with keywords, as `generate` and other code of the library do,
        it returns the same as without phasetrain.

        Args:
            config: config of the model, as in its config.json; Auto classes need `model_type`.
            classes: `num_labels` of the model.
            output: name of the output for the loss; null passes all of them by name.
            pretrained: rejected, see MODEL.weights.
        """
        settings = check_params(config, (), pretrained=pretrained)
        model_type = settings.pop("model_type", None)
        if is_auto:
            made_of = _make_auto_config(model_type, settings, classes)
        else:
            made_of = _make_config(model_class.config_class, settings, classes)
        made: nn.Module = model_class.from_config(made_of) if is_auto else model_class(made_of)
        first = next(iter(inspect.signature(made.forward).parameters))
        accepted = list_input_names(made) | TransformersKwargs.__annotations__.keys()
        made.register_forward_pre_hook(MappingSpreader(first, accepted), with_kwargs=True)
        made.register_forward_hook(PositionalSelector(OutputSelector(output)), with_kwargs=True)
        return made

    return build


def _make_auto_config(
    kind: Any, settings: Mapping[str, Any], classes: int | None
) -> "PretrainedConfig":
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = sorted(CONFIG_MAPPING)
    if kind not in kinds:
        near = did_you_mean(kind, kinds) if isinstance(kind, str) else ""
        near = near or "; use for example bert, gpt2 or vit"
        raise ConfigError(
            f"MODEL.config.model_type = {kind!r}: transformers has no such type of model{near}",
            code="config.unknown_value",
        )
    return _make_config(CONFIG_MAPPING[kind], settings, classes)


def _make_config(
    kind: type["PretrainedConfig"], settings: Mapping[str, Any], classes: int | None
) -> "PretrainedConfig":
    """Return a config of a class.

    Raises:
        ConfigError: the class does not have a setting, which it would silently keep, or rejects a
            value.
    """
    names = [*kind().to_dict(), *kind.attribute_map, *OF_ALL]
    for key in settings:
        if key not in names:
            near = did_you_mean(key, names) or "."
            raise ConfigError(
                f"MODEL.config.{key}: {kind.__name__} has no such setting{near} "
                f"It has {', '.join(sorted(names))}",
                code="config.unknown_key",
            )
    _reject_downloads(settings)
    facts = {} if classes is None else {"num_labels": classes}
    try:
        return kind(**{**facts, **settings})
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"MODEL.config: {kind.__name__} rejects it: {reason}") from error


def _reject_downloads(settings: Mapping[str, Any]) -> None:
    """Reject kernels and models of a hub: transformers would download and execute the former.

    Raises:
        ConfigError: there is one, at any depth.
    """
    for path, value in leaves(settings, "MODEL.config").items():
        if not isinstance(value, str):
            continue
        # `OWNER/NAME` instead of the name of an implementation is a kernel.
        if value.startswith(OF_A_HUB) or ("implementation" in path and "/" in value):
            raise ConfigError(
                f"{path} = {value!r}: it is on a hub, and no code or model is downloaded while a "
                "run is built; use what is installed, such as sdpa or eager for "
                "attn_implementation",
                code="config.download",
            )
