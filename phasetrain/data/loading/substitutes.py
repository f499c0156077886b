"""Replaces or drops the samples of a draw that cannot be read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.data.bad_samples import (
    MAX_LISTED,
    BadPairs,
    SampleError,
    Unreadable,
    format_samples,
)
from phasetrain.data.loading.collate import describe_form, find_common_form
from phasetrain.data.loading.single_samples import Sample, SingleSamples
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Keys
from phasetrain.runtime.machine import mix_seed, reseed_all, seed_of

SUBSTITUTES = 10
"""Maximum number of substitutes that are tried for a bad sample."""


class BadSampleReplacer:
    """Replaces bad samples by others, which are a function of seed and draw too, or drops them.

    Args:
        samples: reads substitutes.
        dataset: the dataset that they come from.
        chosen: indices of the samples in use, ascending, if not all.
        transforms: number of transforms of a sample.
        seed: seed of the run.
        stacks: whether all samples of a batch need the same form.
        drops: drop bad samples instead.
    """

    def __init__(
        self,
        samples: SingleSamples,
        dataset: Any,
        chosen: Indices | None,
        transforms: int,
        *,
        seed: int,
        stacks: bool,
        drops: bool,
    ) -> None:
        self._samples = samples
        self._dataset = dataset
        self._chosen = chosen
        self._transforms = transforms
        self._seed = seed
        self._stacks = stacks
        self._drops = drops

    def replace_bad_samples(
        self, draw: Draw, found: Sequence[Sample | Unreadable]
    ) -> tuple[Tensor, list[Sample], BadPairs]:
        """Return indices and samples for a batch, and the bad samples that were met."""
        good = [sample for sample in found if not isinstance(sample, Unreadable)]
        wanted = find_common_form(good) if self._stacks else None
        ids: list[int] = []
        samples: list[Sample] = []
        bad: dict[int, str] = {}
        for ordinal, index, sample in zip(
            draw.ordinals.tolist(), draw.indices.tolist(), found, strict=True
        ):
            taken = index
            sample = _check_form(sample, wanted)
            if isinstance(sample, Unreadable):
                bad.setdefault(index, sample.reason)
                if self._drops:
                    continue
                taken, sample = self._find_substitute(draw, ordinal, index, wanted, bad)
                if self._stacks:  # no sample of the draw itself may have been good
                    wanted = describe_form(sample)
            ids.append(taken)
            samples.append(sample)
        return torch.tensor(ids, dtype=torch.int64), samples, tuple(bad.items())

    def _find_substitute(
        self, draw: Draw, ordinal: int, index: int, wanted: str | None, bad: dict[int, str]
    ) -> tuple[int, Sample]:
        """Return index and sample of a substitute for a bad sample; bad ones on the way are added
        to `bad`."""
        places: range | Indices = range(len(self._dataset))
        own = index
        if self._chosen is not None:
            places = self._chosen
            own = int(np.searchsorted(places, index))
        others = len(places) - 1
        for attempt in range(SUBSTITUTES if others else 0):
            word = seed_of(
                self._seed, "substitute", draw.split, draw.epoch, ordinal, index, attempt
            )
            # The bias of the remainder of a 64-bit word is negligible: below others / 2**64.
            other = word % others
            # The bad sample itself is skipped, so that it is never its own substitute.
            other = int(places[other + (other >= own)])
            key = Keys([mix_seed(word, other)])
            reseed_all(key.make_seeds()[0])
            sample = self._samples.read_sample(draw.split, other, key, self._transforms)
            sample = _check_form(sample, wanted)
            if not isinstance(sample, Unreadable):
                return other, sample
            bad.setdefault(other, sample.reason)
        where = f"DATA.{draw.split.upper()}"
        raise SampleError(
            f"{where}.on_bad_sample = 'substitute': sample {index} cannot be read, nor can up to "
            f"{SUBSTITUTES} substitutes; the last ones: "
            f"{format_samples(list(bad.items())[-MAX_LISTED:])}; fix the data, or set "
            f"{where}.on_bad_sample=drop",
            code="data.no_substitute",
        )


def _check_form(sample: Sample | Unreadable, wanted: str | None) -> Sample | Unreadable:
    """Return the sample if it has the required form, if any."""
    if isinstance(sample, Unreadable) or wanted is None or describe_form(sample) == wanted:
        return sample
    return Unreadable(f"it is {describe_form(sample)}, and the others of its batch are {wanted}")
