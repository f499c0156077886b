"""Learning to predict the next token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.addons.text.generation.generate import PretrainedLike
from phasetrain.addons.text.perplexity import BitsPerByte, Perplexity
from phasetrain.addons.text.transformer import Transformer
from phasetrain.engine.batch import IGNORED, Batch, StepOutput
from phasetrain.errors import ConfigError
from phasetrain.losses import CrossEntropy
from phasetrain.tasks.base import TASKS
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.supervised import Supervised


@TASKS.register("language_model")
class LanguageModel(Supervised):
    """Learns the loss of `model(tokens)`, scores `(N, T, V)`, against the next tokens `(N, T)`,
    weighted by tokens.

    A position with target -100 does not count: not in the loss, not in meters, and not in the
    weight of a micro-batch or a rank, so that the update equals one with all tokens of the step in
    one batch. The loss, a mean over tokens, gets scores `(N * T, V)` and targets
    `(N * T,)`, and has to leave -100 out, as cross entropy does; meters get the same, with a mask
    if there are such positions.

    Raises:
        ConfigError: METERS has a perplexity of a loss with label smoothing, or bits per byte of
            tokens without a fixed number of bytes; the model has fewer tokens than the data; on a
            step: inputs, targets or scores have other shapes or types, or a token is outside the
            vocabulary.
    """

    counted = "tokens"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        smooth = parts.loss.label_smoothing if isinstance(parts.loss, CrossEntropy) else 0.0
        wrong = [
            label
            for label, meter in parts.meters.items()
            if isinstance(meter, Perplexity | BitsPerByte) and meter.of is None
        ]
        if smooth and wrong:
            raise ConfigError(
                f"METERS.{wrong[0]} and LOSS.label_smoothing = {smooth}: a smoothed loss is no "
                "number of nats per token; leave one of them out"
            )
        self._drops_cache = isinstance(parts.model, PretrainedLike)
        if parts.updater is not None:
            _check_token_bytes(parts)
            _check_vocabulary(parts)

    def weight_of(self, batch: Batch) -> int:
        """Return the number of tokens that count."""
        return int((_targets(batch) != IGNORED).sum())

    def forward(self, batch: Batch) -> StepOutput:
        """Return mean loss and scores of a micro-batch."""
        targets = _targets(batch)
        weight = self.weight_of(batch) if batch.weight is None else batch.weight
        scores = self.events.on_output(batch, self.output_of(batch))
        if not isinstance(scores, Tensor) or scores.ndim != 3 or scores.shape[:2] != targets.shape:
            received = type(scores).__name__
            if isinstance(scores, Tensor):
                received = str(tuple(scores.shape))
            raise ConfigError(
                f"MODEL: {type(self.parts.model).__name__} returns {received} for targets "
                f"{tuple(targets.shape)}; a language model returns scores (N, T, V), one for each "
                "position and token"
            )
        counted = targets.flatten()
        shown = counted.clamp(min=0)  # meters look classes up, and -100 is none
        flat = Batch(batch.input, counted, batch.ids, batch.size)
        if not weight:
            # If nothing counts, the share of the micro-batch is 0, but a mean over nothing would
            # be NaN, and 0 * NaN is NaN.
            flat.target = shown
        output = scores.flatten(0, 1)
        loss = self.loss_of(output, flat)
        mask = None
        if weight != counted.numel():
            mask = counted != IGNORED
        return StepOutput(loss, weight, batch.size, output, shown, mask, batch.ids)

    def output_of(self, batch: Batch) -> Any:
        """Return the model's output for a micro-batch, see `Supervised.output_of`."""
        inputs = batch.input
        if self._drops_cache and isinstance(inputs, Mapping) and "position_ids" in inputs:
            # With a cache, which is on by default, models of transformers ignore that positions
            # begin again, and attend to other documents.
            batch = replace(batch, input={**inputs, "use_cache": False})
        return super().output_of(batch)

    def _misfit(self, output: Tensor, batch: Batch, error: Exception) -> str:
        target = batch.target
        vocabulary = output.shape[1]
        wrong = (
            (((target < 0) & (target != IGNORED)) | (target >= vocabulary))
            .nonzero()
            .flatten()
            .tolist()
        )
        if not wrong:
            return self._unfit(output, target, error)
        sample = -1
        if batch.size:
            # Targets are flat here, with T tokens per sample.
            sample = int(batch.ids[wrong[0] * batch.size // len(target)])
        return (
            f"DATA: sample {sample} has token {int(target[wrong[0]])} as a target, and the model "
            f"has {vocabulary} tokens, so they go from 0 to {vocabulary - 1} ({IGNORED} is "
            "ignored); set MODEL.vocabulary to the number of tokens, or fix the data"
        )


def _check_token_bytes(parts: Parts) -> None:
    """Reject a meter of bits per byte if the data does not tell the bytes of its tokens."""
    for label, meter in parts.meters.items():
        if isinstance(meter, BitsPerByte) and not meter.has_counts:
            raise ConfigError(
                f"METERS.{label}: the dataset has no fixed number of bytes per token; use a "
                "byte-level tokenizer, or the meter perplexity",
                code="meters.no_token_bytes",
            )


def _check_vocabulary(parts: Parts) -> None:
    """Reject a model with fewer tokens than the data, which fails when it meets one of the
    others."""
    needed = parts.known_facts.get("vocabulary")
    embedding = None
    # All models of transformers have this method.
    get_embeddings = getattr(parts.model, "get_input_embeddings", None)
    if isinstance(parts.model, Transformer):
        embedding = parts.model.tokens
    elif get_embeddings is not None:
        embedding = get_embeddings()
    held = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
    if isinstance(needed, int) and held is not None and held < needed:
        raise ConfigError(
            f"MODEL: {type(parts.model).__name__} has {held} tokens, and the data has {needed}; "
            "set the number of tokens of the model to that of the data",
            code="tokens.outside_vocabulary",
        )


def _targets(batch: Batch) -> Tensor:
    """Return the targets, with -100 for samples that do not count."""
    targets = batch.target
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.dtype != torch.int64:
        if isinstance(targets, Tensor):
            received = f"{targets.dtype} {tuple(targets.shape)}"
        else:
            received = type(targets).__name__
        raise ConfigError(
            f"DATA: the targets of a language model are the next tokens, int64 (N, T), not "
            f"{received}; the datasets tokens, text and alice have such targets"
        )
    if batch.mask is None:
        return targets
    return targets.masked_fill(~batch.mask[:, None], IGNORED)
