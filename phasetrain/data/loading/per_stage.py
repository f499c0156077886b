"""A split whose transforms, order or batch size change between stages (PHASES.stages)."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset

from phasetrain.data.bad_samples import OnBadSample
from phasetrain.data.loading.reader import BatchReader
from phasetrain.data.samplers.excluded import ExcludedSamples
from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.phase_sampler import Draw, PhaseSampler
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase


class PerStageReader(Dataset[Batch]):
    """Reads each draw with the reader of its stage; the draw has its stage, so workers need no
    message.

    Args:
        readers: reader of each stage.
    """

    def __init__(self, readers: Sequence[BatchReader]) -> None:
        self.readers = tuple(readers)

    @property
    def dataset(self) -> Any:
        """The samples, the same in every stage."""
        return self.readers[0].dataset

    @property
    def on_bad_sample(self) -> OnBadSample:
        """Policy for a sample that cannot be read."""
        return self.readers[0].on_bad_sample

    @property
    def draws_at_random(self) -> bool:
        """Whether foreign code may draw from the global generators while a sample is read."""
        return any(reader.draws_at_random for reader in self.readers)

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw, see `SampleReader`."""
        return self.readers[draw.stage][draw]

    def padding(self, draw: Draw) -> Batch:
        """Return a fully masked batch, see `SampleReader`."""
        return self.readers[draw.stage].padding(draw)


class PerStageSampler:
    """Draws for each phase with the sampler of its stage.

    Args:
        samplers: sampler of each stage.
    """

    def __init__(self, samplers: Sequence[PhaseSampler]) -> None:
        self.samplers = tuple(samplers)

    @property
    def in_step(self) -> bool:
        """Whether all ranks make the same number of draws per step."""
        return self.samplers[0].in_step

    @property
    def excluded(self) -> ExcludedSamples | None:
        """The samples that are left out of their batches, the same in every stage."""
        return self.samplers[0].excluded

    def find_pass(self, phase: Phase) -> EpochOrder:
        """Return the indices of the epoch of a phase."""
        return self.samplers[phase.stage].find_pass(phase)

    def steps(self, phase: Phase, start: int = 0) -> Iterator[list[Draw]]:
        """Yield the draws of each step of a phase, see `PhaseSampler`."""
        return self.samplers[phase.stage].steps(phase, start)
