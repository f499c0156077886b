"""Mistakes in the config: collected one by one, and raised as one error."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phasetrain.errors import ConfigError, Problem


def make_problem(
    code: str, key: str, value: Any, layer: str, sentence: str, suggestion: str = ""
) -> Problem:
    """Return the mistake that `key` has a value, set by a layer, which it must not have.

    Args:
        code: stable identifier, such as `config.wrong_type`.
        key: dotted path.
        value: value of the key.
        layer: layer that set it.
        sentence: the expected value, and a remedy.
        suggestion: the key or value that was probably meant.
    """
    given = format_value(value)
    message = f"{key} = {given} ({layer}): {sentence}"
    return Problem(code, message, key, given, sentence, suggestion)


def raise_all(problems: Iterable[str | Problem]) -> None:
    """Raise one ConfigError with all problems, or nothing if there is none."""
    found = list(problems)
    if found:
        raise combine_problems(found)


def combine_problems(problems: Sequence[str | Problem]) -> ConfigError:
    """Return one error with all problems, at least one; duplicates are dropped."""
    found = [
        one if isinstance(one, Problem) else Problem.from_message(one, ConfigError.default_code)
        for one in problems
    ]
    # Two checks may find the same mistake, with different codes.
    unique = list({one.message: one for one in found}.values())
    if len(unique) == 1:
        message = unique[0].message
    else:
        lines = [f"  {number}. {one.message}" for number, one in enumerate(unique, 1)]
        message = "\n".join([f"{len(unique)} problems in the config:", *lines])
    # A program that reads a single code gets the first one; `problems` has all of them.
    return ConfigError(message, code=unique[0].code, problems=unique)


def collect_problems(*checks: Callable[[], object]) -> list[Problem]:
    """Return the problems of the ConfigErrors that checks raise; every check is called."""
    found: list[Problem] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found += error.problems
    return found


def format_value(value: Any) -> str:
    """Return a value as it is written in YAML, cut to 60 characters."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
