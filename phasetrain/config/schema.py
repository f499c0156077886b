"""The keys of phasetrain: what `defaults.yaml` says about each one, read from the comments behind
the values."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import isfinite
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from omegaconf import OmegaConf

Resume = Literal["forbidden", "adjustable", "free"]

DEFAULTS = "defaults.yaml"

# Places where a name chooses a part, and the key that holds the name. `*` is one label or data
# split.
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "DATA.*": "dataset",
        "DATA.*.sampler": "name",
        "DATA.*.collate": "name",
        "DATA.*.loader": "name",
        "TASK": "name",
        "MODEL": "name",
        "LOSS": "name",
        "METERS.*": "name",
        "OPTIMIZER": "name",
        "OPTIMIZER.scaler": "name",
        "OPTIMIZER.SCHEDULES.*": "name",
        "OPTIMIZER.others.*": "name",
        "OPTIMIZER.others.*.SCHEDULES.*": "name",
        "DISTRIBUTED": "strategy",
        "HOOKS.*": "name",
    }
)
WORDS = (  # where a plain word stands for {name: word}
    "DATA.*.sampler",
    "DATA.*.collate",
    "DATA.*.loader",
    "OPTIMIZER.scaler",
    "OPTIMIZER.SCHEDULES.*",
    "OPTIMIZER.others.*.SCHEDULES.*",
)
# Mappings from a label to a part; null empties them.
LABELLED = ("METERS", "HOOKS", "OPTIMIZER.SCHEDULES", "OPTIMIZER.others")
FREE = (
    "HOOKS",
    "DISTRIBUTED",
)  # sections whose parts leave the trajectory alone, or its samples at least
STEERING = ("HOOKS.plateau",)  # hooks that do not watch alone: another one makes other weights
ROUNDING = (
    "DISTRIBUTED.param_dtype",
    "DISTRIBUTED.reduce_dtype",
)  # of fsdp: they change more than last bits
DEFAULT_NAMES = ("METERS.*", "HOOKS.*")  # where the label is the name unless one is given

_LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*?)(?:\s#\s*(?P<comment>.*))?$")
_NUMBER = re.compile(r"(?P<kind>int|float)(?P<bounds>(?: (?:and )?(?:>=|<=|>|<) \S+)*)$")
_BOUND = re.compile(r"(>=|<=|>|<) (\S+)")
_SPLIT = re.compile(r"[A-Z][A-Z0-9_]*$")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
)


@dataclass(frozen=True)
class ValueType:
    """What the value of a key may be, such as `int >= 1 or null`."""

    text: str
    tests: tuple[Callable[[Any], bool], ...]

    @classmethod
    def parse(cls, text: str) -> "ValueType":
        """Read the type column of a comment.

        Raises:
            ValueError: a word that is no type.
        """
        return cls(text, tuple(_test(alternative.strip()) for alternative in text.split(" or ")))

    def fits(self, value: Any) -> bool:
        """Tell whether `value` is one of the alternatives; an int is a float, a bool is no
        number."""
        return any(test(value) for test in self.tests)


@dataclass(frozen=True)
class Key:
    """One key of `defaults.yaml`.

    Attributes:
        path: dotted path, such as `DATA.TRAIN.batch_size`.
        type: what a value may be.
        resume: what happens when the value differs from the one a checkpoint was made with.
        meaning: the sentence about it, with its unit.
        default: the value in the file, plain lists and dicts.
    """

    path: str
    type: ValueType
    resume: Resume
    meaning: str
    default: Any


class Schema:
    """Every key with its type and class, and the same questions for paths that belong to parts.

    Args:
        text: YAML whose leaves are followed by `# type | class | meaning`.

    Raises:
        ValueError: a leaf without such a comment; the message has the line.
    """

    def __init__(self, text: str) -> None:
        self.defaults = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text)))
        self.keys: Mapping[str, Key] = MappingProxyType(
            {key.path: key for key in _keys(text, self.defaults)}
        )
        self.sections = tuple(self.defaults)

    def key(self, path: str) -> Key | None:
        """Return the key at a dotted path, or None; every split but DATA.TRAIN has the keys of
        DATA.TEST."""
        return self.keys.get(_as_known(path))

    def children(self, path: str) -> tuple[str, ...]:
        """Return the names of the keys and groups of keys right below a path, in order; `""` gives
        the sections."""
        node: Any = self.defaults
        for part in filter(None, _as_known(path).split(".")):
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            return tuple(node)
        return ()

    def problem(self, path: str, value: Any) -> str | None:
        """Return `expected int >= 1` when the value does not fit the key at `path`, None when it
        does or is no key."""
        key = self.key(path)
        if key is None or key.type.fits(value):
            return None
        return f"expected {key.type.text}"

    def resume(self, path: str) -> Resume:
        """Return the class for resume of any dotted path; parameters of parts are forbidden to
        change but in FREE."""
        section = path.partition(".")[0]
        if path in ROUNDING or any(path == one or path.startswith(f"{one}.") for one in STEERING):
            return "adjustable"
        while path and section != "HOOKS":
            key = self.key(path)
            if key is not None:
                return key.resume
            path = path.rpartition(".")[0]
        if section in FREE:
            return "free"
        return "forbidden"


@cache
def default_schema() -> Schema:
    """Return the schema of the package's own `defaults.yaml`."""
    return Schema(resources.files("phasetrain.config").joinpath(DEFAULTS).read_text("utf-8"))


@cache
def part_pattern(path: str) -> str | None:
    """Return the entry of `PARTS` that a dotted path is a place of, or None."""
    return next((pattern for pattern in PARTS if matches(path, pattern)), None)


def matches(path: str, pattern: str) -> bool:
    """Tell whether a dotted path fits a pattern in which `*` is one label; below DATA it is an
    upper-case split."""
    names = path.split(".")
    wanted = pattern.split(".")
    if len(names) != len(wanted) or any(
        w not in ("*", n) for n, w in zip(names, wanted, strict=True)
    ):
        return False
    return names[0] != "DATA" or len(names) < 2 or is_split(names[1])


def is_split(name: str) -> bool:
    """Tell whether a key of DATA is the name of a split: upper case."""
    return _SPLIT.match(name) is not None


def _as_known(path: str) -> str:
    names = path.split(".")
    if names[0] == "DATA" and len(names) > 1 and names[1] != "TRAIN" and is_split(names[1]):
        names[1] = "TEST"
    return ".".join(names)


def _keys(text: str, defaults: dict[str, Any]) -> Iterator[Key]:
    stack: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.match(line)
        if found is None:
            raise ValueError(
                f"{DEFAULTS}, line {number}: expected `key: value  # type | class | meaning`: {line!r}"
            )
        indent = len(found["indent"])
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, found["key"]))
        if found["value"].strip():
            names = [name for _, name in stack]
            yield _key(".".join(names), found["comment"] or "", _at(defaults, names), number)


def _key(path: str, comment: str, default: Any, number: int) -> Key:
    columns = [column.strip() for column in comment.split("|", 2)]
    if len(columns) != 3 or not all(columns) or columns[1] not in get_args(Resume):
        raise ValueError(
            f"{DEFAULTS}, line {number}: {path} needs `# type | {' or '.join(get_args(Resume))} | meaning`, "
            f"not {comment!r}"
        )
    try:
        kind = ValueType.parse(columns[0])
    except ValueError as error:
        raise ValueError(f"{DEFAULTS}, line {number}: {path}: {error}") from error
    if not kind.fits(default):
        raise ValueError(f"{DEFAULTS}, line {number}: {path} = {default!r} is not {kind.text}")
    return Key(path, kind, cast(Resume, columns[1]), columns[2], default)


def _at(node: Any, names: list[str]) -> Any:
    for name in names:
        node = node[name]
    return node


def _test(text: str) -> Callable[[Any], bool]:
    number = _NUMBER.match(text)
    if number is not None:
        return _number_test(
            int if number["kind"] == "int" else float, _BOUND.findall(number["bounds"])
        )
    if len(text) > 2 and text[0] == text[-1] == "'":
        return lambda value: isinstance(value, str) and value == text[1:-1]
    if text.startswith("list of "):
        item = _test(text.removeprefix("list of "))
        return lambda value: isinstance(value, list | tuple) and all(item(entry) for entry in value)
    if text == "null":
        return lambda value: value is None
    kinds: dict[str, Any] = {"bool": bool, "str": str, "list": list | tuple, "mapping": Mapping}
    if text not in kinds:
        raise ValueError(
            f"{text!r} is no type; known: int, float, null, 'a word', list of ..., {', '.join(kinds)}"
        )
    return lambda value: isinstance(value, kinds[text])


def _number_test(kind: type, bounds: list[tuple[str, str]]) -> Callable[[Any], bool]:
    allowed: Any = int if kind is int else int | float
    limits = [(_COMPARE[sign], float(bound)) for sign, bound in bounds]

    def test(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, allowed):
            return False
        if isinstance(value, float) and not isfinite(value):
            return False
        return all(compare(value, bound) for compare, bound in limits)

    return test
