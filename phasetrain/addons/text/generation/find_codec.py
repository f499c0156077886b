"""The tokenizer of a run, from the files that its config names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasetrain.addons.text.tokens import ByteCodec, TextCodec, load_codec
from phasetrain.addons.text.tokens.tokenizers import TOKENIZER_FILE
from phasetrain.errors import ConfigError

OF_BYTES = ("text", "alice")
"""Datasets whose samples are blocks of byte tokens."""


def open_dataset_codec(section: Mapping[str, Any]) -> TextCodec:
    """Return the tokenizer of a dataset whose samples are blocks of tokens.

    Args:
        section: config of its split.

    Raises:
        ConfigError: the folder of the dataset is not there.
    """
    if section.get("dataset") in OF_BYTES:
        return ByteCodec()
    return load_codec(str(section.get("path")))


@dataclass(frozen=True)
class TextSource:
    """Where the tokenizer of a run is.

    Attributes:
        sections: config of the splits, the test splits first.
        folders: other folders that may have its `tokenizer.json`, such as one with initial weights.
        digest: SHA-256 of the tokenizer with which the model was trained; None if unknown.
        end: number of its token at the end of a document; None if unknown.
        codec: the tokenizer, if it is known without these.
    """

    sections: tuple[Mapping[str, Any], ...]
    folders: tuple[str, ...] = ()
    digest: str | None = None
    end: int | None = None
    codec: TextCodec | None = None

    def open_codec(self, tokenizer: str | None = None) -> TextCodec:
        """Return the tokenizer.

        Args:
            tokenizer: path of a `tokenizer.json` to use instead.

        Raises:
            ConfigError: there is none, or it is not the one of the training.
        """
        codec: TextCodec | None
        if tokenizer is None:
            codec = next(self._list_codecs(), None)
        else:
            codec = load_codec(tokenizer, self.end)
        if codec is None:
            names = sorted({str(section.get("dataset")) for section in self.sections})
            raise ConfigError(
                f"tokenizer: the data of the run ({', '.join(names)}) names none that exists here; "
                "only a language model continues texts: if this is one, give the path of its "
                "tokenizer.json (--tokenizer FILE)",
                code="generate.no_tokenizer",
            )
        if self.digest is not None and codec.digest != self.digest:
            raise ConfigError(
                f"tokenizer: its digest is {codec.digest[:12]}, and the model was trained with "
                f"{self.digest[:12]}, so tokens have other meanings; give the path of that one "
                "(--tokenizer FILE)",
                code="tokens.other_tokenizer",
            )
        return codec

    def _list_codecs(self) -> Iterator[TextCodec]:
        if self.codec is not None:
            yield self.codec
        folders = list(self.folders)
        for section in self.sections:
            for subsection in _list_sections(section):
                if subsection.get("dataset") in OF_BYTES:
                    yield ByteCodec()
                if (
                    subsection.get("dataset") == "tokens"
                    and Path(str(subsection.get("path"))).is_dir()
                ):
                    yield load_codec(str(subsection["path"]))
                # Custom datasets name the folder of their tokenizer like this.
                if isinstance(subsection.get("tokenizer"), str):
                    folders.append(subsection["tokenizer"])
        for folder in folders:
            if Path(folder, TOKENIZER_FILE).is_file():
                yield load_codec(folder, self.end)


def _list_sections(section: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a section, and the sections of the sources of a mixture."""
    yield section
    sources = section.get("datasets")
    if isinstance(sources, Mapping):
        for source in sources.values():
            if isinstance(source, Mapping):
                yield from _list_sections(source)
