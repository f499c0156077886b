"""Write the tables of the documentation that are generated from the code.

    python tools/docs_tables.py

A table is between the lines `<!-- table: NAME -->` and `<!-- end of table -->` of a page; the rest
of the page is written by hand.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from feature_table import list_features

from phasetrain.app.setup import list_slots
from phasetrain.config.addons import AddOn, import_object, load_addons
from phasetrain.config.parts import REGISTRIES
from phasetrain.config.problems import format_value
from phasetrain.config.registry import parameters
from phasetrain.config.sections import HooksSection, own_keys
from phasetrain.config.validation import PartLocation
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import RunState
from phasetrain.hooks.base import OPENING_EVENTS, Hook, Run
from phasetrain.hooks.dispatch import EVENTS

ROOT = Path(__file__).parents[1]

_ASKED = re.compile(r'(?:find_service|require_service|_find)\(\s*"(\w+)"')
"""A call that asks for a service."""

_PACKAGE_NAME = re.compile(r"\b(?:\w+\.)+(?=[A-Za-z_])")
"""The module in the name of a type."""

_TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def fill_tables(page: str) -> str:
    """Return a page with its tables written again.

    Raises:
        KeyError: there is no table of this name.
    """
    return _TABLE.sub(lambda match: f"{match[1]}{list_tables()[match[2]]()}\n{match[3]}", page)


@cache
def list_tables() -> dict[str, partial[str]]:
    """Return the functions that write the tables, by name."""
    own = {addon.name: addon for addon in list_own_addons()}
    tables = {
        "features": partial(_render_features, is_numbered=True),
        "further features": partial(_render_features, is_numbered=False),
        "hooks": partial(_render_hooks),
        "events of hooks": partial(_render_events),
        "add-ons": partial(_render_addons, list(own.values())),
        "services": partial(_render_services),
    }
    for documented in (Batch, Phase, Run, RunState, StepOutput):
        tables[f"attributes of {documented.__name__}"] = partial(_render_attributes, documented)
    return tables | {f"add-on {name}": partial(_render_addon, own[name]) for name in own}


def list_own_addons() -> list[AddOn]:
    """Return the add-ons that come with phasetrain."""
    return [addon for addon in load_addons() if addon.package == "phasetrain"]


def _render_features(*, is_numbered: bool) -> str:
    """Return the table of the features with a number, or of all others."""
    features = [item for item in list_features(ROOT) if item.is_numbered == is_numbered]
    heads = ("row" if is_numbered else "name", "feature", "key or API", "test")
    return _format_table(heads, [feature.row for feature in features])


def _render_hooks() -> str:
    """Return the table of the hooks of phasetrain and its add-ons."""
    slot = _find_slot("hook")
    owners = {
        name: addon.name for addon in list_own_addons() for name in addon.parts.get("hook", ())
    }
    defaults = own_keys(HooksSection).union(
        *(_list_keys(addon, "HOOKS") for addon in list_own_addons())
    )
    rows = []
    for name, factory in slot.registry.items():
        if factory.__module__.startswith("phasetrain."):
            mark = " *" if name in defaults else ""
            link = f"[{owners[name]}](addons/{owners[name]}.md)" if name in owners else ""
            rows.append(
                (f"`{name}`{mark}", _list_parameters(slot, name), _summarize(factory), link)
            )
    return _format_table(("name", "parameters", "effect", "add-on"), rows)


def _render_events() -> str:
    """Return the table of the events of hooks, with their signatures."""
    rows = []
    for name in (*EVENTS, "close"):
        event = vars(Hook)[name]
        order = "forward" if name in OPENING_EVENTS else "reverse"
        signature = inspect.signature(event)
        parameters = list(signature.parameters.values())[1:]
        text = _PACKAGE_NAME.sub("", str(signature.replace(parameters=parameters)))
        when = " ".join((inspect.getdoc(event) or "").split()).removeprefix("Called ")
        rows.append((f"`{name}{text.removesuffix(' -> None')}`", when.removesuffix("."), order))
    return _format_table(("event", "called", "order"), rows)


def _render_attributes(documented: type) -> str:
    """Return the table of the attributes of a class, from its docstring."""
    section = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    rows = []
    for entry in re.split(r"\n(?=    \S)", section):
        name, _, text = entry.strip().partition(":")
        annotation = inspect.formatannotation(documented.__annotations__[name])
        kind = _quote(_PACKAGE_NAME.sub("", annotation))
        rows.append((_quote(name), kind, " ".join(text.split()).removesuffix(".")))
    return _format_table(("attribute", "type", "content"), rows)


def _render_addons(addons: Sequence[AddOn]) -> str:
    """Return the table of the add-ons of phasetrain."""
    rows = []
    for addon in addons:
        module = importlib.import_module(f"phasetrain.addons.{addon.name}")
        rows.append((f"[`{addon.name}`](addons/{addon.name}.md)", _summarize(module)))
    return _format_table(("add-on", "purpose"), rows)


def _render_services() -> str:
    """Return the table of the services that the core or an add-on asks for."""
    package = ROOT / "phasetrain"
    asked: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        is_core = package / "addons" not in path.parents
        for name in _ASKED.findall(path.read_text("utf-8")):
            asked.setdefault(name, set()).add("core" if is_core else "add-ons")
    rows = []
    for addon in list_own_addons():
        for name in sorted(addon.services.keys() & asked):
            service = import_object(addon.services[name])
            names = ", ".join(inspect.signature(service).parameters)
            link = f"[{addon.name}](addons/{addon.name}.md)"
            askers = ", ".join(sorted(asked[name], reverse=True))
            rows.append((f"`{name}({names})`", link, askers, _summarize(service)))
    return _format_table(("service", "add-on", "asked for by", "effect"), rows)


def _render_addon(addon: AddOn) -> str:
    """Return the tables of all that an add-on adds."""
    commands = [
        (f"`{f'phasetrain {command.name} {command.synopsis}'.rstrip()}`", command.help)
        for command in addon.commands
    ]
    parts = [
        (f"`{name}`", _link_kind(kind), _summarize(import_object(REGISTRIES[kind]).find(name)))
        for kind, modules in addon.parts.items()
        for name in sorted(modules)
    ]
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
        (("command", "effect"), commands),
        (("part", "kind", "effect"), parts),
        (("names of a library", "kinds"), list(_list_bridges(addon))),
        (("more", "names"), list(_list_rest(addon))),
    ]
    return "\n\n".join(_format_table(heads, rows) for heads, rows in tables if rows)


def _list_bridges(addon: AddOn) -> Iterator[tuple[str, str]]:
    libraries = sorted({library for modules in addon.bridges.values() for library in modules})
    for library in libraries:
        kinds = [kind for kind, modules in addon.bridges.items() if library in modules]
        yield f"`{library}.NAME`", ", ".join(map(_link_kind, kinds))


def _list_rest(addon: AddOn) -> Iterator[tuple[str, str]]:
    """Yield rows of sections, keys, engines, services and names of the Python API."""
    sections = [f"[`{name}`](../reference.md#{name.lower()})" for name in addon.sections]
    keys = {
        section: [f"{section}.{key}" for key in _list_keys(addon, section)]
        for section in addon.keys
    }
    rows = {
        "section": sections,
        "on by default": map(_quote, sorted(keys.pop("HOOKS", ()))),
        "keys": map(_quote, sorted(key for names in keys.values() for key in names)),
        "values of `RUN.engine`": (_quote(engine.name) for engine in addon.engines),
        "services": map(_quote, sorted(addon.services)),
        "Python": (_quote(f"phasetrain.{name}") for name in sorted(addon.names)),
    }
    for head, names in rows.items():
        text = ", ".join(names)
        if text:
            yield head, text


def _list_keys(addon: AddOn, section: str) -> list[str]:
    """Return the keys that an add-on adds to a section of the core."""
    return [key for path in addon.keys.get(section, ()) for key in own_keys(import_object(path))]


def _quote(text: str) -> str:
    return f"`{text}`"


def _link_kind(kind: str) -> str:
    """Return a link to the page about the section whose parts are of a kind."""
    section = import_object(REGISTRIES[kind]).section.partition(".")[0]
    return f"[{kind}](../{section.lower()}.md)"


def _find_slot(kind: str) -> PartLocation:
    """Return the place of parts of a kind that every config has, if there is one."""
    slots = [slot for slot in list_slots() if slot.registry.kind == kind]
    return min(slots, key=lambda slot: slot.only is not None)


def _list_parameters(slot: PartLocation, name: str) -> str:
    """Return the parameters of a part that a config can set, with their default values."""
    texts = []
    for key, parameter in parameters(slot.registry.find(name)).items():
        if key in slot.provided:
            continue
        if parameter.default is parameter.empty:
            texts.append(f"`{key}`")
        else:
            texts.append(f"`{key}` = {format_value(parameter.default)}")
    return ", ".join(texts)


def _summarize(documented: object) -> str:
    """Return the first paragraph of a docstring in one line, without its period."""
    text = inspect.getdoc(documented) or ""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (heads, *rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    lines.insert(1, "|---" * len(heads) + "|")
    return "\n".join(lines)


def main() -> None:
    """Write the tables of all pages again."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = path.read_text("utf-8")
        filled = fill_tables(page)
        if filled != page:
            path.write_text(filled, "utf-8")


if __name__ == "__main__":
    main()
