"""Errors of Hydra, OmegaConf and PyYAML, as sentences about the text of the config.

Their messages name classes and tokens of the libraries. Each function returns the mistake and a
fix. For unknown errors, it returns the first line of the library's message.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import yaml
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    UnsupportedInterpolationType,
)

from phasetrain.errors import did_you_mean, nearest

_PAIRS = {"[": "]", "{": "}", "(": ")"}
_RESOLVERS = ("oc.env", "oc.select", "oc.decode", "oc.create", "oc.dict.keys", "oc.dict.values")

_ENVIRONMENT = re.compile(r"Environment variable '(?P<name>[^']*)' not found")
_QUOTED = re.compile(r"'(?P<name>[^']*)'")
_NUMBER_WITH_COMMA = re.compile(r":\s*\d+,\d+\s*[,}]")
_EQUALS_IN_BRACES = re.compile(r"[{,]\s*\w+\s*=")
_QUOTED_KEY = re.compile(r"[{,]\s*(['\"])\w+\1\s*:")
_QUOTES = re.compile(r"'[^']*'|\"[^\"]*\"")
_PARENT = re.compile(r"^In '?(?P<parent>[^':]+)'?: ?")

_YAML_HINTS = (
    (r"character '\\t'", "indent with spaces instead of tabs"),
    (r"duplicate key (.*)", "keep one of the two"),
    (r"expected <block end>", "indent the keys of one mapping by the same number of spaces"),
    (r"mapping values are not allowed", "put a text with `: ` in quotes"),
    (r"<stream end>", "a bracket or a quote is not closed"),
    (r"constructor for the tag", "tags that make objects are not read"),
    (r"undefined alias", "put a text that begins with * in quotes"),
    (r"cannot start any token", "put a text that begins with this character in quotes"),
)
"""Pattern in a message of PyYAML -> what to do."""

_DEFAULTS_HINTS = (
    (r"Invalid defaults list", "defaults: expected a list, as in `defaults: [digits, _self_]`"),
    (
        r"Too many keys in default item|Unsupported type in defaults|Unsupported item",
        "defaults: expected entries such as digits, /OPTIMIZER: adamw or _self_",
    ),
    (
        r"Multiple values for experiment",
        "defaults: an experiment is an entry without a group, as in `defaults: [digits, _self_]`",
    ),
    (r"is defined before", "defaults: entries with `override` come after all others but _self_"),
)
"""Pattern in a message of Hydra about a defaults list -> the sentence."""

_NOT_READ = "Hydra's own options, such as its launcher, are not read; remove the entry"

_NO_MATCH = re.compile(r"Could not override '(?P<group>[^'@]+)(?:@[^']*)?'\. No match")
_TWICE = re.compile(r"(?P<group>\S+) appears more than once in the final defaults list")


def explain_file_error(error: Exception) -> str:
    """Return why a YAML file cannot be used."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        hint = _find_hint(_YAML_HINTS, str(error.problem))
        message = f"line {error.problem_mark.line + 1} is not valid YAML: {error.problem}"
        return f"{message}; {hint}".removesuffix("; ")
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"byte {error.start + 1} (0x{byte:02x}) is not UTF-8; save the file as UTF-8"
    reason = _first_line(error)
    return _find_hint(_DEFAULTS_HINTS, reason) or f"cannot be read: {reason}"


def explain_defaults_error(error: Exception, groups: Sequence[str]) -> str:
    """Return why a defaults list cannot be followed.

    Args:
        error: error of Hydra.
        groups: folders with options, such as `OPTIMIZER`.
    """
    reason = _PARENT.sub("", _first_line(error))
    unmatched = _NO_MATCH.search(reason)
    if unmatched is not None:
        path = unmatched["group"]
        # Without the slash, Hydra looks below the folder of the file.
        group = next((name for name in groups if path.endswith(f"/{name}")), None)
        if group is not None:
            return (
                f"defaults: `override {group}: ...` names no entry of the files that the list "
                f"starts from; groups begin with a slash: `override /{group}: ...`"
            )
        name = path.removeprefix("experiment/")
        if name.partition("/")[0] == "hydra":
            return f"defaults: `override {name}: ...`: {_NOT_READ}"
        near = "; remove the word `override`"
        if name not in groups:
            near = did_you_mean(name, groups) or f"; groups: {', '.join(groups)}"
        return f"defaults: `override /{name}: ...`: no file before it has an entry of {name}{near}"
    twice = _TWICE.search(reason)
    if twice is not None:
        group = twice["group"].partition("@")[0]
        return (
            f"defaults: /{group} is given twice; to replace the entry of a file that the list "
            f"starts from, write `override /{group}: ...`"
        )
    return _find_hint(_DEFAULTS_HINTS, reason) or f"defaults: {reason}"


def explain_unknown_group(name: str, option: str, groups: Sequence[str]) -> str:
    """Return the fix for an entry `name: option` of a defaults list whose group does not exist
    there.

    Args:
        name: group, as written without the slash.
        option: name of the option.
        groups: folders with options, such as `OPTIMIZER`.
    """
    if name.partition("/")[0] == "hydra":
        return f": {_NOT_READ}"
    match = nearest(name, groups)
    if match == "experiment":
        return f"; did you mean {option!r}?"
    if match is not None:
        return f"; did you mean '/{match}: {option}'?"
    paths = ", ".join(f"/{group}" for group in groups if group != "experiment")
    return f"; groups: {paths}; remove the entry `{name}: {option}`, and set its keys in the file"


def explain_interpolation_error(error: Exception, find_key: Callable[[str], str | None]) -> str:
    """Return why `${...}` cannot be resolved.

    Args:
        error: error of OmegaConf.
        find_key: returns the key that an unknown one is probably meant to be.
    """
    reason = _first_line(error)
    named = _QUOTED.search(reason)
    if isinstance(error, InterpolationKeyError) and named is not None:
        sentence = f"there is no key {named['name']}"
        if near := find_key(named["name"]):
            sentence += f"; did you mean {near}?"
        return sentence
    variable = _ENVIRONMENT.search(reason)
    if variable is not None:
        name = variable["name"]
        return (
            f"the environment variable {name} is not set; set it, or give a default: "
            f"${{oc.env:{name},VALUE}}"
        )
    if isinstance(error, UnsupportedInterpolationType):
        name = reason.rpartition(" ")[2]
        near = did_you_mean(name, _RESOLVERS) or ";"
        return f"there is no resolver {name!r}{near} known: {', '.join(_RESOLVERS)}"
    if isinstance(error, GrammarParseError):
        return "expected ${SECTION.key} or ${oc.env:NAME}; \\${ is a plain ${"
    if "Recursive interpolation" in reason or isinstance(error, RecursionError):
        return "it refers to itself"
    return f"cannot be resolved: {reason}"


def explain_override_error(text: str, error: Exception) -> str:
    """Return why an override cannot be read, and how it is probably meant.

    Args:
        text: the override, with `=`.
        error: error of Hydra's parser.
    """
    key, _, value = text.partition("=")
    hint = _hint_at_key(key, value) or _hint_at_value(key, value)
    if hint:
        return f"{text!r} cannot be read: {hint}"
    # The parser appends every token that it would have accepted.
    return f"{text!r} cannot be read: {_first_line(error).partition(' expecting {')[0]}"


def find_unclosed(text: str) -> str:
    """Return the first bracket or quote that is open at the end of a text, or an empty text."""
    rest = _QUOTES.sub("", text)
    quote = next((character for character in rest if character in "'\""), "")
    stack: list[str] = []
    for character in rest:
        if character in _PAIRS:
            stack.append(character)
        elif stack and character == _PAIRS[stack[-1]]:
            stack.pop()
    return next(iter(stack), quote)


def _hint_at_key(key: str, value: str) -> str:
    if "[" in key:
        whole = key.partition("[")[0]
        return f"an item of a list cannot be set alone, only the whole list: {whole}=[...]"
    if key != key.strip():
        return f"no space belongs before the '=': {key.strip()}={value}"
    if "" in key.split("."):
        return "a name is missing before or after a dot of the key"
    if not key.isascii():
        return "keys on the command line are ASCII; set this one in a file"
    return ""


def _hint_at_value(key: str, value: str) -> str:
    if value.startswith("="):
        return f"one '=' is enough: {key}{value}"
    if value.startswith("seeds("):
        return (
            f"expected a number of seeds, 1 or more, and perhaps the first one, 0 or more, as in "
            f"{key}=seeds(5,start=100)"
        )
    if value.startswith("(") and value.endswith(")"):
        return f"a list is written in brackets: {key}=[{value[1:-1]}]"
    if unclosed := find_unclosed(value):
        return (
            f"{unclosed} is not closed; if the value has spaces, quote the whole word for the "
            f"shell: '{key}=...'"
        )
    if value.endswith((";", ",")):
        return f"remove the {value[-1]!r} at its end"
    if value[:1] in "[{":
        return next(_list_hints_at_brackets(value), "")
    if value[:1] in "'\"":
        return ""
    return f"a text with special characters is quoted twice: \"{key}='{value}'\""


def _list_hints_at_brackets(value: str) -> Iterator[str]:
    if not _QUOTES.sub("", value).isascii():
        yield "other letters than a to z are read in quoted texts and in files only"
    if _NUMBER_WITH_COMMA.search(value):
        yield "a decimal number has a point, as in {lr: 0.1}"
    if _EQUALS_IN_BRACES.search(value):
        yield "in braces a colon precedes the value, as in {lr: 0.1}"
    if _QUOTED_KEY.search(value):
        yield "keys in braces have no quotes, as in {lr: 0.1}"
    yield "expected a list such as [a, b], or a mapping such as {lr: 0.1, momentum: 0.9}"


def _find_hint(hints: Sequence[tuple[str, str]], message: str) -> str:
    return next((hint for pattern, hint in hints if re.search(pattern, message)), "")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
