"""The commands for text: tokens from files, and text from a model."""

import argparse
from typing import Any

from phasetrain.addons.deploy.model_commands import add_model_arguments, reject_run_options
from phasetrain.addons.deploy.options import TokenizeOptions
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
    from phasetrain.addons.deploy.tokenize.tokenize import tokenize

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


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run, prompts and how tokens are drawn."""
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; several times for several (default: the beginning of a document)",
    )
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="default: 100")
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="texts per prompt (default: 1)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0 takes the most probable token (default: 1)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the most probable with sum P"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json (default: the one in the data of the run)",
    )


def run_generate(call: Call) -> Outcome:
    """Continue texts with the model of a run."""
    from phasetrain.addons.deploy.pack.archive import names_archive
    from phasetrain.addons.deploy.pack.load_pack import load_pack
    from phasetrain.app.load import load
    from phasetrain.tasks.generation import Sampling
    from phasetrain.tasks.inference import Predictor

    flags = call.flags
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed)
    task: Predictor
    if names_archive(flags.run_folder):
        reject_run_options(call, call.overrides)
        task = load_pack(flags.run_folder, device=flags.device, imports=flags.imports)
    else:
        task = load(
            flags.run_folder,
            flags.checkpoint or "latest",
            weights=flags.weights,
            device=flags.device,
            changes=call.overrides,
            trust=flags.trust,
        )
    prompts = flags.prompt or [""]
    continuations = task.generate(
        prompts,
        tokens=flags.tokens,
        samples=flags.samples,
        sampling=sampling,
        tokenizer=flags.tokenizer,
    )
    blocks = [
        prompt + text
        for prompt, texts in zip(prompts, continuations, strict=True)
        for text in texts
    ]
    content = {
        "folder": flags.run_folder,
        "generated": [
            {"prompt": prompt, "texts": texts}
            for prompt, texts in zip(prompts, continuations, strict=True)
        ],
    }
    return Outcome(text="\n---\n".join(blocks), content=content)
