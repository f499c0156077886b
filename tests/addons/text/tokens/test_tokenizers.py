"""Tokenizers give the text back, count its bytes, and are checked when they are opened."""

import json
from pathlib import Path

import numpy as np
import pytest
from raising import raises

from phasetrain.addons.text.tokenize.train_bpe import train_bpe
from phasetrain.addons.text.tokens import ByteCodec, LibraryCodec, load_codec
from phasetrain.errors import ConfigError

TEXT = "the cat sat on the mat, Wärme 日本 <|endoftext|>\n".encode()


@pytest.fixture(scope="module")
def bpe() -> LibraryCodec:
    return LibraryCodec(train_bpe([TEXT * 3], 300))


def test_bytes_are_tokens() -> None:
    [tokens] = ByteCodec().encode(["aé".encode()])
    assert tokens.tolist() == [97, 195, 169]
    assert ByteCodec().decode([97, 195, 169, 256]) == "aé"


def test_bpe_gives_text_back_and_counts_its_bytes(bpe: LibraryCodec) -> None:
    for text in (TEXT, b"", "unseen: Ω".encode()):
        [tokens] = bpe.encode([text])
        assert bpe.decode(tokens.tolist()).encode() == text
        assert bpe.byte_counts is not None
        assert int(bpe.byte_counts.counts[tokens].sum()) == len(text)
    assert len(bpe.encode([TEXT])[0]) < len(TEXT) / 2


def test_text_cannot_end_a_document(bpe: LibraryCodec) -> None:
    assert bpe.end not in bpe.encode([b"<|endoftext|>"])[0]
    assert bpe.decode([bpe.end]) == ""


def test_folder_has_its_tokenizer_or_bytes(bpe: LibraryCodec, tmp_path: Path) -> None:
    assert load_codec(str(tmp_path)).vocabulary == 257
    assert bpe.content is not None
    (tmp_path / "tokenizer.json").write_bytes(bpe.content)
    assert load_codec(str(tmp_path)).digest == bpe.digest
    assert load_codec(str(tmp_path / "tokenizer.json")).vocabulary == bpe.vocabulary
    with raises(ConfigError, code="tokens.invalid_tokenizer"):
        load_codec(str(tmp_path / "other.json"))
    with raises(ConfigError, code="tokens.invalid_tokenizer"):
        LibraryCodec(b"{}")
    with raises(ConfigError, code="tokens.no_end"):
        LibraryCodec(bpe.content, end="<stop>")


def test_tokens_of_another_kind_have_no_number_of_bytes(bpe: LibraryCodec) -> None:
    words = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"cat": 0, "</s>": 1}, "unk_token": "cat"},
    }
    codec = LibraryCodec(json.dumps(words).encode())
    assert (codec.end, codec.vocabulary, codec.byte_counts) == (1, 2, None)
    [tokens] = codec.encode([b"cat dog"])
    assert np.array_equal(tokens, [0, 0])
