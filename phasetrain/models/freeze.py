"""Frozen weights: for the whole run, per stage, or for the first updates."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first

MAX_LISTED = 12
"""Maximum number of names in an error."""

WHERE = "MODEL.freeze"
UPDATES = "MODEL.freeze_updates"


@dataclass(frozen=True)
class FrozenNames:
    """The parameters and modules that patterns select in a model.

    Attributes:
        parameters: names of parameters, as in the state dict.
        modules: names of modules that are frozen completely.
    """

    parameters: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    def __or__(self, other: "FrozenNames") -> "FrozenNames":
        """Return the union."""
        return FrozenNames(self.parameters | other.parameters, self.modules | other.modules)

    @property
    def outermost(self) -> list[str]:
        """The modules that are not inside another one of them."""
        return [
            name
            for name in sorted(self.modules)
            if not any(outer in self.modules for outer in _enclosing_modules(name))
        ]


NOTHING = FrozenNames()


def match_frozen(model: nn.Module, patterns: Sequence[str], where: str = WHERE) -> FrozenNames:
    """Return the parameters and modules of a model that patterns select.

    A pattern that matches a module selects everything inside it; a pattern that matches a parameter
    selects the parameter. A module is selected too if all its parameters are.

    Args:
        model: the model before it is wrapped.
        patterns: patterns (`*`, `?`, `[...]`) over names: `trunk`, `trunk.*`, `*.bias`.
        where: config path, for messages.

    Raises:
        ConfigError: a pattern selects no parameter; a suggestion is given.
    """
    # With duplicates: a shared module has several names, and a pattern may use any of them.
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    chosen: set[str] = set()
    inside: set[str] = set()
    for pattern in patterns:
        whole = {name for name in modules if fnmatchcase(name, pattern)}
        matches = {
            name
            for name in parameters
            if fnmatchcase(name, pattern)
            or any(outer in whole for outer in _enclosing_modules(name))
        }
        if not matches:
            raise ConfigError(
                _describe_no_match(where, pattern, modules, parameters), code="config.no_match"
            )
        chosen |= matches
        inside |= {
            name
            for name in modules
            if name in whole or any(outer in whole for outer in _enclosing_modules(name))
        }
    return freeze_names(model, chosen, inside)


def freeze_names(
    model: nn.Module, chosen: AbstractSet[str], inside: AbstractSet[str] = frozenset()
) -> FrozenNames:
    """Return frozen parameters with the modules that are frozen completely by them.

    Args:
        model: the model before it is wrapped.
        chosen: names of parameters.
        inside: names of modules that count as frozen in any case.
    """
    owned: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        for module in _enclosing_modules(name):
            owned.setdefault(module, []).append(name)
    # A module whose parameters are all frozen by patterns such as `trunk.*` counts as frozen too,
    # because its batch norms have to stop as well.
    full = {module for module, names in owned.items() if chosen >= set(names)}
    frozen_modules = {
        name
        for name, _ in model.named_modules(remove_duplicate=False)
        if name and (name in full or any(outer in full for outer in _enclosing_modules(name)))
    }
    return FrozenNames(frozenset(chosen), frozenset(inside | frozen_modules))


def disable_gradients(model: nn.Module, frozen: FrozenNames) -> None:
    """Set `requires_grad` to False for the frozen parameters, in place, so that no optimizer gets
    them."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen.parameters:
            parameter.requires_grad = False


def intersect_frozen(stages: Sequence[FrozenNames]) -> FrozenNames:
    """Return the names that are frozen in every stage."""
    first, *others = stages or (NOTHING,)
    return FrozenNames(
        first.parameters.intersection(*(frozen.parameters for frozen in others)),
        first.modules.intersection(*(frozen.modules for frozen in others)),
    )


class FreezeSchedule:
    """The weights that are frozen in each update, and the modules in eval mode meanwhile.

    A function of the update and the stage, so it needs no checkpoint. Frozen modules are in eval
    mode: batch norm keeps its statistics, and dropout is off.

    Args:
        model: the model before it is wrapped.
        stages: frozen names in each stage; a run without stages has one.
        until: pairs of frozen names and the number of updates for which they are frozen.
        tensors: id of a parameter -> its tensor in the optimizer; other parameters are in no
            optimizer.

    Raises:
        ConfigError: in some updates everything is frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[FrozenNames],
        until: Sequence[tuple[FrozenNames, int]] = (),
        tensors: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._model = model
        self._stages = tuple(stages) or (NOTHING,)
        self._until = sorted(until, key=lambda pair: pair[1])
        self._ends = tuple(sorted({updates for _, updates in until}))
        named = model.named_parameters(remove_duplicate=False)
        if tensors:
            self._tensors = {
                name: tensors[id(parameter)]
                for name, parameter in named
                if id(parameter) in tensors
            }
        else:
            self._tensors = {}
        self._held: list[Tensor] = []
        self._stage = 0
        self._first = 0
        self._end = 0.0
        self._check_trainable(tensors or {})

    def begin_stage(self, stage: int = 0) -> None:
        """Put the frozen modules of a stage in eval mode, after the model was put in training
        mode."""
        self._first = 0
        self._end = 0.0
        self._set_modes(self._stages[stage])

    def frozen_tensors(self, updates: int, stage: int = 0) -> Sequence[Tensor]:
        """Return the tensors of the optimizer that are frozen in an update, and set the modes of
        modules.

        Args:
            updates: number of updates attempted before this one.
            stage: stage of the plan.
        """
        # Called before every update; names are matched only if the frozen set may have changed.
        if stage != self._stage or not self._first <= updates < self._end:
            frozen = self.frozen_at(updates, stage)
            self._stage = stage
            self._held = self._select_tensors(frozen)
            self._first, self._end = self._find_constant_span(updates)
            # First everything back to training mode: modules frozen so far may not be frozen any
            # more.
            self._model.train()
            self._set_modes(frozen)
        return self._held

    def frozen_at(self, updates: int, stage: int = 0) -> FrozenNames:
        """Return the names that are frozen in an update of a stage."""
        names = self._stages[stage]
        for frozen, end in self._until:
            if updates < end:
                names = names | frozen
        return names

    def _find_constant_span(self, updates: int) -> tuple[int, float]:
        """Return the first and the end of the updates around this one with the same frozen
        names."""
        before = [end for end in self._ends if end <= updates]
        after = [end for end in self._ends if end > updates]
        return max(before, default=0), min(after, default=float("inf"))

    def _select_tensors(self, frozen: FrozenNames) -> list[Tensor]:
        # By identity, because tied parameters are one tensor under several names.
        tensors = {
            id(tensor): tensor
            for name, tensor in self._tensors.items()
            if name in frozen.parameters
        }
        return list(tensors.values())

    def _set_modes(self, frozen: FrozenNames) -> None:
        for name in frozen.outermost:
            # Frozen weights alone would not keep a module fixed: batch norm updates its statistics
            # without gradients, in training mode.
            self._model.get_submodule(name).eval()

    def _check_trainable(self, tensors: Mapping[int, Tensor]) -> None:
        trained = {id(tensor) for tensor in tensors.values()}
        for stage in range(len(self._stages)):
            # Update 0 is enough: the frozen set of a stage only shrinks with the updates.
            held = {id(tensor) for tensor in self._select_tensors(self.frozen_at(0, stage))}
            if trained and held >= trained:
                key = WHERE
                first = ""
                if self._ends:
                    key = UPDATES
                    first = f" for the first {self._ends[0]} updates"
                raise ConfigError(
                    f"{key} leaves nothing to train{first}: all {len(trained)} trainable "
                    "parameters are frozen; exclude at least one of them",
                    code="config.conflict",
                )


def _enclosing_modules(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module or parameter, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _describe_no_match(
    where: str, pattern: str, modules: Sequence[str], parameters: Sequence[str]
) -> str:
    near = did_you_mean(pattern.rstrip(".*"), [*modules, *parameters])
    outer = list(dict.fromkeys(name.split(".")[0] for name in parameters))
    return (
        f"{where} = [{pattern}]: it matches no module with parameters and no parameter"
        f"{near or '.'} Names begin with one of {join_first(outer, MAX_LISTED)}; a pattern is a "
        "whole name, in which `*`, `?` and `[...]` are wildcards"
    )
