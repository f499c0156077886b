"""The command `tokenize`."""

import argparse
from typing import Any

from phasetrain.addons.text.options import TokenizeOptions
from phasetrain.cli.options import add_options, read_options
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
    add_options(parser, TokenizeOptions)


def run_tokenize(call: Call) -> Outcome:
    """Write texts as token files."""
    from phasetrain.addons.text.tokenize.tokenize import tokenize

    flags = call.flags
    options = read_options(TokenizeOptions, flags)
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
