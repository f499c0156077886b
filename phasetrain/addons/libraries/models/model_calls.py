"""Common parts of the bridges to model libraries: parameters, and the forms of inputs and
outputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from phasetrain.config.nested import to_plain
from phasetrain.config.registry import parameters
from phasetrain.errors import ConfigError, did_you_mean


def check_params(
    params: Mapping[str, Any] | None, refused: Iterable[str], *, pretrained: bool
) -> dict[str, Any]:
    """Return the extra parameters of a model.

    Args:
        params: parameters set in the config.
        refused: names of parameters that make the library load weights.
        pretrained: whether the config requests weights from the library.

    Raises:
        ConfigError: weights were requested.
    """
    checked: dict[str, Any] = to_plain(params or {})
    requested = [f"params.{name}" for name in refused if checked.get(name)]
    if pretrained:
        requested.append("pretrained")
    # A download would make the run depend on the network, and its ranks race for the same file.
    if requested:
        raise ConfigError(
            f"MODEL.{requested[0]}: no weights are downloaded while a run is built; save them to "
            "a file once, and set MODEL.weights to its path",
            code="config.download",
        )
    return checked


@dataclass(frozen=True)
class OutputSelector:
    """A forward hook that selects one of several outputs, or returns all of them as a dict.

    Args:
        name: name of the output; None keeps all.

    Raises:
        ConfigError: the model has no such output.
    """

    name: str | None

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the selected output; a tensor is returned unchanged."""
        if isinstance(output, Tensor):
            return output
        named = dict(output if isinstance(output, Mapping) else output._asdict())
        if self.name is None:
            return named
        if self.name not in named:
            near = did_you_mean(self.name, named) or "."
            raise ConfigError(
                f"MODEL.output = {self.name!r}: the model has no such output{near} "
                f"It has {', '.join(named)}; null passes all of them to the loss by name",
                code="config.unknown_value",
            )
        return named[self.name]


@dataclass(frozen=True)
class MappingSpreader:
    """A forward pre-hook that spreads a single mapping over the arguments of a model.

    Args:
        first: name of the first parameter, which stays positional: `PositionalSelector` tells the
            calls of tasks by it.
        accepted: names that the model or one of its modules takes; None allows all names.

    Raises:
        ConfigError: on a call: the mapping has another name.
    """

    first: str
    accepted: frozenset[str] | None = None

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the call."""
        # The library's models take input_ids and the like by keyword, and a batch has a single
        # input.
        if len(inputs) != 1 or not isinstance(inputs[0], Mapping):
            return inputs, keywords
        arguments = dict(inputs[0])
        # The models of transformers take **kwargs, and ignore a mask under another name.
        if self.accepted is not None:
            for name in arguments:
                if name not in self.accepted and name.removeprefix("decoder_") not in self.accepted:
                    raise ConfigError(
                        _describe_unknown_input(name, module, self.accepted), code="config.misfit"
                    )
        return (arguments.pop(self.first, None),), {**arguments, **keywords}


def _describe_unknown_input(name: str, module: nn.Module, accepted: Iterable[str]) -> str:
    own = [argument for argument in parameters(module.forward) if argument in accepted]
    near = did_you_mean(name, own)
    if name == "mask" and "attention_mask" in own:
        near = "; name the mask of padded batches with DATA.*.collate.mask=attention_mask."
    return (
        f"DATA.*.inputs: the batch has an input {name!r}, and {type(module).__name__} would ignore "
        f"it{near or '.'} It takes {', '.join(own)}"
    )


def list_input_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of `forward` of a model and of all its modules, to which it
    may pass arguments that it does not name itself."""
    kinds = {type(module) for module in model.modules()}
    return frozenset(name for module_class in kinds for name in parameters(module_class.forward))


@dataclass(frozen=True)
class PositionalSelector:
    """A forward hook that selects an output if the model was called with a positional argument.

    Args:
        select: selects the output.
    """

    select: OutputSelector

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], _keywords: dict[str, Any], output: Any
    ) -> Any:
        """Return the selected output, or all of them as the library made them."""
        if inputs:
            return self.select(module, inputs, output)
        return output
