"""Options of a command, declared once: as the fields of a frozen dataclass.

    @dataclass(frozen=True)
    class VerifyOptions:
        segments: int | None = option(None, "number of segments", metavar="N")

`add_options` declares the flag `--segments N` from it, and `read_options` makes the object from the
parsed flags.
"""

import argparse
from collections.abc import Collection
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar, get_type_hints

from phasetrain.config.sections.value_types import read_shape

T = TypeVar("T")


def option(default: Any, meaning: str | None, *, flag: str = "", **settings: Any) -> Any:
    """Return the dataclass field of an option.

    The type of the field says how the flag is given: a bool is set by the flag alone, the flag of a
    tuple may be given several times, and a Literal lists the choices.

    Args:
        default: value without the flag; `dataclasses.MISSING` if the flag is required.
        meaning: text in `--help`; None: none.
        flag: the flag; by default the name of the field, `--batch-size` for `batch_size`.
        settings: further arguments of `ArgumentParser.add_argument`, such as `metavar`.
    """
    if default is MISSING:
        settings["required"] = True
    else:  # argparse appends to a copy of a list
        settings["default"] = list(default) if isinstance(default, tuple) else default
    return field(default=default, metadata={"flag": flag, "help": meaning, **settings})


def add_options(
    parser: argparse.ArgumentParser, options: type, *, exclusive: Collection[str] = ()
) -> None:
    """Declare the options that the fields of a dataclass define.

    Args:
        parser: of the command.
        options: the dataclass; fields without `option` are no flags.
        exclusive: names of fields; at most one of them may be given.
    """
    # argparse cannot format a group without flags.
    group = parser.add_mutually_exclusive_group() if exclusive else parser
    types = get_type_hints(options)
    for definition in fields(options):
        name = definition.name
        settings = dict(definition.metadata)
        if settings:
            flag = settings.pop("flag") or f"--{name.replace('_', '-')}"
            settings |= {"dest": name, **_describe_type(types[name])}
            (group if name in exclusive else parser).add_argument(flag, **settings)


def read_options(options: type[T], flags: argparse.Namespace) -> T:
    """Return the options that a command line gives; others have their default."""
    names = {
        definition.name
        for definition in fields(options)  # type: ignore[arg-type]
        if definition.metadata
    }
    return options(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(flags).items()
            if name in names
        }
    )


def _describe_type(annotation: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that follow from the type of a field."""
    form, plain, args = read_shape(annotation)
    if form == "union":  # with None
        return _describe_type(args[0])
    if form == "choice":
        return {"choices": args}
    if form == "list":
        return {"action": "append"}
    if form == "number":
        return {"type": plain}
    return {"action": "store_true"} if plain is bool else {}
