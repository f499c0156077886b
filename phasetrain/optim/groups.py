"""Parameter groups by rule: options of the optimizer for some of the weights
(OPTIMIZER.groups)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import inf, isfinite
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first
from phasetrain.runtime.name_patterns import as_list

SELECTORS = ("match", "types", "max_ndim")
"""Keys of a rule that select weights."""

RULE_KEYS = (*SELECTORS, "lr_scale", "SCHEDULES")
"""Keys of a rule that are not options of the optimizer."""


@dataclass(frozen=True)
class Weight:
    """A trained parameter and its place in the model.

    Attributes:
        name: as in the model's state, such as `trunk.0.weight`.
        parameter: the parameter itself.
        kind: class name of the module that holds it.
    """

    name: str
    parameter: nn.Parameter
    kind: str


@dataclass
class Group:
    """Weights with the same options.

    Attributes:
        options: options that differ from the defaults of the optimizer.
        weights: in the order of the model.
        note: other common property, in words.
        schedules: option -> config path of its rule, and the schedule as in OPTIMIZER.SCHEDULES.
    """

    options: dict[str, Any]
    weights: list[Weight] = field(default_factory=list)
    note: str = ""
    schedules: dict[str, tuple[str, Any]] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        """Number of scalars."""
        return sum(weight.parameter.numel() for weight in self.weights)

    def to_param_group(self) -> dict[str, Any]:
        """Return the group as optimizers of torch take it."""
        return {"params": [weight.parameter for weight in self.weights], **self.options}


def list_weights(*modules: nn.Module, trained: bool = True) -> list[Weight]:
    """Return the parameters of modules that require a gradient, each once; with `trained` = false
    those that do not."""
    seen: set[int] = set()
    weights = []
    for module in modules:
        for path, part in module.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                # Tied weights have several names; an optimizer would step them once per name.
                if parameter.requires_grad is trained and id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = f"{path}.{name}" if path else name
                    weights.append(Weight(full, parameter, type(part).__name__))
    return weights


def group_weights(
    weights: Sequence[Weight],
    rules: Sequence[Mapping[str, Any]],
    *,
    lr: float,
    layer_decay: float | None = None,
    where: str = "OPTIMIZER.groups",
    frozen: Sequence[Weight] = (),
    schedules: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
) -> list[Group]:
    """Return the weights sorted into groups.

    Every rule that selects a weight adds its options, and later rules override earlier ones;
    `lr_scale` factors are multiplied. Weights with the same options form a group, and groups are in
    the order of their first weights.

    Args:
        weights: trained weights.
        rules: mappings with `match` (shell patterns over names), `types` (shell patterns over
            class names of modules) or `max_ndim` (maximum number of dimensions, 1 for biases and
            norms); a weight has to fit all that are given; `lr_scale`, a factor of the learning
            rate; `SCHEDULES` as in section OPTIMIZER; and options of the optimizer.
        lr: learning rate that factors multiply.
        layer_decay: factor between the learning rates of a layer and of the next layer; the last
            one has `lr` (Bao et al. 2022, arXiv:2106.08254). The entries of the longest list of
            modules are the layers; everything before the list is one more layer, everything after
            it is the last one.
        where: config path, for messages.
        frozen: weights that are not trained; a rule may select these alone.
        schedules: schedules of all groups, see `Group`.

    Raises:
        ConfigError: a rule selects nothing, or has no selector or no effect.
    """
    layers: dict[str, int] = {}
    if layer_decay is not None:
        layers = _layers(weights)
    last = max(layers.values(), default=0)
    selections = [
        select_weights(rule, weights, f"{where}[{number}]", frozen)
        for number, rule in enumerate(rules)
    ]
    groups: dict[str, Group] = {}
    for weight in weights:
        options: dict[str, Any] = {}
        own = dict(schedules)
        scale = 1.0
        if layer_decay is not None:
            scale = layer_decay ** (last - layers[weight.name])
        for number, (rule, names) in enumerate(zip(rules, selections, strict=True)):
            if weight.name in names:
                options |= {key: value for key, value in rule.items() if key not in RULE_KEYS}
                scale *= rule.get("lr_scale", 1.0)
                for option, schedule in (rule.get("SCHEDULES") or {}).items():
                    own[option] = (f"{where}[{number}]", schedule)
        if scale != 1.0:
            options["lr"] = options.get("lr", lr) * scale
        groups.setdefault(
            # `repr` as the key, because options may be lists, which cannot be hashed.
            repr([sorted(values.items(), key=lambda item: item[0]) for values in (options, own)]),
            Group(options, schedules=own),
        ).weights.append(weight)
    return list(groups.values())


def check_options(groups: Sequence[Group], optimizer: Optimizer, where: str = "OPTIMIZER") -> None:
    """Reject options that the optimizer does not have, which torch would silently ignore.

    Raises:
        ConfigError: there is one; a suggestion is given.
    """
    options = [
        name
        for name in optimizer.defaults
        # Not suggested: kernels are chosen once for the whole optimizer.
        if name not in ("params", "differentiable", "fused", "foreach")
    ]
    for group in groups:
        for name in group.options.keys() - optimizer.defaults.keys():
            raise ConfigError(
                f"{where}.groups: {name} = {group.options[name]!r}: the optimizer has no such "
                f"option{did_you_mean(name, options) or '.'} It has {', '.join(options)}"
            )
        for name, (rule, _) in group.schedules.items():
            if name not in optimizer.defaults:
                raise ConfigError(
                    f"{rule}.SCHEDULES.{name}: the optimizer has no such option"
                    f"{did_you_mean(name, options) or '.'} It has {', '.join(options)}",
                    code="config.unknown_option",
                )
        for name, value in group.options.items():
            usual = optimizer.defaults[name]
            number = isinstance(usual, int | float) and not isinstance(usual, bool)
            wrong = (
                isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value)
            )
            if number and (wrong or (value < 0 and usual >= 0)):
                raise ConfigError(
                    f"{where}.groups: {name} = {value!r}: expected a number of at least 0"
                )


def tabulate(groups: Sequence[Group]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each group: its options, how many weights, how many scalars, and the first
    few names."""
    for group in groups:
        options = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in group.options.items()
        )
        names = join_first((weight.name for weight in group.weights), 3)
        scheduled = [f"{option} with its own schedule" for option in group.schedules]
        parts = (options or "defaults", *scheduled, group.note)
        options = ", ".join(part for part in parts if part)
        yield options, str(len(group.weights)), f"{group.entries:,}", names


def split_by_note(groups: Sequence[Group], notes: Mapping[int, str]) -> list[Group]:
    """Return groups in which all weights have the same note.

    Fused kernels of torch require that all weights of a group make their first update together.

    Args:
        groups: as `group_weights` returns them.
        notes: id of a parameter -> its note, for parameters that have one.
    """
    split: list[Group] = []
    for group in groups:
        parts: dict[str, Group] = {}
        for weight in group.weights:
            note = notes.get(id(weight.parameter), "")
            part = replace(group, options=dict(group.options), weights=[], note=note)
            parts.setdefault(note, part).weights.append(weight)
        split += parts.values()
    return split


def select_weights(
    rule: Mapping[str, Any], weights: Sequence[Weight], where: str, frozen: Sequence[Weight] = ()
) -> set[str]:
    """Return the names of the weights that a rule selects.

    Raises:
        ConfigError: the rule selects none, also none of the frozen ones, or has no selector or no
            effect.
    """
    if not any(key in rule for key in SELECTORS):
        raise ConfigError(
            f"{where} = {dict(rule)}: expected one of {', '.join(SELECTORS)}, which select weights"
        )
    if not any(key not in SELECTORS for key in rule):
        raise ConfigError(
            f"{where} = {dict(rule)}: the rule selects weights and sets nothing for them; add "
            "lr_scale or an option of the optimizer, such as weight_decay: 0.0"
        )
    _check_types(rule, where)
    # A rule for biases or for the trunk is right for the experiment, although adapters or
    # MODEL.freeze leave none of these weights to train.
    if not any(_chooses(rule, weight) for weight in weights) and any(
        _chooses(rule, weight) for weight in frozen
    ):
        return set()
    for pattern in as_list(rule.get("match", [])):
        names = [weight.name for weight in weights]
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = dict.fromkeys(
                part for name in names for part in (*_around(name), *name.split("."))
            )
            near = did_you_mean(pattern.strip("*."), parts)
            raise ConfigError(
                f"{where}.match = {pattern!r} matches none of the {len(names)} trained "
                f"weights{near or f': {join_first(names, 12)}'}"
            )
    kinds = {weight.kind for weight in weights}
    for type_name in as_list(rule.get("types", [])):
        if not any(fnmatchcase(kind, type_name) for kind in kinds):
            listed = ", ".join(sorted(kinds))
            raise ConfigError(
                f"{where}.types = {type_name!r}{did_you_mean(type_name, kinds) or ':'} modules "
                f"with weights are {listed}"
            )
    selected = {weight.name for weight in weights if _chooses(rule, weight)}
    if not selected:
        raise ConfigError(f"{where} = {dict(rule)}: no weight fits all selectors of the rule")
    return selected


def _around(name: str) -> Iterator[str]:
    """Yield the names of a weight and of the modules around it, the innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _check_types(rule: Mapping[str, Any], where: str) -> None:
    """Reject invalid values of a rule; `check_options` checks the options of the optimizer."""
    for key in ("match", "types"):
        value = rule.get(key, "")
        if not isinstance(value, str) and not (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(item, str) for item in value)
        ):
            raise ConfigError(f"{where}.{key} = {value!r}: expected a string or a list of strings")
    schedules = rule.get("SCHEDULES") or {}
    if not isinstance(schedules, Mapping):
        raise ConfigError(
            f"{where}.SCHEDULES = {schedules!r}: expected a mapping from options to schedules, as "
            "in {lr: cosine}"
        )
    dimensions = rule.get("max_ndim", 0)
    scale = rule.get("lr_scale", 1.0)
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions < 0:
        raise ConfigError(f"{where}.max_ndim = {dimensions!r}: expected int >= 0")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < inf:
        raise ConfigError(f"{where}.lr_scale = {scale!r}: expected float >= 0")


def _chooses(rule: Mapping[str, Any], weight: Weight) -> bool:
    for key, name in (("match", weight.name), ("types", weight.kind)):
        if key in rule and not any(fnmatchcase(name, pattern) for pattern in as_list(rule[key])):
            return False
    return "max_ndim" not in rule or weight.parameter.ndim <= rule["max_ndim"]


def _layers(weights: Sequence[Weight]) -> dict[str, int]:
    """Return the number of the layer that each weight is in."""
    lists: dict[str, set[int]] = {}
    for weight in weights:
        parts = weight.name.split(".")
        for index, part in enumerate(parts):
            if part.isdigit():
                lists.setdefault(".".join(parts[:index]), set()).add(int(part))
    # Of lists with the same length the outer one, whose name is shorter: blocks, not the parts of a
    # block.
    prefix = max(lists, key=lambda path: (len(lists[path]), -len(path)), default=None)
    layers = {}
    latest = 0
    # The model itself may be the list: its children then have no prefix.
    start = f"{prefix}." if prefix else ""
    for weight in weights:
        if prefix is not None and weight.name.startswith(start):
            rest = weight.name[len(start) :].split(".")[0]
            if rest.isdigit():
                latest = 1 + sorted(lists[prefix]).index(int(rest))
                layers[weight.name] = latest
                continue
        # Weights are in the order of the model: what comes before the list is the stem, later the
        # head.
        layers[weight.name] = 0 if latest == 0 else len(lists[prefix or ""]) + 1
    return layers
