"""How a key of the config is defined: once, as a field of the dataclass of its section."""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from phasetrain.config.sections.value_types import ValueType

Resume = Literal["forbidden", "adjustable", "free"]
"""Effect of a value that differs from the one in the checkpoint that a run resumes from.

forbidden: the resume is rejected, since it would not be the same run;
adjustable: the resume needs RUN.allow=KEY, and the change is printed and recorded;
free: the trajectory does not depend on the key.
"""

Scope = Literal["result", "run", "command", "machine"]
"""What a key is about.

result: bits of weights, metrics or logs may depend on it;
run: what a run does besides its results, such as saving checkpoints;
command: one command on a run folder; the next command on the folder does not inherit it;
machine: how a machine does the work, such as the number of data loading workers.

Only keys with the scope `result` change results: two runs whose other keys differ have equal bits.
"""

S = TypeVar("S")

if TYPE_CHECKING:

    class Section(Mapping[str, Any]):
        """Static view of a section: the attributes of its dataclass, and a read-only mapping.

        At run time a section of the config is an `AttrDict`, which also has the parameters of the
        part that the section names. Only mypy sees the two as one type, so that a misspelt key is
        an error wherever a section is read.
        """

        def __getitem__(self, key: str) -> Any: ...
        def __iter__(self) -> Iterator[str]: ...
        def __len__(self) -> int: ...

else:

    class Section:
        """Base of the dataclasses of sections."""


class Bounds(TypedDict, total=False):
    """Bounds of a number: at least (ge), above (gt), at most (le), below (lt)."""

    ge: float
    gt: float
    le: float
    lt: float


@dataclass(frozen=True)
class Key:
    """One key of the config.

    Attributes:
        path: dotted path, such as `DATA.TRAIN.batch_size`.
        type: type and bounds of its values.
        resume: effect of a changed value on resume.
        scope: result, run, command or machine.
        meaning: one sentence with the unit.
        default: default value, made of plain lists and dicts.
        fields: dataclass of the keys below it if the value is a mapping with known keys.
    """

    path: str
    type: ValueType
    resume: Resume
    scope: Scope
    meaning: str
    default: Any
    fields: Any = None


def key(
    default: Any,
    meaning: str,
    *,
    resume: Resume | None = None,
    scope: Scope = "result",
    fields: type | None = None,
    **bounds: Unpack[Bounds],
) -> Any:
    """Return the dataclass field of a key; the field gives its name and type.

    Args:
        default: value unless the config gives one.
        meaning: one sentence with the unit, for the reference and `--help`.
        resume: effect of a changed value on resume; only keys about the result have to say it,
            others are free.
        scope: result, run, command or machine.
        fields: dataclass of the keys below if the value is a mapping with known keys.
        bounds: bounds of numbers (`ge=1`).
    """
    assert resume or scope != "result", f"{meaning}: the effect of a change on a resume is missing"
    metadata = {
        "default": default,
        "meaning": meaning,
        "resume": resume or "free",
        "scope": scope,
        "fields": fields,
        "bounds": bounds,
    }
    # A complete config has tuples for lists, and dataclasses reject mutable defaults; the metadata
    # keeps the default as YAML has it, for the layers.
    if isinstance(default, list):
        return field(default=tuple(default), metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: type[S]) -> S:
    """Return the dataclass field of a group of keys, which are the fields of `kind`."""
    made: S = field(default_factory=kind, metadata={"group": kind})
    return made


def key_name(definition: "Field[Any]") -> str:
    """Return the name of a key in YAML: the name of its field, or `from` for `from_`."""
    return definition.name.removesuffix("_")


def join_path(path: str, name: str) -> str:
    """Return the dotted path of a key below `path`, which is empty for the root."""
    if path:
        return f"{path}.{name}"
    return name


def own_keys(section: type) -> frozenset[str]:
    """Return the names of a section's own keys; all others are parameters of the part it names."""
    return frozenset(key_name(definition) for definition in fields(section))


def define_key(definition: "Field[Any]", path: str) -> Key:
    """Return the key at `path` that a field of a section defines."""
    about = definition.metadata
    return Key(
        path,
        ValueType(definition.type, about["bounds"]),
        about["resume"],
        about["scope"],
        about["meaning"],
        about["default"],
        about["fields"],
    )


def walk_section(section: Any, path: str) -> Iterator[tuple[str, Key | None, Any]]:
    """Yield (dotted path, key, None) of each key directly below a section, and (dotted path, None,
    dataclass) of each group of keys."""
    for definition in fields(section):
        here = join_path(path, key_name(definition))
        below = definition.metadata.get("group")
        if below is None:
            yield here, define_key(definition, here), None
        else:
            yield here, None, below


def section_keys(section: Any, path: str) -> Mapping[str, Key]:
    """Return name -> key of the keys directly below a section at a dotted path, without groups."""
    return {
        here.rpartition(".")[2]: key
        for here, key, _ in walk_section(section, path)
        if key is not None
    }


def fits_section(section: Any, values: Mapping[str, Any]) -> bool:
    """Return whether a mapping has keys of a section only, each with a value of its type."""
    keys = section_keys(section, "")
    return all(name in keys and keys[name].type.fits(value) for name, value in values.items())


def read_section(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return a section of a checked config as its dataclass, or the keys of a section that have the
    names of another dataclass's fields; keys that it lacks have their default, and parameters of
    the part that the section names are left out."""
    read: dict[str, Any] = {}
    for definition in fields(kind):  # type: ignore[arg-type]
        name = key_name(definition)
        # Configs in old checkpoints lack keys that were added later.
        if name not in values:
            continue
        value = values[name]
        below = definition.metadata.get("group")
        if below is not None:
            value = read_section(below, value)
        read[definition.name] = value
    return kind(**read)


def part_parameters(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the part that a section names: all but the section's own keys."""
    own = own_keys(kind)
    return {name: value for name, value in values.items() if name not in own}
