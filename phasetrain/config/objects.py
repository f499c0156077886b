"""Objects given in Python: a config names one as `object:CLASS-DIGEST`, and this process holds it.

So a model, a dataset or a metric that exists already goes through the same registries, checks and
builders as a part that is named in a file.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from phasetrain.errors import ConfigError

PREFIX = "object:"
"""Prefix of names that stand for an object of this process."""


@dataclass(frozen=True)
class GivenObject:
    """An object that a config names.

    Attributes:
        value: the object.
        key: the first config key that names it.
        is_factory: whether `value` makes the part, such as a class defined in a function; otherwise
            it is the part.
        is_copied: whether each build gets a copy: a module that one build has trained must not be
            the initial state of the next.
        facts: its record, as JSON data.
    """

    value: Any
    key: str = ""
    is_factory: bool = False
    is_copied: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Return the part, or a copy of it."""
        if self.is_copied:
            return deepcopy(self.value)
        return self.value


@dataclass(frozen=True)
class GivenObjects:
    """The objects of a call, by name, and other facts about it that a config cannot hold.

    Attributes:
        by_name: name with the prefix -> object.
        notes: sentences about the parts of the call that no config records.
    """

    by_name: Mapping[str, GivenObject] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# Per thread, as each call of the Python API has its own objects.
_NONE = GivenObjects()
_CURRENT: ContextVar[GivenObjects] = ContextVar("given objects", default=_NONE)


@dataclass(frozen=True)
class ObjectFactory:
    """Returns a given object, without parameters; it holds the name only, because signatures of
    factories are cached.

    Args:
        name: name with the prefix.
        key: config key with the name, for messages.
    """

    name: str
    key: str

    def __call__(self) -> Any:
        """Return the object, or a copy of it."""
        return _look_up(self.name, self.key).build()


@contextmanager
def provide_objects(objects: GivenObjects) -> Iterator[None]:
    """Let configs name these objects."""
    token = _CURRENT.set(objects)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_objects() -> GivenObjects:
    """Return the objects that configs can name at present."""
    return _CURRENT.get()


def is_object_name(name: object) -> bool:
    """Return whether a value of a config names a given object."""
    return isinstance(name, str) and name.startswith(PREFIX)


def display_name(name: str) -> str:
    """Return the name of a part as people read it: of a given object the name of its class."""
    if not is_object_name(name):
        return name
    path = re.sub(r"(-[0-9a-f]{8})?(#\d+)?$", "", name.removeprefix(PREFIX))
    return path.rpartition(".")[2]


def find_object(name: str, key: str) -> Callable[..., Any]:
    """Return the callable that makes the object with this name.

    Raises:
        ConfigError: this process has no such object (code `config.missing_object`).
    """
    entry = _look_up(name, key)
    if entry.is_factory:
        factory: Callable[..., Any] = entry.value
        return factory
    return ObjectFactory(name, key)


def _look_up(name: str, key: str) -> GivenObject:
    objects = _CURRENT.get().by_name
    if name not in objects:
        raise ConfigError(
            f"{key} = {name!r}: this part was given as an object in Python, and only the program "
            "that made it can build it again; run that program (the same call of phasetrain.fit "
            "or phasetrain.run resumes the run), or read the weights with "
            "phasetrain.load(folder, model=...)",
            code="config.missing_object",
        )
    return objects[name]
