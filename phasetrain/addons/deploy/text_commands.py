"""The command `generate`: text from a model."""

import argparse

from phasetrain.addons.deploy.model_commands import add_model_arguments, reject_run_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


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
    from phasetrain.config.addons import require_service
    from phasetrain.tasks.inference import Predictor

    flags = call.flags
    make_sampling = require_service("make_sampling", "text", "generate")
    sampling = make_sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed)
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
