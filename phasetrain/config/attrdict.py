"""Frozen, nested dictionaries with attribute access, as which code reads the config."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from phasetrain.config.nested import to_plain
from phasetrain.config.sections import (
    CheckpointSection,
    DataSection,
    DistributedSection,
    HooksSection,
    LaunchSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    PhasesSection,
    TaskSection,
)
from phasetrain.config.sections.keys import join_path
from phasetrain.config.sections.machine import DerivedMachineSection
from phasetrain.config.sections.run import DerivedRunSection
from phasetrain.errors import did_you_mean


class AttrDict(dict[str, Any]):
    """A read-only dict whose keys are attributes: `cfg.OPTIMIZER.lr`.

    Mappings inside become AttrDicts and lists become tuples, so nothing below can change either.

    Raises:
        AttributeError: an unknown key, with the near miss:
            `no 'lrr' in OPTIMIZER; did you mean 'lr'?`
        TypeError: any attempt to change it.
    """

    __slots__ = ("_path",)
    _path: str

    def __init__(self, content: Mapping[str, Any] | None = None, *, path: str = "") -> None:
        items = (content or {}).items()
        super().__init__({str(k): _frozen(v, join_path(path, str(k))) for k, v in items})
        # Not an ordinary assignment, which __setattr__ rejects.
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            location = self._path or "the config"
            raise AttributeError(f"no {name!r} in {location}{did_you_mean(name, self)}") from None

    def plain(self) -> dict[str, Any]:
        """Return a deep copy made of ordinary dicts and lists."""
        content: dict[str, Any] = to_plain(self)
        return content

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{self._path or 'the config'} is frozen; change it by an override or a config file"
        )

    __setitem__ = __delitem__ = __setattr__ = __delattr__ = _refuse
    # dict's methods in C do not call `__setitem__`, so each of them has to be replaced.
    clear = pop = popitem = setdefault = update = __ior__ = _refuse

    # The default protocol would restore the items one by one, which __setitem__ rejects.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(self), self._path)


class ConfigDict(AttrDict):
    """A complete config; mypy knows its sections and their keys."""

    if TYPE_CHECKING:
        RUN: DerivedRunSection
        DATA: DataSection
        TASK: TaskSection
        MODEL: ModelSection
        LOSS: LossSection
        METERS: Mapping[str, Any]
        OPTIMIZER: OptimizerSection
        PHASES: PhasesSection
        CHECKPOINT: CheckpointSection
        MACHINE: DerivedMachineSection
        DISTRIBUTED: DistributedSection
        LAUNCH: LaunchSection
        HOOKS: HooksSection


def _rebuild(content: dict[str, Any], path: str) -> AttrDict:
    return AttrDict(content, path=path)


def _frozen(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return AttrDict(value, path=path)
    if isinstance(value, list | tuple):
        return tuple(_frozen(v, f"{path}[{i}]") for i, v in enumerate(value))
    return value
