"""Train a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019)."""

from collections.abc import Iterable

from phasetrain.addons.text.tokens.tokenizers import END_NAMES, import_tokenizers
from phasetrain.errors import ConfigError

SMALLEST = 257
"""A token per byte, and the end of a document."""


def train_bpe(documents: Iterable[bytes], size: int) -> bytes:
    """Return the `tokenizer.json` of a BPE with `size` tokens, or fewer for little text.

    Nothing is normalized, and every byte has a token, so that decoding gives the text again and
    each token represents a fixed number of bytes. Equal documents give an equal tokenizer.

    Raises:
        ConfigError: the size is below 257, a document is not UTF-8, or the library is missing.
    """
    if size < SMALLEST:
        raise ConfigError(
            f"--train-bpe {size}: expected at least {SMALLEST}, a token per byte and the end of a "
            "document",
            code="cli.usage",
        )
    library = import_tokenizers()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_NAMES[0]],
        # All of them: a byte that training has not seen must have a token too. Sorted, because the
        # library returns them in an order of its own.
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    try:
        made.train_from_iterator((document.decode() for document in documents), trainer)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--train-bpe {size}: a document is not UTF-8 ({error.reason}); convert it, or write "
            "bytes, without a tokenizer",
            code="tokens.invalid_input",
        ) from error
    return str(made.to_str(pretty=True)).encode()
