"""Reads batches with a number of samples of each source of a mixture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.data.bad_samples import BadPairs, OnBadSample, SampleError
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.engine.batch import Batch


class SourcesReader(Dataset[Batch]):
    """The batches of a mixture whose sources have their own batch sizes, transforms and collation.

    Input and target of a batch are mappings from the label of a source to its input and target.
    `ids` are indices of the mixture in the order of the draw, in which the sources take turns.

    Args:
        dataset: the mixture.
        readers: label -> reader of the source.
        shares: samples of each source in the smallest batch with the same proportions.
        on_bad_sample: policy for a sample that cannot be read: raise or substitute.
    """

    def __init__(
        self,
        dataset: Any,
        readers: Mapping[str, SampleReader],
        shares: Sequence[int],
        on_bad_sample: OnBadSample,
    ) -> None:
        self.dataset = dataset
        self.readers = dict(readers)
        self.on_bad_sample = on_bad_sample
        self._shares = dict(zip(readers, shares, strict=True))
        begins = np.cumsum([0, *dataset.source_lengths.values()]).tolist()
        # The last sum is the total length, at which no source begins.
        self._begins = dict(zip(dataset.source_lengths, begins, strict=False))

    @property
    def draws_at_random(self) -> bool:
        """Whether foreign code may draw from the global generators while a sample is read."""
        return any(reader.draws_at_random for reader in self.readers.values())

    def list_readers(self) -> list[SampleReader]:
        """Return the reader of each source."""
        return list(self.readers.values())

    def join_targets(self, targets: Sequence[Any]) -> dict[str, Any]:
        """Return label -> target of the source."""
        return dict(zip(self.readers, targets, strict=True))

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw.

        Raises:
            SampleError: a sample cannot be read, or the samples of a source do not form a batch;
                the source is named.
        """
        if not draw.counts:
            return self.padding(draw)
        inputs = {}
        targets = {}
        ids = torch.empty(len(draw.indices), dtype=torch.int64)
        bad: list[tuple[int, str]] = []
        for label, reader in self.readers.items():
            begin = self._begins[label]
            end = begin + self.dataset.source_lengths[label]
            here = (draw.indices >= begin) & (draw.indices < end)
            part = self._read_source(draw, label, reader, draw.indices[here] - begin)
            inputs[label] = part.input
            targets[label] = part.target
            # A substitute has another index than the draw.
            ids[torch.from_numpy(here)] = self._find_indices(label, reader, part.ids)
            bad += self._locate_bad(label, reader, part.bad)
        return Batch(inputs, targets, ids, len(ids), bad=tuple(bad))

    def padding(self, draw: Draw) -> Batch:
        """Return a fully masked batch."""
        return self[draw._replace(counts=True)].as_padding()

    def _read_source(self, draw: Draw, label: str, reader: SampleReader, indices: Indices) -> Batch:
        """Return the samples of a source at some indices of it."""
        if reader.chosen is not None:
            indices = reader.chosen[indices]
        # Counted within the source, as the keys of its samples are: a draw begins with a whole
        # number of periods before it.
        ordinal = draw.ordinal // sum(self._shares.values()) * self._shares[label]
        try:
            return reader[draw._replace(ordinal=ordinal, indices=indices)]
        except SampleError as error:
            message = f"{error} (in datasets.{label})"
            raise type(error)(message, code=error.code, problems=error.problems) from error

    def _find_indices(self, label: str, reader: SampleReader, ids: Tensor) -> Tensor:
        """Return the indices in the mixture of some indices in the dataset of a source."""
        if reader.chosen is not None:
            ids = torch.from_numpy(np.searchsorted(reader.chosen, ids.numpy()))
        indices: Tensor = ids + self._begins[label]
        return indices

    def _locate_bad(self, label: str, reader: SampleReader, bad: BadPairs) -> BadPairs:
        if not bad:
            return ()
        ids = self._find_indices(label, reader, torch.tensor([index for index, _ in bad]))
        return tuple(
            (index, f"{reason} (in datasets.{label})")
            for index, (_, reason) in zip(ids.tolist(), bad, strict=True)
        )
