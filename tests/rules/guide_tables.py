"""Tables of the guides for people who move over: what another framework has, and its counterpart.

The first cell of a row names what the other framework has, as code. The second one is the
counterpart: code that phasetrain has, or `none` and what to do instead. Understood as code are

- keys of the config and parameters of parts: `PHASES.epochs`, `HOOKS.early_stopping.patience`;
- keys with a value, which has to be valid: `OPTIMIZER.name=adamw`, `MODEL.ema={decay: 0.99}`;
- parts: `mixup`; events: `on_step`; methods and attributes: `Meter.compute`, `run.stop`;
- commands and flags: `phasetrain plan`, `--restart`; files of a run folder: `metrics.jsonl`;
- names of phasetrain and torch that can be imported: `phasetrain.fit`, `torch.compile`.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from types import MappingProxyType
from typing import Any

from test_docs import blocks

from phasetrain.app.slots import list_slots
from phasetrain.cli.help_command import general_help
from phasetrain.cli.table import list_commands
from phasetrain.config.compose.composed import compose
from phasetrain.config.registry import parameters
from phasetrain.config.schema import DEFAULT_NAMES, default_schema, matches
from phasetrain.config.validation import PartLocation, check_config
from phasetrain.errors import ConfigError

ROOT = Path(__file__).parents[2]

Row = tuple[str, ...]

CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "Batch": "phasetrain.engine.batch.Batch",
        "Hook": "phasetrain.hooks.Hook",
        "Meter": "phasetrain.meters.Meter",
        "Run": "phasetrain.hooks.Run",
        "RunResult": "phasetrain.RunResult",
        "StepOutput": "phasetrain.engine.batch.StepOutput",
        "Task": "phasetrain.tasks.Task",
        "engine": "phasetrain.engine.loop.PhaseEngine",
        "hook": "phasetrain.hooks.Hook",
        "phase": "phasetrain.engine.plan.Phase",
        "result": "phasetrain.RunResult",
        "run": "phasetrain.hooks.Run",
        "state": "phasetrain.engine.position.RunState",
        "task": "phasetrain.tasks.Task",
        "updater": "phasetrain.optim.Updater",
        "world": "phasetrain.distributed.World",
    }
)
"""Word before the dot -> the class whose methods and attributes may follow."""

_CODE = re.compile(r"`([^`]+)`")
_KEY = re.compile(r"[A-Z][A-Z_]*(\.[\w@]+)*(=.*)?")
_SEPARATOR = re.compile(r"\|(\s*:?-+:?\s*\|)+")


def read_table(page: Path, heading: str) -> list[Row]:
    """Return the rows of the tables below a heading of a page, up to the next heading, without
    their head lines.

    Args:
        heading: text of the heading, without the number signs.
    """
    lines = page.read_text("utf-8").splitlines()
    headings = [n for n, line in enumerate(lines) if re.match(r"#+ ", line)]
    starts = [n for n in headings if lines[n].lstrip("#").strip() == heading]
    assert len(starts) == 1, f"{page.name} has {len(starts)} headings {heading!r}, expected one"
    end = next((n for n in headings if n > starts[0]), len(lines))
    section = lines[starts[0] : end]
    heads = {n - 1 for n, line in enumerate(section) if _SEPARATOR.fullmatch(line.strip())}
    return [
        tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])
        for n, line in enumerate(section)
        if line.startswith("|") and n not in heads and n - 1 not in heads
    ]


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks of a page that have a file name, as its readers do."""
    for block in blocks(page.read_text("utf-8")):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def code_spans(cell: str) -> list[str]:
    """Return the pieces of code in a cell."""
    return _CODE.findall(cell)


def compare_names(rows: Iterable[Row], expected: Iterable[str]) -> list[str]:
    """Return what is wrong with the names in the first cells: names that are missing, that the
    other framework does not have, and that are listed twice. A cell may have several."""
    found = Counter(name for row in rows for name in code_spans(row[0]))
    wanted = set(expected)
    return [
        *(f"no row for {name}" for name in sorted(wanted - found.keys())),
        *(f"{name} does not exist there" for name in sorted(found.keys() - wanted)),
        *(f"{name} has {count} rows" for name, count in sorted(found.items()) if count > 1),
    ]


def check_counterparts(rows: Iterable[Row]) -> list[str]:
    """Return what is wrong with the second cells: code that phasetrain does not have, and a cell
    that has neither code nor a reason. In further cells, keys of the config are checked."""
    return [problem for row in rows for problem in _check_row(row)]


def _check_row(row: Row) -> Iterator[str]:
    if len(row) < 2:
        yield f"{row[0]}: no counterpart"
        return
    name, counterpart = row[0], row[1]
    spans = code_spans(counterpart)
    if not spans and not re.match(r"none\b", counterpart):
        yield f"{name}: {counterpart!r} has no code; expected some, or `none` and a reason"
    if re.fullmatch(r"none\W*", counterpart) and not any(row[2:]):
        yield f"{name}: none without a reason"
    remarks = [span for cell in row[2:] for span in code_spans(cell)]
    for span in [*spans, *(span for span in remarks if _is_key(span))]:
        if not exists(span):
            yield f"{name}: phasetrain has no `{span}`"


def exists(span: str) -> bool:
    """Return whether phasetrain has what a piece of code names."""
    if _is_key(span):
        path, equals, _ = span.partition("=")
        return _has_key(path) and (not equals or _is_valid(span))
    word, _, rest = span.partition(" ")
    if word == "phasetrain":
        return _is_command(rest)
    if word in ("torchrun", "python"):
        return "phasetrain" in rest
    if word.startswith("--"):
        return word in general_help("", None)
    name = re.sub(r"\(.*\)$", "", span)  # a call
    if "." not in name:
        return (
            _is_class(name)
            or any(name in slot.registry for slot in list_slots())
            or _is_event(name)
        )
    return _is_member(name) or _is_file(name) or _can_import(name)


def _is_key(span: str) -> bool:
    section = re.split(r"[.=]", span, maxsplit=1)[0]
    return bool(_KEY.fullmatch(span)) and section in default_schema().sections


def _has_key(path: str) -> bool:
    """Return whether a path is a key, a group of keys, a part by its label, or a parameter of a
    part."""
    if default_schema().has(path) or path == "HOOKS":
        return True
    place, _, last = path.rpartition(".")
    return any(
        _has_label(slot, path) or (matches(place, slot.path) and _has_parameter(slot, place, last))
        for slot in list_slots()
    )


def _has_label(slot: PartLocation, path: str) -> bool:
    """Return whether a path is the place of a part whose label may be chosen, or names it."""
    if not matches(path, slot.path):
        return False
    return slot.path not in DEFAULT_NAMES or path.rpartition(".")[2] in slot.registry


def _has_parameter(slot: PartLocation, place: str, name: str) -> bool:
    label = place.rpartition(".")[2]
    if slot.path in DEFAULT_NAMES and label in slot.registry:
        return name in parameters(slot.registry[label]) or name in slot.own_keys
    factories: list[Callable[..., Any]] = list(slot.registry.values())
    return name in slot.own_keys or any(name in parameters(one) for one in factories)


def _is_valid(override: str) -> bool:
    """Return whether a config with this override has no mistake at its key."""
    path = override.partition("=")[0]
    try:
        check_config(compose([override]), list_slots(), default_schema())
    except ConfigError as error:
        # Another part in the place of one of the defaults may need more keys than this one.
        return not any(f"{problem.key}.".startswith(f"{path}.") for problem in error.problems)
    return True


def _is_command(words: str) -> bool:
    """Return whether the words after `phasetrain` begin with a command, a flag or a key."""
    first = words.partition(" ")[0]
    names = {name for command in list_commands() for name in command.name.split()[:1]}
    if first in names or not first or first.endswith(".yaml"):
        return True
    return exists(first)


def _is_class(name: str) -> bool:
    return name[:1].isupper() and name in CLASSES


def _is_event(name: str) -> bool:
    return (name.startswith("on_") or name == "close") and _has_attribute(CLASSES["Hook"], name)


def _is_member(name: str) -> bool:
    """Return whether a name such as `Task.forward` or `run.state.updates` is one of phasetrain."""
    owner, _, rest = name.partition(".")
    if owner not in CLASSES:
        return False
    first, _, more = rest.partition(".")
    if not _has_attribute(CLASSES[owner], first):
        return False
    return not more or first not in CLASSES or _is_member(f"{first}.{more}")


@cache
def _has_attribute(path: str, name: str) -> bool:
    """Return whether objects of a class have an attribute, from the texts of its classes."""
    owner = _import(path)
    if getattr_static(owner, name, None) is not None:
        return True
    texts = [
        inspect.getsource(one) for one in owner.__mro__ if one.__module__.startswith("phasetrain.")
    ]
    return any(
        re.search(rf"(\bself\.{name}\b.*=|^    {name}\b ?[:=])", text, re.M) for text in texts
    )


def _is_file(name: str) -> bool:
    """Return whether a name is that of a file in a run folder, according to the page on runs."""
    page = (ROOT / "docs" / "runs.md").read_text("utf-8")
    return bool(re.fullmatch(r"[\w-]+\.[a-z]+", name)) and f"`{name}`" in page


def _can_import(name: str) -> bool:
    if name.partition(".")[0] not in ("phasetrain", "torch"):
        return False
    try:
        _import(name)
    except (ImportError, AttributeError):
        return False
    return True


def _import(path: str) -> Any:
    """Return what a dotted path names."""
    names: Sequence[str] = path.split(".")
    for split in range(len(names), 0, -1):
        try:
            found = import_module(".".join(names[:split]))
        except ModuleNotFoundError:
            continue
        for name in names[split:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)
