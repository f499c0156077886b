"""The core stays as small as it is: it may grow by 1 % before somebody has to say why."""

import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CORE_TOKENS = 290_000
"""Tokens of the package without its add-ons. Whoever raises it adds a line to docs/log.md."""

COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def count_tokens(text: str) -> int:
    """Return the number of tokens of a source file, without comments and line ends. A string of any
    kind is one token, also where Python 3.12 and newer divide an f-string into several."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        depth -= name == "FSTRING_END"
        count += not depth and (token.type in COUNTED or name == "FSTRING_END")
        depth += name == "FSTRING_START"
    return count


def test_core_does_not_grow() -> None:
    package = ROOT / "phasetrain"
    tokens = sum(
        count_tokens(path.read_text("utf-8"))
        for path in package.rglob("*.py")
        if "addons" not in path.relative_to(package).parts
    )
    assert tokens <= 1.01 * CORE_TOKENS, "move it to an add-on, or say in docs/log.md why not"
    assert tokens >= 0.97 * CORE_TOKENS, "lower CORE_TOKENS, so that the core cannot grow again"


def test_figure_is_in_the_log() -> None:
    log = (ROOT / "docs" / "log.md").read_text("utf-8")
    assert f"{CORE_TOKENS:,} tokens" in log


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("a = 1  # one\n", 3), ("\n", 0), ("f('x')\n", 4), ("f'{a + f\"{b}\"}'\n", 1)],
)
def test_comments_and_line_ends_do_not_count(text: str, tokens: int) -> None:
    assert count_tokens(text) == tokens
