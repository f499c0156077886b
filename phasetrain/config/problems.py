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
    text = format_value(value)
    message = f"{key} = {text} ({layer}): {sentence}"
    return Problem(code, message, key, text, sentence, suggestion)


def raise_all(problems: Iterable[str | Problem]) -> None:
    """Raise one ConfigError with all problems, or nothing if there is none."""
    listed = list(problems)
    if listed:
        raise combine_problems(listed)


def combine_problems(problems: Sequence[str | Problem]) -> ConfigError:
    """Return one error with all problems, at least one; duplicates are dropped."""
    converted = [
        item if isinstance(item, Problem) else Problem.from_message(item, ConfigError.default_code)
        for item in problems
    ]
    # Two checks may find the same mistake, with different codes.
    unique = list({problem.message: problem for problem in converted}.values())
    if len(unique) == 1:
        message = unique[0].message
    else:
        lines = [f"  {number}. {problem.message}" for number, problem in enumerate(unique, 1)]
        message = "\n".join([f"{len(unique)} problems in the config:", *lines])
    # A program that reads a single code gets the first one; `problems` has all of them.
    return ConfigError(message, code=unique[0].code, problems=unique)


def collect_problems(*checks: Callable[[], object]) -> list[Problem]:
    """Return the problems of the ConfigErrors that checks raise; every check is called."""
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    return problems


def format_value(value: Any) -> str:
    """Return a value as it is written in YAML, cut to 60 characters."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
