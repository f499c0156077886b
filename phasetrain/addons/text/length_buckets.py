"""Batches of samples of similar length."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasetrain.config.checks import check_at_least
from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.named import read_numbers
from phasetrain.data.samplers.permutation import ChunkedPass, Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder, make_shuffled
from phasetrain.data.samplers.source import SampleSource
from phasetrain.data.transforms.base import Keys
from phasetrain.runtime.machine import seed_of


@SAMPLERS.register("length_bucketed")
def make_length_bucketed(
    batch_size: int,
    source: SampleSource,
    *,
    file: str | None = None,
    pool: int = 100,
    max_tokens: int | None = None,
) -> SampleOrder:
    """Shuffled epochs in which the samples of a batch have similar lengths, to reduce padding.

    An epoch is cut into pools; the samples of a pool are sorted by length and cut into batches,
    which are shuffled. The last, smaller batch has the lengths of a random position in the last
    pool.

    Args:
        batch_size: fact; samples per update or test step, over all ranks.
        source: the samples, with `lengths()`.
        file: path of an array `(N,)` of lengths instead, `.npy` or text with a number per line.
        pool: batches per pool: larger pools make lengths more similar, smaller ones make batches
            more random.
        max_tokens: largest number of tokens of a forward pass, padding included (samples times the
            longest one): a batch with more is computed in several micro-batches. An update has its
            number of samples in any case. None: no limit.

    Raises:
        ValueError: there are no lengths, not one per sample, or one is above `max_tokens`.
        OSError: the file cannot be read.
    """
    check_at_least(1, pool=pool, max_tokens=max_tokens)
    lengths = (
        source.lengths() if file is None else source.select_values(read_numbers(file), "lengths")
    )
    if max_tokens is not None and lengths.max(initial=0) > max_tokens:
        longest = int(lengths.argmax())
        raise ValueError(
            f"max_tokens = {max_tokens}: sample {longest} has {lengths[longest]} tokens; raise the "
            "limit, or leave such samples out of the dataset"
        )
    return LengthBuckets(batch_size, lengths, pool, max_tokens)


class LengthBuckets:
    """The order of `make_length_bucketed`.

    Args:
        batch_size: samples per step, over all ranks.
        lengths: length of each sample.
        pool: batches per pool.
        max_tokens: largest number of tokens of a forward pass; None: no limit.
    """

    def __init__(
        self, batch_size: int, lengths: NDArray[Any], pool: int, max_tokens: int | None = None
    ) -> None:
        self.batch_size = batch_size
        self._lengths = lengths
        self._pool = pool * batch_size
        self._max_tokens = max_tokens

    @property
    def splits(self) -> bool:
        """Whether `split` has a limit of tokens."""
        return self._max_tokens is not None

    def split(self, indices: Indices, most: int) -> list[int]:
        """Return the sizes of the micro-batches of some samples: as many samples in order as stay
        within `max_tokens`, at most `most`."""
        sizes: list[int] = []
        longest = 0
        for length in self._lengths[indices].tolist():
            longest = max(longest, length)
            room = sizes[-1] + 1 if sizes else 0
            fits = self._max_tokens is None or room * longest <= self._max_tokens
            if sizes and room <= most and fits:
                sizes[-1] = room
            else:
                sizes.append(1)
                longest = length
        return sizes

    def __call__(self, length: int, seed: int) -> EpochOrder:
        """Return the indices of one epoch."""
        order = make_shuffled()(length, seed)

        def order_pool(begin: int, end: int) -> Indices:
            pool = order[begin:end]
            # Stable, so that samples of equal length keep their shuffled order with every version
            # of NumPy.
            pool = pool[np.argsort(self._lengths[pool], kind="stable")]
            full, rest = divmod(len(pool), self.batch_size)
            keys = Keys([seed_of(seed, "pool", begin // self._pool)])
            cut = int(keys.integers(0, full + 1)[0]) * self.batch_size
            last = pool[cut : cut + rest]
            pool = np.delete(pool, slice(cut, cut + rest))
            batches = pool.reshape(full, self.batch_size)[
                np.argsort(keys.fork(0).uniform(full)[0], kind="stable")
            ]
            return np.concatenate([batches.reshape(-1), last])

        return ChunkedPass(length, order_pool, self._pool)
