"""A trunk with several heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.addons.vision.pooling import Pooling, make_pooling
from phasetrain.addons.vision.sections import HeadSection
from phasetrain.config.sections import part_parameters
from phasetrain.engine.batch import entry
from phasetrain.errors import did_you_mean, is_out_of_memory
from phasetrain.models.base import MODELS
from phasetrain.runtime.format import join_first

MakeModel = Callable[[Mapping[str, Any], str, Mapping[str, Any]], nn.Module]
"""Builds a model from its section, the config path of the section, and additional facts."""


@dataclass(frozen=True)
class HeadInput:
    """The input of a head.

    Attributes:
        layers: names of the trunk modules whose outputs it takes, concatenated along the second
            dimension; empty takes the output of the trunk.
        input: entry of the batch input that is passed to the trunk; None passes everything.
        norm: name of the trunk module that each output goes through first.
        pool: pooling of each output; None does not pool.
        detach: whether the loss of the head does not affect the trunk.
    """

    layers: tuple[str, ...] = ()
    input: str | None = None
    norm: str | None = None
    pool: Pooling | None = None
    detach: bool = False


class OutputTap:
    """A forward hook that keeps the output of a trunk module for the heads.

    Args:
        layer: name of the module.
        taken: name -> output, filled in each forward pass.
    """

    def __init__(self, layer: str, taken: dict[str, Tensor]) -> None:
        self.layer = layer
        self.taken = taken

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Keep the output."""
        self.taken[self.layer] = output


@MODELS.register("trunk_heads")
class TrunkHeads(nn.Module):
    """A trunk and heads on its output or on outputs of its layers; returns a mapping of labels to
    outputs.

    Args:
        trunk: `name` of a model, its parameters, and `cut`: name of a module, such as the last
            layer, that is replaced by an identity.
        heads: label -> `name` of a model and its parameters; `from`: name of the trunk module whose
            output it takes, or several, whose outputs are concatenated; `norm`: module of the trunk
            that each output goes through first; `input`: entry of a mapping of inputs that goes
            through the trunk for it; `pool`: see `make_pooling`; `detach`: whether its loss has no
            effect on the trunk (a probe).
        input_shape: shape of one sample, or of one entry of its inputs.
        make_model: fact; builds the models.

    Raises:
        ValueError: there are no heads, the trunk lacks a module, or a head cannot take an output;
            on a call: the input lacks an entry.
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
                "heads = {}: expected at least one, such as heads: {digit: {name: mlp, hidden: []}}"
            )
        self.trunk = build_trunk(trunk, make_model)
        self._inputs = {label: _read_head_input(section, label) for label, section in heads.items()}
        self._taken: dict[str, Tensor] = {}
        for label, head_input in self._inputs.items():
            for layer in head_input.layers:
                check_layer(self.trunk, layer, f"heads.{label}.from")
            if head_input.norm is not None:
                check_layer(self.trunk, head_input.norm, f"heads.{label}.norm")
        # One hook per layer, even if several heads take its output.
        for layer in sorted(
            {layer for head_input in self._inputs.values() for layer in head_input.layers}
        ):
            self.trunk.get_submodule(layer).register_forward_hook(OutputTap(layer, self._taken))
        shapes = self._measure_shapes(input_shape)
        self.heads = nn.ModuleDict()
        for label, section in heads.items():
            own = part_parameters(HeadSection, section)
            shape = shapes[label]
            facts = {"input_shape": shape} | ({"channels": shape[0]} if len(shape) == 3 else {})
            self.heads[label] = make_model(own, f"MODEL.heads.{label}", facts)

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return label -> output of each head; the trunk runs once per requested entry of the
        input. In eval mode, heads whose entry the input lacks are left out, unless all are."""
        outputs: dict[str, Any] = {}
        keys = list(dict.fromkeys(head_input.input for head_input in self._inputs.values()))
        if not self.training and isinstance(batch, Mapping):
            # A test split may have fewer entries than the training data.
            keys = [key for key in keys if key is None or key in batch] or keys
        for key in keys:
            labels = [
                label for label, head_input in self._inputs.items() if head_input.input == key
            ]
            features = self._compute_features(
                entry(batch, key, f"MODEL.heads.{labels[0]}.input"), labels
            )
            outputs |= {label: self.heads[label](features[label]) for label in labels}
        # In the order of the config, not in the order of the passes through the trunk.
        return {label: outputs[label] for label in self._inputs if label in outputs}

    def list_mistakes(self) -> list[str]:
        """Return a sentence if no head trains the trunk, and batches change its statistics."""
        if not all(head_input.detach for head_input in self._inputs.values()):
            return []
        norms = [
            name
            for name, module in self.trunk.named_modules()
            # MODEL.freeze of a whole module puts it into eval mode.
            if isinstance(getattr(module, "running_mean", None), Tensor)
            and any(weight.requires_grad for weight in module.parameters())
        ]
        if not norms:
            return []
        return [
            "MODEL.heads: all heads have detach: true, so nothing trains the trunk, but it is in "
            "training mode, and batches change the running statistics of "
            f"{join_first(norms, 4)}; MODEL.freeze=[trunk] keeps the trunk as it is"
        ]

    def _compute_features(self, value: Any, labels: Sequence[str]) -> dict[str, Tensor]:
        """Return the inputs of some heads for one input of the trunk."""
        if isinstance(value, Mapping):
            raise ValueError(  # noqa: TRY004 - the config is at fault
                f"the input has entries {', '.join(map(str, value))}; set "
                f"MODEL.heads.{labels[0]}.input to the entry for the trunk"
            )
        try:
            last = self.trunk(value)
            taken = dict(self._taken)
            return {label: self._select_input(self._inputs[label], last, taken) for label in labels}
        finally:
            # Outputs hold the graph of the step; keeping them would keep its memory.
            self._taken.clear()

    def _select_input(self, wanted: HeadInput, last: Any, taken: Mapping[str, Tensor]) -> Tensor:
        """Return the input of a head.

        Args:
            wanted: input of the head.
            last: output of the trunk.
            taken: name of a module -> its output.
        """
        values = {"the trunk": last}
        if wanted.layers:
            values = {f"its module {layer}": taken[layer] for layer in wanted.layers}
        pooled = []
        for what, value in values.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{what} returns a {type(value).__name__}, and a head takes a tensor; choose "
                    "another module with `from`"
                )
            if wanted.norm is not None:
                value = self.trunk.get_submodule(wanted.norm)(value)
            if wanted.detach:
                # Detached here and not in the trunk: other heads may train the trunk from the same
                # output.
                value = value.detach()
            pooled.append(value if wanted.pool is None else wanted.pool(value))
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)

    def _measure_shapes(self, input_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of one sample of the input of each head, from a pass of zeros through
        the trunk."""
        was = self.trunk.training
        self.trunk.eval()
        try:
            with torch.no_grad():
                # Two samples, because some layers drop a first dimension of 1.
                features = self._compute_features(torch.zeros(2, *input_shape), list(self._inputs))
        except (RuntimeError, IndexError, TypeError, ValueError, KeyError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f"the trunk, after trunk.cut, rejects samples of shape {tuple(input_shape)}: "
                f"{error}"
            ) from error
        self.trunk.train(was)
        return {label: tuple(feature.shape[1:]) for label, feature in features.items()}


def _read_head_input(section: Mapping[str, Any], label: str) -> HeadInput:
    layers = section.get("from") or ()
    if isinstance(layers, str):
        layers = (layers,)
    pool = section.get("pool")
    if pool is not None:
        pool = make_pooling(pool, f"heads.{label}.pool")
    return HeadInput(
        tuple(layers),
        section.get("input"),
        section.get("norm"),
        pool,
        section.get("detach", False),
    )


def check_layer(trunk: nn.Module, layer: str, where: str) -> None:
    """Raise ValueError unless the trunk has a module of this name."""
    names = [name for name, _ in trunk.named_modules() if name]
    if layer not in names:
        near = did_you_mean(layer, names) or "."
        raise ValueError(
            f"{where} = {layer!r}: the trunk has no module of this name{near} "
            f"It has {join_first(names, 12)}"
        )


def build_trunk(section: Mapping[str, Any], make_model: MakeModel) -> nn.Module:
    """Return the trunk of MODEL.trunk, with the module that `cut` names replaced by an identity.

    Raises:
        ValueError: the trunk has no such module.
    """
    trunk = make_model(
        {key: value for key, value in section.items() if key != "cut"}, "MODEL.trunk", {}
    )
    if (cut := section.get("cut")) is not None:
        check_layer(trunk, cut, "trunk.cut")
        trunk.set_submodule(cut, nn.Identity())
    return trunk
