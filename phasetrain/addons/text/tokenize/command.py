"""The command `tokenize`."""

import argparse
from typing import Any

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare folder, inputs and tokenizer."""
    parser.add_argument("out", metavar="OUT", help="folder to write, for the dataset tokens")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text files (a document each), .jsonl (a document per line), or folders; also .gz",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json, or a folder with one (default: a token per byte)",
    )
    parser.add_argument(
        "--train-bpe",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE with this number of tokens on the inputs",
    )
    parser.add_argument(
        "--field", default="text", metavar="KEY", help="key of the text in .jsonl (default: text)"
    )
    parser.add_argument(
        "--end", metavar="TOKEN", help="token of the tokenizer at the end of a document"
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=2**25,
        metavar="N",
        help="tokens after which a shard ends (default: 33,554,432)",
    )


def run_tokenize(call: Call) -> Outcome:
    """Write texts as token files."""
    from phasetrain.addons.text.tokenize.tokenize import TokenizeOptions, tokenize

    flags = call.flags
    options = TokenizeOptions(
        flags.tokenizer, flags.train_bpe, flags.field, flags.end, flags.shard_tokens
    )
    made = tokenize(flags.out.rstrip("/") or "/", flags.inputs, options)
    content: dict[str, Any] = {
        "out": flags.out,
        "documents": made.documents,
        "tokens": made.tokens,
        "bytes": made.bytes,
        "vocabulary": made.vocabulary,
        "dtype": made.dtype,
        "shards": len(made.shards),
        "tokenizer": made.tokenizer,
        "digest": made.digest(),
        "exact_bytes": made.bytes_table is not None,
    }
    per_token = made.bytes / made.tokens
    text = (
        f"{flags.out}: {made.documents:,} documents, {made.tokens:,} tokens of {made.vocabulary:,} "
        f"({per_token:.2f} bytes each), {len(made.shards)} shards, digest {made.digest()[:12]}"
    )
    return Outcome(text=text, content=content)
