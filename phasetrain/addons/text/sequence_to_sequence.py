"""Learning to write one sequence from another."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.addons.text.language_model import LanguageModel
from phasetrain.addons.text.models.search import Decodes, decode_beam, decode_greedy
from phasetrain.addons.text.sequence_errors import SequenceErrors
from phasetrain.config.checks import check_at_least
from phasetrain.data.loading.collate import make_pad
from phasetrain.engine.batch import IGNORED, Batch, SequenceOutput, StepOutput
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.runtime.nested import map_tensors
from phasetrain.tasks.base import TASKS
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.shape_errors import (
    describe_failed_forward,
    describe_shapes,
    raise_unless_shape_error,
)

NO_TOKEN = -1
"""Stands for the tokens of a decoded sequence that are cut off."""


@TASKS.register("sequence_to_sequence")
class SequenceToSequence(LanguageModel):
    """Learns target sequences `(N, T)` from sources, each token from the ones before it (teacher
    forcing), weighted by target tokens.

    A target ends with the token `end`; padding is -100. If several sequences follow one another,
    each with its `end`, the first is learned, and all are references. Loss and meters get scores
    `(N * T, V)` and targets `(N * T,)`, as in the task `language_model`. If a meter measures
    decoded sequences, tests also decode.

    Args:
        parts: parts made by the builder.
        end: token that ends a sequence, and that the decoder starts with; None: as the dataset
            says, or else 0.
        beams: number of sequences that a beam search follows; 1 takes the most likely token.
        max_length: maximum number of decoded tokens, without the end; a sequence that does not end
            then is cut, and differs from every reference.

    Raises:
        ConfigError: a number is below 1, or the model cannot decode; on a step: see
            `LanguageModel`.
    """

    def __init__(
        self, parts: Parts, end: int | None = None, beams: int = 1, max_length: int = 50
    ) -> None:
        super().__init__(parts)
        check_at_least(1, beams=beams, max_length=max_length)
        self.end = int(parts.known_facts.get("end", 0)) if end is None else end
        self._beams = beams
        self._max_length = max_length
        decoding = [
            label for label, meter in parts.meters.items() if isinstance(meter, SequenceErrors)
        ]
        if decoding and not isinstance(parts.model, Decodes):
            raise ConfigError(
                f"METERS.{decoding[0]} and MODEL: {type(parts.model).__name__} cannot decode; give "
                "it the methods `start` and `step` of phasetrain.addons.text.models.Decodes, or "
                "leave the meter out",
                code="config.conflict",
            )

    def check_targets(self, split: str, target: object) -> None:
        """Reject a split whose first target does not end with `end`."""
        super().check_targets(split, target)
        if isinstance(target, Tensor) and target.ndim == 1 and target.dtype == torch.int64:
            if len(target) and int(target[-1]) == self.end:
                return
            received = f"the last token of the first one is {target[-1:].tolist()}"
        elif target is ...:  # the first sample cannot be read
            return
        elif isinstance(target, Tensor):
            received = f"the first one is {target.dtype} {tuple(target.shape)}"
        else:
            received = f"the first one is {type(target).__name__}"
        raise ConfigError(
            f"DATA.{split.upper()}: targets are sequences of tokens, int64 (T,), which end with "
            f"{self.end} (TASK.end), and {received}; append it in the dataset, or set TASK.end",
            code="data.wrong_target",
        )

    def weight_of(self, batch: Batch) -> int:
        """Return the number of target tokens that count, the end of each sequence included."""
        return int((self._find_learned(batch) != IGNORED).sum())

    def output_of(self, batch: Batch) -> Any:
        """Return the scores `(N, T, V)` of each target token, given the ones before it."""
        targets: Tensor = batch.target
        prefix = torch.cat([torch.full_like(targets[:, :1], self.end), targets[:, :-1]], dim=1)
        prefix = prefix.masked_fill(prefix == IGNORED, self.end)
        try:
            return self.model(batch.input, prefix)
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            sentence = describe_failed_forward(
                self.parts.model, error, batch.input, batch.ids.tolist()
            )
            raise ConfigError(sentence, code="config.misfit") from error

    def forward(self, batch: Batch) -> StepOutput:
        """Return mean loss and scores of a micro-batch, and in tests the decoded sequences."""
        learned = self._find_learned(batch)
        out = super().forward(
            Batch(batch.input, learned, batch.ids, batch.size, batch.mask, weight=batch.weight)
        )
        output = SequenceOutput(
            out.loss, out.weight, out.samples, out.output, out.target, out.mask, out.ids
        )
        meters = self._measured.values()
        if not self._trains and any(isinstance(meter, SequenceErrors) for meter in meters):
            references = split_references(batch.target, self.end)
            decoded = mark_cut(self._search(batch.input), references, self._max_length)
            if batch.mask is not None:
                decoded = decoded[batch.mask]
                references = references[batch.mask]
            output.decoded = decoded
            output.references = references
        return output

    def decode(self, inputs: Any) -> Tensor:
        """Return the decoded sequences of inputs as the model takes them.

        Returns:
            Tokens without their end, int64 `(N, L)`, padded with -100.
        """
        return self._search(inputs)[:, : self._max_length]

    @torch.no_grad()
    def _search(self, inputs: Any) -> Tensor:
        """Return the decoded sequences of inputs; one that has not ended has a token more than
        `max_length`."""
        # The bare module: the wrapper of a strategy has no `start` and `step`.
        model = self.parts.model if self._trains else self.model
        assert isinstance(model, Decodes), "checked when the task was built"
        if self._beams == 1:
            return decode_greedy(model, inputs, self.end, self._max_length + 1)
        return decode_beam(model, inputs, self.end, self._max_length + 1, self._beams)

    def _find_learned(self, batch: Batch) -> Tensor:
        """Return the tokens of the first sequence of each target, and -100 elsewhere.

        Raises:
            ConfigError: targets or inputs have other types or shapes.
        """
        targets = batch.target
        if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.dtype != torch.int64:
            raise ConfigError(
                "DATA: the targets of a batch are no token sequences of one length, int64 (N, T); "
                "set collate to pad, which pads them",
                code="data.wrong_target",
            )
        if batch.mask is not None:
            targets = targets.masked_fill(~batch.mask[:, None], IGNORED)
        ends = targets == self.end
        # The sequence number of a token is the number of ends before it.
        return targets.masked_fill((ends.cumsum(dim=1) - ends.long()) > 0, IGNORED)

    def _release(self, out: StepOutput, *, measure: bool = True) -> StepOutput:
        out = super()._release(out, measure=measure)
        if isinstance(out, SequenceOutput):
            out.decoded = None
            out.references = None
        return out

    def predict(
        self, inputs: Any, *, transform: bool | None = None, batch_size: int | None = None
    ) -> Any:
        """Return the decoded sequences, see `decode`; for other arguments see `Predictor.predict`.

        Args:
            inputs: sources: a list of int64 tensors `(S,)` of any lengths, which are padded and
                masked; a mapping of `input` and `mask`, bool `(N, S)`; tokens `(N, S)` without
                padding; or other sources `(N, ...)`, such as images, as the model takes them. With
                `transform`, samples as the dataset gives them; or paths of files.
            transform: apply transforms and collate function of the test split.
            batch_size: maximum number of samples that are decoded at once.

        Raises:
            ConfigError: the inputs have another form, or a tensor has no mask, and the collate
                function of the run makes one.
        """
        if transform is not True:
            inputs = self._add_mask(inputs)
        return super().predict(inputs, transform=transform, batch_size=batch_size)

    def _add_mask(self, inputs: Any) -> Any:
        """Return sources with a mask; paths and images as they are.

        Raises:
            ConfigError: see `predict`.
        """
        received = describe_shapes(inputs)
        if isinstance(inputs, list | tuple) and inputs and not isinstance(inputs[0], str | Path):
            with suppress(*SHAPE_ERRORS):
                sources = [torch.as_tensor(source) for source in inputs]
                if all(source.ndim == 1 and not source.is_floating_point() for source in sources):
                    return make_pad()([(source, 0) for source in sources])[0]
            received = f"{type(inputs).__name__} of {describe_shapes(inputs[0])}"
        elif isinstance(inputs, Mapping):
            if {"input", "mask"} <= inputs.keys():
                return inputs
        elif isinstance(inputs, Tensor | np.ndarray):
            pads = self.transform is not None and self.transform.adds_mask
            if (inputs.ndim == 2 and len(inputs) == 1) or (inputs.ndim > 1 and not pads):
                return inputs
        else:
            return inputs
        raise ConfigError(
            f"predict: the inputs are {received}; expected a list of int64 tensors (S,), which are "
            "padded and masked, or {'input': tokens, 'mask': mask} with both (N, S), or with "
            "transform=True samples as the dataset gives them. A tensor (N, S) does not say which "
            "tokens are padding; one is taken if the collate function of the run makes no mask",
            code="predict.wrong_input",
        )

    def _predict_slice(self, tensors: Any, part: slice) -> Any:
        device = self.parts.machine.device
        inputs = map_tensors(self._form_inputs(tensors), lambda tensor: tensor[part].to(device))
        try:
            return self.decode(inputs)
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            sentence = describe_failed_forward(self.parts.model, error, inputs)
            raise ConfigError(sentence, code="config.misfit") from error

    def _form_inputs(self, tensors: Any) -> Any:
        """Return inputs as tests give them to the model: tokens are integers, with a mask if the
        collate function makes one.

        Raises:
            ConfigError: sources `(N, S)` are not tokens.
        """
        tokens = tensors.get("input") if isinstance(tensors, Mapping) else tensors
        if not isinstance(tokens, Tensor) or tokens.ndim > 2:
            return tensors
        if tokens.is_floating_point():
            if not tokens.equal(tokens.round()):
                raise ConfigError(
                    f"predict: the source tokens are {describe_shapes(tokens)}; expected int64",
                    code="predict.wrong_input",
                )
            tokens = tokens.long()  # rows of a table are read as float32
        if isinstance(tensors, Mapping):
            return {**tensors, "input": tokens}
        if self.transform is not None and not self.transform.adds_mask:
            return tokens
        return {"input": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool)}


def mark_cut(decoded: Tensor, references: Tensor, max_length: int) -> Tensor:
    """Return decoded sequences of at most `max_length` tokens, except that one which was cut, and
    could equal a reference of that length, ends with a token that no reference has.

    Args:
        decoded: tokens `(N, L)`; a sequence that has not ended has `max_length + 1`.
        references: tokens `(N, R, T)`, padded with -100.
        max_length: maximum number of tokens.
    """
    if decoded.shape[1] <= max_length:
        return decoded
    is_as_long = ((references != IGNORED).sum(dim=2) == max_length).any(dim=1)
    is_wrong = (decoded[:, max_length] != IGNORED) & is_as_long
    last = torch.full_like(decoded[:, :1], IGNORED).masked_fill(is_wrong[:, None], NO_TOKEN)
    return torch.cat([decoded[:, :max_length], last], dim=1)


def split_references(targets: Tensor, end: int) -> Tensor:
    """Return the sequences of each target without their end, see `SequenceOutput.references`.

    Args:
        targets: tokens `(N, T)`; sequences follow one another, each with its `end`, then -100.
        end: the token after a sequence.
    """
    ends = targets == end
    numbers = ends.cumsum(dim=1) - ends.long()
    several = max(1, int(ends.sum(dim=1).max())) if len(targets) else 1
    is_token = (targets != IGNORED) & ~ends
    sequences: list[Tensor] = []
    for number in range(several):
        chosen = is_token & (numbers == number)
        if sequences:
            # A target with fewer sequences repeats its first one.
            missing = ends.sum(dim=1) <= number
            chosen = torch.where(missing[:, None], is_token & (numbers == 0), chosen)
        # Stable, so that tokens move to the front in their order.
        places = (~chosen).to(torch.int8).argsort(dim=1, stable=True)
        tokens = targets.gather(1, places)
        sequences.append(tokens.masked_fill(~chosen.gather(1, places), IGNORED))
    return torch.stack(sequences, dim=1)
