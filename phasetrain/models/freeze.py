"""Which weights of a model do not learn, in the whole run or in some of it (MODEL.freeze,
MODEL.freeze_updates)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first

SHOWN = 12
"""Names that an error lists."""

WHERE = "MODEL.freeze"
UPDATES = "MODEL.freeze_updates"


@dataclass(frozen=True)
class Frozen:
    """What patterns choose of a model.

    Attributes:
        parameters: names of parameters, as in the model's state.
        modules: names of modules that are frozen as a whole, with all that is inside them.
    """

    parameters: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    def __or__(self, other: "Frozen") -> "Frozen":
        """Return what one of the two has."""
        return Frozen(self.parameters | other.parameters, self.modules | other.modules)

    @property
    def outermost(self) -> list[str]:
        """The modules that are inside no other one of them."""
        return [
            name
            for name in sorted(self.modules)
            if not any(one in self.modules for one in _around(name))
        ]


NOTHING = Frozen()


def frozen_names(model: nn.Module, patterns: Sequence[str], where: str = WHERE) -> Frozen:
    """Return the parameters and modules of a model that patterns choose.

    A pattern that fits the name of a module chooses everything inside it; one that fits the name of
    a parameter chooses that. A module whose parameters are all chosen is chosen too.

    Args:
        model: as it is before it is wrapped.
        patterns: over names (`*`, `?`, `[...]`): `trunk`, `trunk.*`, `*.bias`.
        where: config path, for messages.

    Raises:
        ConfigError: a pattern that chooses no parameter; near misses are named.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    chosen: set[str] = set()
    inside: set[str] = set()
    for pattern in patterns:
        whole = {name for name in modules if fnmatchcase(name, pattern)}
        found = {
            name
            for name in parameters
            if fnmatchcase(name, pattern) or any(one in whole for one in _around(name))
        }
        if not found:
            raise ConfigError(_nothing(where, pattern, modules, parameters))
        chosen |= found
        inside |= {
            name for name in modules if name in whole or any(one in whole for one in _around(name))
        }
    owned: dict[str, list[str]] = {}
    for name in parameters:
        for module in _around(name):
            owned.setdefault(module, []).append(name)
    full = {module for module, names in owned.items() if chosen.issuperset(names)}
    inside |= {
        name for name in modules if name in full or any(one in full for one in _around(name))
    }
    return Frozen(frozenset(chosen), frozenset(inside))


def freeze(model: nn.Module, frozen: Frozen) -> None:
    """Let parameters of a model require no gradient, in place: no optimizer will hold them."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen.parameters:
            parameter.requires_grad = False


def of_all(stages: Sequence[Frozen]) -> Frozen:
    """Return what is frozen in every one of several stages."""
    first, *others = stages or (NOTHING,)
    return Frozen(
        first.parameters.intersection(*(one.parameters for one in others)),
        first.modules.intersection(*(one.modules for one in others)),
    )


class Holds:
    """Which weights are held where they are in an update, and which modules are in test mode
    meanwhile.

    A function of the update and the stage, so no checkpoint has to keep it. What is frozen is in
    test mode: batch norm keeps its statistics, dropout drops nothing.

    Args:
        model: as it is before it is wrapped.
        stages: what is frozen in each stage; the whole run is one where it has no others.
        until: pairs of what is frozen and the number of updates for which it is.
        tensors: id of a parameter of the model -> the tensor in its place in the optimizer; those
            missing are in none.

    Raises:
        ConfigError: there are updates in which everything is held.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Frozen],
        until: Sequence[tuple[Frozen, int]] = (),
        tensors: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._model = model
        self._stages = tuple(stages) or (NOTHING,)
        self._until = sorted(until, key=lambda pair: pair[1])
        self._ends = tuple(sorted({updates for _, updates in until}))
        named = model.named_parameters(remove_duplicate=False)
        if tensors:
            self._tensors = {name: tensors[id(one)] for name, one in named if id(one) in tensors}
        else:
            self._tensors = {}
        self._held: list[Tensor] = []
        self._stage = 0
        self._first = 0
        self._end = 0.0
        self._refuse_all(tensors or {})

    def begin(self, stage: int = 0) -> None:
        """Put what is frozen in a stage in test mode, after the model was put in training mode."""
        self._first = 0
        self._end = 0.0
        self._set_modes(self._stages[stage])

    def at(self, updates: int, stage: int = 0) -> Sequence[Tensor]:
        """Return the optimizer's tensors that are held in an update, and set the modes of modules
        for it.

        Args:
            updates: of the run that were attempted before this one.
            stage: of the plan.
        """
        if stage != self._stage or not self._first <= updates < self._end:
            frozen = self.frozen_at(updates, stage)
            self._stage = stage
            self._held = self._tensors_of(frozen)
            self._first, self._end = self._same_around(updates)
            self._model.train()
            self._set_modes(frozen)
        return self._held

    def frozen_at(self, updates: int, stage: int = 0) -> Frozen:
        """Return what is frozen in an update of a stage."""
        found = self._stages[stage]
        for frozen, end in self._until:
            if updates < end:
                found = found | frozen
        return found

    def _same_around(self, updates: int) -> tuple[int, float]:
        """Return the updates from which on and up to which the same is held as in this one."""
        before = [end for end in self._ends if end <= updates]
        after = [end for end in self._ends if end > updates]
        return max(before, default=0), min(after, default=float("inf"))

    def _tensors_of(self, frozen: Frozen) -> list[Tensor]:
        found = {id(one): one for name, one in self._tensors.items() if name in frozen.parameters}
        return list(found.values())

    def _set_modes(self, frozen: Frozen) -> None:
        for name in frozen.outermost:
            self._model.get_submodule(name).eval()

    def _refuse_all(self, tensors: Mapping[int, Tensor]) -> None:
        trained = {id(one) for one in tensors.values()}
        for stage in range(len(self._stages)):
            held = {id(one) for one in self._tensors_of(self.frozen_at(0, stage))}
            if trained and held >= trained:
                first = f" for the first {self._ends[0]} updates" if self._ends else ""
                raise ConfigError(
                    f"{UPDATES if self._ends else WHERE} leaves nothing to train{first}: all {len(trained)} trained "
                    "parameters are held; leave at least one of them out"
                )


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module or parameter, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _nothing(where: str, pattern: str, modules: Sequence[str], parameters: Sequence[str]) -> str:
    near = did_you_mean(pattern.rstrip(".*"), [*modules, *parameters])
    outer = list(dict.fromkeys(name.split(".")[0] for name in parameters))
    return (
        f"{where} = [{pattern}]: no module with parameters and no parameter of the model has such a name{near or '.'} "
        f"It begins with one of {join_first(outer, SHOWN)}"
    )
