"""A trained BPE depends on the documents alone, and has every byte."""

import subprocess
import sys

import pytest
from raising import raises

from phasetrain.addons.text.tokenize.train_bpe import train_bpe
from phasetrain.addons.text.tokens import LibraryCodec
from phasetrain.errors import ConfigError

TEXTS = [b"the cat sat on the mat", b"the mat sat on the cat"] * 20


def test_every_byte_has_a_token() -> None:
    codec = LibraryCodec(train_bpe(TEXTS, 265))
    assert codec.vocabulary == 265
    assert codec.byte_counts is not None
    assert sorted(codec.byte_counts)[:257] == [0, *[1] * 256]


@pytest.mark.feature("tokenize")
@pytest.mark.slow
def test_processes_train_the_same_tokenizer() -> None:
    program = (
        "from phasetrain.addons.text.tokenize.train_bpe import train_bpe\n"
        f"print(train_bpe({TEXTS!r}, 280).decode())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert found == {train_bpe(TEXTS, 280).decode() + "\n"}


def test_too_few_tokens_and_other_encodings_are_rejected() -> None:
    with raises(ConfigError, code="cli.usage"):
        train_bpe(TEXTS, 256)
    with raises(ConfigError, code="tokens.invalid_input"):
        train_bpe([b"\xff"], 300)
