"""The tokenizer of a run is found by its config, and must be the one of the training."""

from pathlib import Path

from raising import raises

from phasetrain.commands.tokenize.train_bpe import train_bpe
from phasetrain.data.tokens import ByteCodec, LibraryCodec
from phasetrain.errors import ConfigError
from phasetrain.tasks.generation import TextSource


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


def test_missing_or_other_tokenizer_is_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, code="generate.no_tokenizer"):
        TextSource(({"dataset": "tokens", "path": str(tmp_path / "gone")},)).open_codec()
    with raises(ConfigError, code="tokens.other_tokenizer"):
        TextSource(({"dataset": "text"},), digest="0" * 64).open_codec()
