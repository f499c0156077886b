"""Options of the command `tokenize`; no module here imports torch."""

from dataclasses import dataclass

from phasetrain.cli.options import option
from phasetrain.errors import ConfigError


@dataclass(frozen=True)
class TokenizeOptions:
    """How texts become tokens.

    Raises:
        ConfigError: two tokenizers, or a size below 1.
    """

    tokenizer: str | None = option(
        None, "a tokenizer.json, or a folder with one (default: a token per byte)", metavar="FILE"
    )
    train_bpe: int | None = option(
        None, "train a byte-level BPE with this number of tokens on the inputs", metavar="SIZE"
    )
    field: str = option("text", "key of the text in .jsonl (default: text)", metavar="KEY")
    end: str | None = option(
        None, "token of the tokenizer at the end of a document", metavar="TOKEN"
    )
    shard_tokens: int = option(
        2**25, "tokens after which a shard ends (default: 33,554,432)", metavar="N"
    )

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.train_bpe is not None:
            raise ConfigError(
                "--tokenizer and --train-bpe: a tokenizer is read or trained; set one of them",
                code="cli.usage",
            )
        if self.shard_tokens < 1:
            raise ConfigError(
                f"--shard-tokens {self.shard_tokens}: expected at least 1", code="cli.usage"
            )
