"""The tokenizer of a run is found by its config, and must be the one of the training."""

from pathlib import Path

from raising import raises

from phasetrain.addons.text.generation import TextSource
from phasetrain.addons.text.tokenize.tokenize import TokenizeOptions, tokenize
from phasetrain.addons.text.tokenize.train_bpe import train_bpe
from phasetrain.addons.text.tokens import ByteCodec, LibraryCodec, load_codec
from phasetrain.errors import ConfigError


def test_tokenizer_is_that_of_the_data_or_of_the_initial_weights(tmp_path: Path) -> None:
    content = train_bpe([b"a a b"], 260)
    (tmp_path / "tokenizer.json").write_bytes(content)
    digest = LibraryCodec(content).digest
    folder = str(tmp_path)
    assert TextSource(({"dataset": "alice"},)).open_codec().digest == ByteCodec.digest
    for source in (
        TextSource(({"dataset": "tokens", "path": folder},), digest=digest),
        TextSource(
            ({"dataset": "mixed", "datasets": {"a": {"dataset": "tokens", "path": folder}}},)
        ),
        TextSource(({"dataset": "mine.Texts", "tokenizer": folder},)),
        TextSource((), (folder,)),
    ):
        assert source.open_codec().digest == digest
    assert TextSource(()).open_codec(f"{folder}/tokenizer.json").digest == digest


def test_end_of_a_document_is_the_one_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc abc")
    content = train_bpe([b"abc abc"], 258).replace(b"<|endoftext|>", b"<stop>")
    (tmp_path / "given.json").write_bytes(content)
    options = TokenizeOptions(tokenizer=f"{tmp_path}/given.json", end="<stop>")
    made = tokenize(f"{tmp_path}/out", [f"{tmp_path}/a.txt"], options)
    assert load_codec(f"{tmp_path}/out").end == made.end == 0
    with raises(ConfigError, code="tokens.no_end"):
        TextSource(()).open_codec(f"{tmp_path}/given.json")
    assert TextSource((), end=made.end).open_codec(f"{tmp_path}/given.json").end == 0


def test_missing_or_other_tokenizer_is_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, code="generate.no_tokenizer"):
        TextSource(({"dataset": "tokens", "path": str(tmp_path / "gone")},)).open_codec()
    with raises(ConfigError, code="tokens.other_tokenizer"):
        TextSource(({"dataset": "text"},), digest="0" * 64).open_codec()
