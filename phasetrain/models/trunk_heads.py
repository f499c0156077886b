"""A trunk with several heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.sections import HeadSection, part_parameters
from phasetrain.engine.batch import entry
from phasetrain.errors import did_you_mean, is_out_of_memory
from phasetrain.models.base import MODELS

MakeModel = Callable[[Mapping[str, Any], str, Mapping[str, Any]], nn.Module]
"""Makes a model of its name and parameters, of where in the config they stand, and of facts beside
those of the run."""


@dataclass(frozen=True)
class Wiring:
    """What a head gets.

    Attributes:
        layer: name of the module of the trunk whose output it takes; None takes that of the trunk.
        input: entry of the batch's inputs that the trunk is given; None gives it all of the input.
        pool: height and width to which its images are averaged; None leaves them.
        detach: its loss does not change the trunk.
    """

    layer: str | None = None
    input: str | None = None
    pool: int | None = None
    detach: bool = False


class Tap:
    """Keeps the output of a module of the trunk for the heads that take it.

    Args:
        layer: name of the module.
        taken: name -> output, filled in each pass.
    """

    def __init__(self, layer: str, taken: dict[str, Tensor]) -> None:
        self.layer = layer
        self.taken = taken

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Keep an output; a forward hook of torch."""
        self.taken[self.layer] = output


@MODELS.register("trunk_heads")
class TrunkHeads(nn.Module):
    """A trunk and heads on its output or on outputs of its layers: an input to a mapping of labels
    to outputs.

    Args:
        trunk: `name` of a model, its parameters, and `cut`: name of a module of it, such as its
            last layer, that is taken out.
        heads: label -> `name` of a model and its parameters; `from`: name of the module of the
            trunk whose output it takes; `input`: which entry of a mapping of inputs goes through
            the trunk for it; `pool`: images are averaged to so many rows and columns first;
            `detach`: whether its loss leaves the trunk alone (a probe).
        input_shape: shape of one sample, or of one entry of its inputs.
        make_model: fact; makes the models.

    Raises:
        ValueError: no heads, a module that the trunk does not have, or an output of it that no head
            can take; on a call: an entry that the input does not have.
    """

    def __init__(
        self,
        trunk: Mapping[str, Any],
        heads: Mapping[str, Mapping[str, Any]],
        input_shape: Sequence[int],
        make_model: MakeModel,
    ) -> None:
        super().__init__()
        if not heads:
            raise ValueError(
                "heads: expected at least one, such as heads: {digit: {name: mlp, hidden: []}}"
            )
        cut = trunk.get("cut")
        self.trunk = make_model(
            {key: one for key, one in trunk.items() if key != "cut"}, "MODEL.trunk", {}
        )
        if cut is not None:
            _check_layer(self.trunk, cut, "trunk.cut")
            self.trunk.set_submodule(cut, nn.Identity())
        self._wiring = {label: _wiring(section) for label, section in heads.items()}
        self._taken: dict[str, Tensor] = {}
        for label, one in self._wiring.items():
            if one.layer is not None:
                _check_layer(self.trunk, one.layer, f"heads.{label}.from")
        for layer in sorted({one.layer for one in self._wiring.values() if one.layer is not None}):
            self.trunk.get_submodule(layer).register_forward_hook(Tap(layer, self._taken))
        shapes = self._shapes(input_shape)
        self.heads = nn.ModuleDict()
        for label, section in heads.items():
            own = part_parameters(HeadSection, section)
            shape = shapes[label]
            facts = {"input_shape": shape} | ({"channels": shape[0]} if len(shape) == 3 else {})
            self.heads[label] = make_model(own, f"MODEL.heads.{label}", facts)

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return label -> output of each head; the trunk runs once for each entry of the input that
        a head asks for."""
        outputs: dict[str, Any] = {}
        for key in dict.fromkeys(one.input for one in self._wiring.values()):
            labels = [label for label, one in self._wiring.items() if one.input == key]
            features = self._features(entry(batch, key, f"MODEL.heads.{labels[0]}.input"), labels)
            outputs |= {label: self.heads[label](features[label]) for label in labels}
        return {label: outputs[label] for label in self._wiring}

    def _features(self, value: Any, labels: Sequence[str]) -> dict[str, Tensor]:
        """Return what each of some heads gets of one input."""
        if isinstance(value, Mapping):
            raise ValueError(  # noqa: TRY004 - the config is at fault
                f"the input has entries {', '.join(map(str, value))}; say with MODEL.heads.{labels[0]}.input which one "
                "goes through the trunk"
            )
        try:
            last = self.trunk(value)
            return {label: _fed(self._wiring[label], last, self._taken) for label in labels}
        finally:
            self._taken.clear()

    def _shapes(self, input_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of what each head gets of one sample, found by a pass of zeros through
        the trunk."""
        was = self.trunk.training
        self.trunk.eval()
        try:
            with torch.no_grad():
                features = self._features(torch.zeros(2, *input_shape), list(self._wiring))
        except (RuntimeError, IndexError, TypeError, KeyError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f"the trunk, after trunk.cut, does not take images of shape {tuple(input_shape)}: {error}"
            ) from error
        self.trunk.train(was)
        return {label: tuple(one.shape[1:]) for label, one in features.items()}


def _wiring(section: Mapping[str, Any]) -> Wiring:
    return Wiring(
        section.get("from"), section.get("input"), section.get("pool"), section.get("detach", False)
    )


def _fed(wiring: Wiring, last: Any, taken: Mapping[str, Tensor]) -> Tensor:
    value = last if wiring.layer is None else taken[wiring.layer]
    if not isinstance(value, Tensor):
        what = "the trunk" if wiring.layer is None else f"its module {wiring.layer}"
        raise TypeError(
            f"{what} gives a {type(value).__name__}, and a head takes a tensor; choose another by `from`"
        )
    if wiring.detach:
        value = value.detach()
    if wiring.pool is None:
        return value
    return functional.adaptive_avg_pool2d(value, wiring.pool)


def _check_layer(trunk: nn.Module, layer: str, where: str) -> None:
    names = [name for name, _ in trunk.named_modules() if name]
    if layer not in names:
        near = did_you_mean(layer, names)
        raise ValueError(
            f"{where} = {layer!r}: the trunk has no module of this name{near or '.'} It has: {names}"
        )
