"""Services for the core: the tokenizer of a run, and texts from a task with a language model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phasetrain.addons.text.generation.find_codec import TextSource
from phasetrain.addons.text.generation.generate import TextGenerator
from phasetrain.addons.text.generation.sampling import Sampling, check_argument
from phasetrain.app.load import read_data_facts
from phasetrain.config.schema import is_split
from phasetrain.models.sources import parse_sources
from phasetrain.tasks.inference import Predictor, eval_mode


def find_text_source(config: Mapping[str, Any], folder: str) -> TextSource:
    """Return where the tokenizer of a run is, with the digest of its training.

    Args:
        config: config of the run.
        folder: folder of the run.
    """
    data = config["DATA"]
    names = sorted((name for name in data if is_split(name)), key=lambda name: name == "TRAIN")
    recorded = [read_data_facts(folder, name) for name in ("TRAIN", *names)]
    facts = next((facts for facts in recorded if "tokenizer_digest" in facts), {})
    return TextSource(
        sections=tuple(data[name] for name in names if isinstance(data[name], Mapping)),
        folders=tuple(source.path for source in parse_sources(config["MODEL"]["weights"])),
        digest=facts.get("tokenizer_digest"),
        end=facts.get("end_token"),
    )


def generate_text(
    predictor: Predictor,
    prompts: str | Sequence[str],
    *,
    tokens: int,
    samples: int,
    sampling: Sampling | None,
    tokenizer: str | None,
    cache: bool,
) -> list[list[str]]:
    """Return continuations of prompts, see `Predictor.generate`."""
    check_argument("tokens", tokens, int, ge=1)
    check_argument("samples", samples, int, ge=1)
    check_argument("prompts", prompts, str | list[str])
    texts = [prompts] if isinstance(prompts, str) else prompts
    codec = _find_source(predictor).open_codec(tokenizer)
    model = predictor.parts.model
    machine = predictor.parts.machine
    generator = TextGenerator(model, codec, machine.device, uses_cache=cache)
    with torch.no_grad(), eval_mode(model), machine.autocast(train=False):
        return [
            generator.generate(prompt, tokens, samples, sampling or Sampling()) for prompt in texts
        ]


def _find_source(predictor: Predictor) -> TextSource:
    if predictor.text_source is not None:
        source: TextSource = predictor.text_source
        return source
    reader = predictor.reader
    if reader is not None:  # of a packed model
        return TextSource((reader.section,), codec=reader.tokenizer)
    return TextSource(())
