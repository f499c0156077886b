"""The order of the training samples as a table: the samples of each update, past and future."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasetrain.addons.experiments.fork.sample_updates import PassFinder
from phasetrain.addons.experiments.travel.past_run import PastRun
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.single_samples import SingleSamples
from phasetrain.data.samplers.locate import find_positions
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Pipeline
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks.ledger_content import hash_bytes
from phasetrain.tasks.build.data_builder import build_loader
from phasetrain.tasks.build.loading_builder import find_mixture

COLUMNS = {
    "update": "number of the update, from 1",
    "place": "place of the sample in the batch of all ranks, from 0",
    "epoch": "epoch, from 0",
    "position": "position in the epoch, from 0",
    "sample": "index in the dataset",
    "source": "label of its dataset in a mixture; null otherwise",
    "seed": "seed of its augmentation, in hex; null with a batch size for each source",
    "excluded": "1 if DATA.TRAIN.exclude leaves it out",
    "past": "1 if the run has made the update",
}
"""Column -> meaning."""

MAX_ROWS = 5_000_000
"""Maximum number of rows that are made at once."""


@dataclass(frozen=True)
class OrderTable:
    """Rows of the order, by update and place.

    Attributes:
        columns: name -> values, in the order of `COLUMNS`.
        checked: number of updates whose samples were compared with the ledger, up to `wrong`.
        wrong: the first update that has other samples in the ledger; None if there is none.
    """

    columns: dict[str, NDArray[np.generic]]
    checked: int
    wrong: int | None

    def __len__(self) -> int:
        return len(self.columns["update"])

    def list_rows(self) -> Iterator[tuple[object, ...]]:
        """Yield the rows; a value that does not exist is None."""
        values = [column.tolist() for column in self.columns.values()]
        for row in zip(*values, strict=True):
            yield tuple(None if value == "" else value for value in row)


class SampleOrder:
    """The order of the training samples of a run: a function of its plan and its seed.

    Args:
        past: the run.

    Raises:
        ConfigError: its samples have no ids (code `order.no_ids`).
    """

    def __init__(self, past: PastRun) -> None:
        self._past = past
        self._plan = past.plan
        split = past.data.get(TRAIN)
        if split is None or not self._plan.updates:
            raise ConfigError(
                f"{past.folder.path!r}: the run trains nothing, so no update has samples",
                code="order.no_ids",
            )
        dataset = split.reader.dataset
        if split.loader is not None or isinstance(dataset, ForwardDataset):
            raise ConfigError(
                f"{past.folder.path!r}: DATA.TRAIN is read by a custom loader or a stream, which "
                "chooses the samples itself, so they have no ids; use a dataset with an index",
                code="order.no_ids",
            )
        context = past.setup.builder().context
        self._sampler: PassFinder = build_loader(context, split, self._plan).sampler
        self._excluded = split.excluded_ids
        self._mixture = find_mixture(dataset)
        # The samples themselves are not read: the keys are a function of the draw alone.
        self._samples = SingleSamples(dataset, Pipeline(), FieldSelection(), context.seed, "raise")

    @property
    def updates(self) -> int:
        """Number of updates of the run, past and future."""
        return self._plan.updates

    def list_updates(self, first: int, last: int) -> OrderTable:
        """Return the samples of a range of updates.

        Raises:
            ConfigError: there are no such updates (code `order.no_such_update`), or they have more
                than MAX_ROWS samples (`order.too_many`).
        """
        if not 1 <= first <= last <= self.updates:
            raise ConfigError(
                f"updates {first} to {last}: the run has {self.updates}; expected a range within 1 "
                f"to {self.updates}",
                code="order.no_such_update",
            )
        parts: list[dict[str, NDArray[np.generic]]] = []
        rows = 0
        for phase, before in self._list_phases():
            begin = max(first - 1 - before, 0)
            end = min(last - before, phase.steps)
            if begin >= end:
                continue
            ordinals = np.arange(
                phase.offset + begin * phase.batch_size,
                phase.offset + min(end * phase.batch_size, phase.samples),
                dtype=np.int64,
            )
            rows += len(ordinals)
            if rows > MAX_ROWS:
                raise ConfigError(
                    f"updates {first} to {last}: they have more than {MAX_ROWS} samples; choose "
                    "fewer with --between A B",
                    code="order.too_many",
                )
            indices = self._sampler.find_pass(phase)[int(ordinals[0]) : int(ordinals[-1]) + 1]
            parts.append(self._make_rows(phase, before, ordinals, indices))
        return self._join(parts, range(first, last + 1))

    def find_sample(self, sample: int) -> OrderTable:
        """Return the updates that have a sample; in constant time per epoch if the order of the
        epoch can be inverted.

        Raises:
            ConfigError: the dataset has no such sample (code `order.no_such_sample`).
        """
        total = len(self._past.data[TRAIN].reader.dataset)
        if not 0 <= sample < total:
            raise ConfigError(
                f"--sample {sample}: the dataset has {total} samples; expected 0 to {total - 1}",
                code="order.no_such_sample",
            )
        wanted = np.array([sample], dtype=np.int64)
        parts: list[dict[str, NDArray[np.generic]]] = []
        epoch = -1
        positions = np.empty(0, dtype=np.int64)
        for phase, before in self._list_phases():
            if phase.epoch != epoch:
                positions = find_positions(self._sampler.find_pass(phase), wanted)
                epoch = phase.epoch
            end = phase.offset + phase.samples
            inside = positions[(positions >= phase.offset) & (positions < end)]
            # Always with the first phase, so that a sample that is never drawn has all columns and
            # no rows.
            if len(inside) or not parts:
                indices = np.full(len(inside), sample, dtype=np.int64)
                parts.append(self._make_rows(phase, before, inside, indices))
        # One update of each phase as well: with another order the sample may be in other updates.
        ends = [before + phase.steps for phase, before in self._list_phases()]
        updates = np.unique(np.concatenate([ends, *(part["update"] for part in parts)]))
        return self._join(parts, updates.tolist())

    def _list_phases(self) -> Iterator[tuple[Phase, int]]:
        """Yield the train phases, and the number of updates before each."""
        phases = self._plan.phases
        for index in np.flatnonzero(phases.is_train).tolist():
            yield phases[index], self._plan.updates_before(index)

    def _make_rows(
        self, phase: Phase, before: int, ordinals: Indices, indices: Indices
    ) -> dict[str, NDArray[np.generic]]:
        """Return the rows of some positions in the epoch of a phase, with the samples there."""
        steps, places = np.divmod(ordinals - phase.offset, phase.batch_size)
        updates = before + steps + 1
        count = len(ordinals)
        return {
            "update": updates,
            "place": places,
            "epoch": np.full(count, phase.epoch),
            "position": ordinals,
            "sample": indices,
            "source": self._name_sources(indices),
            "seed": self._make_seeds(phase, ordinals, indices),
            "excluded": np.isin(indices, self._excluded).astype(np.int64),
            "past": (updates <= self._past.last).astype(np.int64),
        }

    def _name_sources(self, indices: Indices) -> NDArray[np.str_]:
        if self._mixture is None:
            return np.full(len(indices), "")
        ends = np.cumsum(list(self._mixture.source_lengths.values()))
        labels = np.array(list(self._mixture.source_lengths))
        return labels[np.searchsorted(ends, indices, side="right")]

    def _make_seeds(self, phase: Phase, ordinals: Indices, indices: Indices) -> NDArray[np.str_]:
        if self._mixture is not None and self._mixture.batches is not None:
            return np.full(len(indices), "")  # the sources count their samples themselves
        draw = Draw(phase.data, phase.epoch, 0, indices, kept=ordinals)
        return np.array([f"{seed:016x}" for seed in self._samples.make_keys(draw).make_seeds()])

    def _join(
        self, parts: Sequence[dict[str, NDArray[np.generic]]], updates: Sequence[int]
    ) -> OrderTable:
        columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
        ledger = self._past.ledger
        checked = 0
        wrong = None
        for update in updates:
            if ledger is None or update not in ledger:
                continue
            checked += 1
            if hash_bytes(self._list_ids(update).tobytes()) != ledger[update].ids:
                wrong = update
                break
        return OrderTable(columns, checked, wrong)

    def _list_ids(self, update: int) -> Indices:
        """Return the samples of an update that are not excluded, as the ledger hashes them."""
        phases = self._plan.phases
        index = int(np.searchsorted(phases.updates_before, update, side="left")) - 1
        phase = phases[index]
        begin = phase.offset + (update - 1 - self._plan.updates_before(index)) * phase.batch_size
        end = min(begin + phase.batch_size, phase.offset + phase.samples)
        ids = self._sampler.find_pass(phase)[begin:end]
        return ids[~np.isin(ids, self._excluded)]
