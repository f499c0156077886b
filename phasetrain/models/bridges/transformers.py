"""Models of transformers, built from a config without any download
(`MODEL.name=transformers.AutoModel...`)."""

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.models.base import MODELS
from phasetrain.models.bridges.base import Selected, by_keywords, free

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OF_ALL = ("num_labels", "attn_implementation")
"""Settings of every config that it does not list among its own."""


@MODELS.bridge("transformers", "transformers")
def transformers_model(name: str) -> Factory[nn.Module] | None:
    """Return what makes a model of the class `name` of transformers; None for the path of a module
    of transformers.

    Raises:
        UnknownNameError: transformers has no such class of models.
    """
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    if "." in name:
        return None
    names = dir(transformers)  # classes are imported when they are asked for
    found: Any = attrgetter(name)(transformers) if name in names else None
    is_auto = inspect.isclass(found) and issubclass(found, _BaseAutoModelClass)
    if not is_auto and not (
        inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    ):
        raise UnknownNameError(
            name, (one for one in names if "For" in one or one.endswith("Model"))
        )

    def build(
        config: Mapping[str, Any] | None = None,
        classes: int | None = None,
        output: str | None = "logits",
        pretrained: bool = False,  # noqa: FBT001, FBT002 - it is named in the config
    ) -> nn.Module:
        """Return a model of transformers with initial weights.

        It is called with the input, or with the tensors of an input that is a mapping by their
        names.

        Args:
            config: of the model, as in its config.json; `model_type` is needed where the name
                begins with Auto.
            classes: its `num_labels`.
            output: name of the output for the loss; null gives all of them by name.
            pretrained: refused, see MODEL.weights.
        """
        settings = free(config, (), pretrained=pretrained)
        kind = settings.pop("model_type", None)
        if is_auto:
            made_of = _config(kind, settings, classes)
        else:
            made_of = _config_of(found.config_class, settings, classes)
        made: nn.Module = found.from_config(made_of) if is_auto else found(made_of)
        made.register_forward_pre_hook(by_keywords, with_kwargs=True)
        made.register_forward_hook(Selected(output))
        return made

    return build


def _config(kind: Any, settings: Mapping[str, Any], classes: int | None) -> "PretrainedConfig":
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = sorted(CONFIG_MAPPING)
    if kind not in kinds:
        near = (
            did_you_mean(kind, kinds) if isinstance(kind, str) else ""
        ) or "; take one such as bert, gpt2, vit"
        raise ConfigError(
            f"MODEL.config.model_type = {kind!r}: transformers has no such type of model{near}"
        )
    return _config_of(CONFIG_MAPPING[kind], settings, classes)


def _config_of(
    kind: type["PretrainedConfig"], settings: Mapping[str, Any], classes: int | None
) -> "PretrainedConfig":
    """Return a config of a class.

    Raises:
        ConfigError: a setting that the class does not have, which it would keep without a word, or
            of a wrong value.
    """
    known = [*kind().to_dict(), *kind.attribute_map, *OF_ALL]
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"MODEL.config.{key}: {kind.__name__} has no such setting{did_you_mean(key, known) or '.'} "
                f"It has {', '.join(sorted(known))}"
            )
    facts = {} if classes is None else {"num_labels": classes}
    try:
        return kind(**{**facts, **settings})
    except Exception as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"MODEL.config: {kind.__name__} does not take it: {told}") from error
