"""Expect errors by type, code, key and suggestion instead of by their wording.

The wording of the most important messages is in tests/test_messages.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from phasetrain.errors import PhasetrainError

Error = TypeVar("Error", bound=PhasetrainError)


@contextmanager
def raises(
    error: type[Error],
    *,
    code: str | None = None,
    key: str | None = None,
    given: str | None = None,
    suggestion: str | None = None,
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error with one problem that has all of the given fields.

    Args:
        error: class of the error.
        code: of the problem, such as "config.unknown_key"; None for any.
        key: `SECTION.key` that the problem is about; None for any.
        given: value that was given, as written in YAML; None for any.
        suggestion: key or value that was probably meant; None for any.
    """
    expected = {"code": code, "key": key, "given": given, "suggestion": suggestion}
    expected = {name: value for name, value in expected.items() if value is not None}
    with pytest.raises(error) as caught:
        yield caught
    found = [{name: vars(problem)[name] for name in expected} for problem in caught.value.problems]
    assert expected in found, str(caught.value)
