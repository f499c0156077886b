"""What the bridges to libraries of models have in common: parameters, and the forms of inputs and
outputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from phasetrain.errors import ConfigError, did_you_mean


def plain(value: Any) -> Any:
    """Return a value of the config made of dicts and lists that a library may change."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def free(
    params: Mapping[str, Any] | None, refused: Iterable[str], *, pretrained: bool
) -> dict[str, Any]:
    """Return the free parameters of a model.

    Args:
        params: what the config sets.
        refused: names that make the library load weights.
        pretrained: whether the config asks the library for weights.

    Raises:
        ConfigError: weights were asked for.
    """
    found: dict[str, Any] = plain(params or {})
    asked = [f"params.{name}" for name in refused if found.get(name)] + (
        ["pretrained"] if pretrained else []
    )
    if asked:
        raise ConfigError(
            f"MODEL.{asked[0]}: no weights are downloaded while a run is built; save them to a file once, and name it "
            "in MODEL.weights"
        )
    return found


@dataclass(frozen=True)
class Selected:
    """A forward hook that leaves one of several outputs, or all of them as a dict.

    Args:
        name: of the output; None keeps all.

    Raises:
        ConfigError: the model has no such output.
    """

    name: str | None

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the output of that name; a tensor stays as it is."""
        if isinstance(output, Tensor):
            return output
        named = dict(output if isinstance(output, Mapping) else output._asdict())
        if self.name is None:
            return named
        if self.name not in named:
            raise ConfigError(
                f"MODEL.output = {self.name!r}: the model has no such output{did_you_mean(self.name, named) or '.'} "
                f"It has {', '.join(named)}; null gives the loss all of them by name"
            )
        return named[self.name]


def by_keywords(
    _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a model's call with an input that is a mapping spread over
    keywords."""
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return (), {**inputs[0], **keywords}
    return inputs, keywords
