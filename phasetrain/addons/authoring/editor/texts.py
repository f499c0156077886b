"""Hover texts of keys, parts and parameters: meaning, type, default, and effect on resume."""

import inspect
import re
from collections.abc import Callable, Mapping
from textwrap import shorten
from typing import Any

from phasetrain.config.problems import format_value
from phasetrain.config.sections.keys import Key, Resume

LONGEST = 200
"""Maximum number of characters that are taken from a docstring."""

_EFFECT: Mapping[Resume, str] = {
    "free": "may change",
    "adjustable": "a change needs RUN.allow={path}",
    "forbidden": "must not change",
}
# `width: channels`, and in torch `lr (float, optional): learning rate`.
_ARGUMENT = re.compile(r"(?P<indent>\s+)(?P<name>\w+)\s*(\(.*?\))?\s*:\s*(?P<text>.*)")


def key_texts(key: Key) -> dict[str, str]:
    """Return the descriptions of a key, as plain text and as Markdown."""
    return value_texts(key.meaning, key.type.text, format_value(key.default), key.resume, key.path)


def value_texts(
    meaning: str, type_text: str, default: str, resume: Resume, path: str
) -> dict[str, str]:
    """Return `description` and `markdownDescription` of a key or parameter.

    Args:
        meaning: a sentence; may be empty.
        type_text: type in words; may be empty.
        default: default as YAML; empty if a value is required.
        resume: effect of a changed value on resume.
        path: dotted path.
    """
    effect = f"on resume {resume}: {_EFFECT[resume].format(path=path)}"
    plain = []
    marked = []
    if type_text:
        plain.append(f"type: {type_text}")
        marked.append(f"`{type_text}`")
    if default:
        plain.append(f"default: {default}")
        marked.append(f"default `{default}`")
    plain.append(effect)
    marked.append(f"on resume **{resume}**: {_EFFECT[resume].format(path=f'`{path}`')}")
    return {
        "description": "\n".join(filter(None, [meaning, "; ".join(plain)])),
        "markdownDescription": "\n\n".join(filter(None, [meaning, ", ".join(marked)])),
    }


def summarize(factory: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring in one line."""
    return _shorten(inspect.cleandoc(factory.__doc__ or "").partition("\n\n")[0])


def argument_texts(factory: Callable[..., Any]) -> dict[str, str]:
    """Return parameter -> its text in the section `Args:` of the docstring of a class, its
    constructor or a function."""
    texts: dict[str, str] = {}
    documents = [factory.__doc__]
    # Libraries describe parameters in the class, its constructor, or both.
    if inspect.isclass(factory):
        documents.append(vars(factory).get("__init__", factory).__doc__)
    for document in documents:
        texts |= _read_arguments(inspect.cleandoc(document or ""))
    return {name: _shorten(text) for name, text in texts.items()}


def _shorten(text: str) -> str:
    """Return a text in one line; libraries have paragraphs where a hover text has room for less."""
    return shorten(text, LONGEST, placeholder=" ...")


def _read_arguments(document: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    depth = -1  # indentation of the names; below 0 outside of the section
    name = ""
    for line in document.splitlines():
        if line.strip() in ("Args:", "Arguments:", "Parameters:"):
            depth = 0
            continue
        if depth < 0:
            continue
        if line.strip() and not line.startswith(" "):
            break  # the next section, such as `Raises:`
        match = _ARGUMENT.fullmatch(line)
        if match and depth in (0, len(match["indent"])):
            depth = len(match["indent"])
            name = match["name"]
            texts[name] = match["text"]
        elif not line.strip():
            name = ""  # a paragraph of its own
        elif name:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts
