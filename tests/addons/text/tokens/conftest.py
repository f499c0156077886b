"""Folders of tokens, written once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from phasetrain.addons.text.tokenize.tokenize import TokenizeOptions, tokenize

LENGTHS = (5, 1, 12, 3, 8, 2, 30, 4)
"""Bytes of each document."""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes documents of bytes, and returns the path of the folder."""

    def write_documents(name: str = "tokens", lengths: tuple[int, ...] = LENGTHS) -> str:
        lines = tmp_path / f"{name}.jsonl"
        texts = [chr(97 + at) * length for at, length in enumerate(lengths)]
        lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
        out = str(tmp_path / name)
        tokenize(out, [str(lines)], TokenizeOptions(shard_tokens=20))
        return out

    return write_documents
