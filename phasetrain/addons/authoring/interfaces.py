"""Help on names of the Python interfaces: what docstrings say of a method, an attribute or an
argument, and the page of the docs."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import phasetrain

MOST_SHOWN = 4
"""Maximum number of interfaces that are shown for a name."""

_SECTION = re.compile(r"\(section ([A-Z]+)\)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Interface:
    """A class that custom parts derive from, implement, or get.

    Attributes:
        name: dotted path of its package and its name.
        page: page of the docs.
        node: its definition.
        is_base: whether parts derive from it or implement it.
    """

    name: str
    page: str
    node: ast.ClassDef
    is_base: bool


def explain_interface(name: str) -> list[list[str]]:
    """Return a paragraph, as lines, for each interface with a method, an attribute or an argument
    of a name; none if there is no such name.

    Args:
        name: such as `on_output`, or `Hook.on_output`.
    """
    of_class, _, member = name.rpartition(".")
    interfaces, mentions = [], []
    classes: dict[str, ast.ClassDef] = {}
    for package in sorted(Path(phasetrain.__file__).parent.glob("*/__init__.py")):
        init = ast.parse(package.read_text("utf-8"))
        section = _SECTION.search(ast.get_docstring(init) or "")
        if section is None:
            continue
        page = f"docs/{section[1].lower()}.md"
        exported = _list_exported(init)
        for path in sorted(package.parent.rglob("*.py")):
            module = ast.parse(path.read_text("utf-8"))
            for node in module.body:
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, node)
            interfaces += list(_list_interfaces(module, package.parent.name, page, exported))
            mentions += list(_list_mentions(ast.get_docstring(module) or "", member, page))
    if of_class:
        interfaces = [item for item in interfaces if item.name.endswith(f".{of_class}")]
        mentions = []
    explained = [
        (interface.is_base, lines)
        for interface in interfaces
        for lines in _explain_member(interface, member, classes)
    ]
    paragraphs = [*(lines for is_base, lines in explained if is_base), *mentions]
    return (paragraphs or [lines for _, lines in explained])[:MOST_SHOWN]


def _list_exported(init: ast.Module) -> set[str]:
    return {
        alias.name
        for node in ast.walk(init)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _list_interfaces(
    module: ast.Module, package: str, page: str, exported: set[str]
) -> Iterator[Interface]:
    """Yield the public classes of a module; those next to a registry are base classes of parts."""
    has_registry = any(
        isinstance(node, ast.Assign | ast.AnnAssign) and "Registry" in ast.unparse(node)
        for node in module.body
    )
    for node in module.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            is_protocol = any(ast.unparse(base).startswith("Protocol") for base in node.bases)
            is_base = is_protocol or (has_registry and node.name in exported)
            if is_base or node.name in exported:
                yield Interface(f"phasetrain.{package}.{node.name}", page, node, is_base)


def _explain_member(
    interface: Interface, member: str, classes: Mapping[str, ast.ClassDef]
) -> Iterator[list[str]]:
    """Yield the lines about a member of an interface, or of the classes that it inherits from."""
    for definition in _list_definitions(interface.node, classes):
        paragraphs = list(_explain_own(interface, definition, member))
        yield from paragraphs
        if paragraphs:
            return


def _list_definitions(
    node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]
) -> Iterator[ast.ClassDef]:
    yield node
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        if name in classes and name != node.name:
            yield from _list_definitions(classes[name], classes)


def _explain_own(
    interface: Interface, definition: ast.ClassDef, member: str
) -> Iterator[list[str]]:
    for node in definition.body:
        if not isinstance(node, Function) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node) or ""
        if node.name == member:
            arguments = ", ".join(argument.arg for argument in node.args.args[1:])
            is_property = any(ast.unparse(item) == "property" for item in node.decorator_list)
            shown = member if is_property else f"{member}({arguments})"
            noun = "attribute" if is_property else "method"
            yield _format(f"{noun} of {interface.name}", interface.page, shown, text)
        elif meaning := _read_entry(text, "Args", member):
            owner = f"argument of {interface.name}.{node.name}"
            yield _format(owner, interface.page, member, meaning)
    meaning = _read_entry(ast.get_docstring(definition) or "", "Attributes", member)
    if meaning:
        yield _format(f"attribute of {interface.name}", interface.page, member, meaning)


def _format(owner: str, page: str, shown: str, text: str) -> list[str]:
    heading = owner if "docs/" in text else f"{owner}, see {page}"
    return [heading, f"  {shown}", *(f"      {line}".rstrip() for line in text.splitlines())]


def _read_entry(docstring: str, heading: str, name: str) -> str:
    """Return the meaning of a name in a section of a docstring; empty if it is not there."""
    section = re.search(rf"^{heading}:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.split(r"^    (?=\S)", section[1] if section else "", flags=re.MULTILINE)
    for entry in entries:
        names, colon, meaning = entry.partition(": ")
        if colon and name in names.split(", "):
            return " ".join(meaning.split())
    return ""


def _list_mentions(docstring: str, name: str, page: str) -> Iterator[list[str]]:
    """Yield the lines about a name in the docstring of a module: the row of a table of what a part
    may have without a base class, or the paragraph with the name in backticks."""
    for paragraph in docstring.split("\n\n"):
        rows = re.split(r"^    (?=\S)", paragraph, flags=re.MULTILINE)[1:]
        for row in rows:
            shown, _, meaning = re.sub(r"\s*\n\s*", " ", row).partition("   ")
            if name in re.findall(r"\w+", shown):
                yield _format("optional in a custom part", page, shown, meaning.strip())
        if not rows and f"`{name}`" in paragraph:
            yield _format("term", page, name, paragraph)
