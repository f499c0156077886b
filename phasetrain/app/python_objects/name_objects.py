"""Names for classes and objects in a config from Python."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from os import PathLike
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from phasetrain.app.python_objects.split_loader import split_loader
from phasetrain.app.slots import list_slots
from phasetrain.config.addons import require_service
from phasetrain.config.objects import PREFIX, GivenObject, GivenObjects
from phasetrain.config.schema import matches
from phasetrain.config.sections.keys import join_path
from phasetrain.config.validation import PartLocation
from phasetrain.errors import ConfigError
from phasetrain.meters import Meter
from phasetrain.models.digest import hash_state

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass
class ObjectNamer:
    """Replaces classes and objects in a config by names.

    Attributes:
        objects: name -> object, for those that cannot be imported.
        notes: sentences about properties that no config records, see `GivenObjects`.
    """

    objects: dict[str, GivenObject] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def finish(self) -> GivenObjects:
        """Return the objects for `provide_objects`."""
        return GivenObjects(dict(self.objects), tuple(self.notes))

    def name_all(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config in which each class or object that is given for a part is a name.

        Classes and functions that can be imported get the name under which a file would name them;
        a section that is a class or an object, as in `{"MODEL": Net}`, is short for its name.

        Args:
            config: sections or dotted paths -> values, nested as in a file.
        """
        return {key: self._convert(value, key) for key, value in config.items()}

    def _convert(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str | PathLike):
            return value
        if isinstance(value, Mapping):
            return {
                key: self._convert(item, join_path(path, str(key))) for key, item in value.items()
            }
        slot = _find_slot(path)
        parent = _find_slot(path.rpartition(".")[0])
        if slot is not None and slot.path == "DATA.*" and isinstance(value, DataLoader):
            return self._convert(split_loader(value, path, self.notes), path)
        if slot is not None:
            # Schedulers of torch lack their optimizer: their class and parameters are a schedule.
            if isinstance(value, partial) and LRScheduler in getattr(value.func, "__mro__", ()):
                return self._convert({slot.key: value.func, **value.keywords}, path)
            name = self.name_part(value, slot, path)
            return name if slot.takes_bare_name else {slot.key: name}
        if parent is not None and path.endswith(f".{parent.key}"):
            return self.name_part(value, parent, path)
        if isinstance(value, list | tuple):
            # A stage has sections, as the config has.
            below = "" if path == "PHASES.stages" else f"{path}[]"
            return [self._convert(item, below) for item in value]
        return value  # no part belongs here: if it is not a plain value, the error names the key

    def name_part(self, value: Any, slot: PartLocation, key: str) -> str:
        """Return the name of a class, a function or an object that is given for a part.

        Raises:
            ConfigError: a module cannot be copied (code `config.uncopyable_object`).
        """
        is_factory = isinstance(value, type | FunctionType | BuiltinFunctionType | partial)
        if is_factory and not isinstance(value, partial):
            name: str | None = slot.registry.name_of(value)
            if name is not None:
                return name
        if slot.kind == "meter" and not is_factory and not isinstance(value, Meter):
            wrap = require_service("wrap_metric", "libraries", f"{key}: a metric of torchmetrics")
            value = wrap(value)
        return self._give(value, key, is_factory=is_factory)

    def _give(self, value: Any, key: str, *, is_factory: bool) -> str:
        named_object = GivenObject(
            value,
            key,
            is_factory=is_factory,
            is_copied=isinstance(value, nn.Module),
            facts=describe_object(value),
        )
        try:
            named_object.build()
        except Exception as error:
            raise ConfigError(
                f"{key}: {type(value).__name__} cannot be copied ({type(error).__name__}: {error}),"
                " and a run starts from a copy; give the class, and its parameters in "
                f"{key.partition('.')[0]}",
                code="config.uncopyable_object",
            ) from error
        base = f"{PREFIX}{describe_class(value)}"
        # Data is compared by its fingerprint, which RUN.allow=data lets change.
        if not key.startswith("DATA.") or is_factory:
            base = f"{base}-{sha256(_identify(value).encode()).hexdigest()[:8]}"
        name = base
        number = 1
        # Equal objects may still be two: a teacher of the same class has other weights.
        while name in self.objects and self.objects[name].value is not value:
            number += 1
            name = f"{base}#{number}"
        self.objects.setdefault(name, named_object)
        return name


def describe_class(value: Any) -> str:
    """Return the module and name of a class or function, or of the class of an object."""
    if isinstance(value, partial):
        return describe_class(value.func)
    if isinstance(value, Meter) and value.library_name:
        return value.library_name
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        value = type(value)
    return f"{value.__module__}.{value.__qualname__}"


def describe_object(value: Any) -> dict[str, Any]:
    """Return the record of an object in environment.json: its class, its text, and the digest of
    the weights of a module."""
    description = {"class": describe_class(value), "text": _ADDRESS.sub("", repr(value))}
    if isinstance(value, nn.Module) and value.state_dict():
        description["sha256"] = hash_state(_tensors(value))
    return description


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        key: tensor for key, tensor in module.state_dict().items() if isinstance(tensor, Tensor)
    }


def _identify(value: Any) -> str:
    """Return a text that is equal for objects that are the same part, in this process and in the
    next one.

    The weights of a module do not count: its initial weights may be drawn without a seed.
    """
    if isinstance(value, Meter):
        settings = vars(value).get("_metric", value)
        plain = {
            key: setting
            for key, setting in vars(settings).items()
            if isinstance(setting, int | float | str)
        }
        return str(plain)
    if isinstance(value, nn.Module):
        shapes = [
            (key, str(tensor.dtype), *tensor.shape) for key, tensor in _tensors(value).items()
        ]
        return f"{value!r} {shapes}"
    if isinstance(value, partial):
        return f"{_identify(value.func)} {value.args} {value.keywords}"
    if isinstance(value, FunctionType):
        return _identify_code(value.__code__)
    return _ADDRESS.sub("", repr(value))


def _identify_code(code: CodeType) -> str:
    constants = [
        _identify_code(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
    ]
    return f"{code.co_code.hex()} {constants} {code.co_names}"


def _find_slot(path: str) -> PartLocation | None:
    """Return the first slot at this path; a list of parts ends with `[]`."""
    return next((slot for slot in list_slots() if matches(path, slot.path)), None)
