"""A split whose transforms, order or batch size change from stage to stage (PHASES.stages)."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset

from phasetrain.data.bad_samples import OnBadSample
from phasetrain.data.loading.reader import Reader
from phasetrain.data.samplers.phase_sampler import Draw, PhaseSampler
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase


class StagedReader(Dataset[Batch]):
    """Reads each draw as its stage does; a draw knows its stage, so workers need not be told.

    Args:
        readers: of each stage.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self.readers = tuple(readers)

    @property
    def dataset(self) -> Any:
        """The samples, which are those of every stage."""
        return self.readers[0].dataset

    @property
    def on_bad_sample(self) -> OnBadSample:
        """What is done with a sample that cannot be read."""
        return self.readers[0].on_bad_sample

    @property
    def draws_at_random(self) -> bool:
        """Whether a part that is not ours may draw from the global generators while a sample is
        read."""
        return any(reader.draws_at_random for reader in self.readers)

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw, see `Reader`."""
        return self.readers[draw.stage][draw]

    def stand_in(self, draw: Draw) -> Batch:
        """Return a batch of which nothing counts, see `Reader`."""
        return self.readers[draw.stage].stand_in(draw)


class StagedSampler:
    """Draws for each phase as its stage does.

    Args:
        samplers: of each stage.
    """

    def __init__(self, samplers: Sequence[PhaseSampler]) -> None:
        self.samplers = tuple(samplers)

    @property
    def in_step(self) -> bool:
        """Whether others make the same number of draws for each step."""
        return self.samplers[0].in_step

    def steps(self, phase: Phase, start: int = 0) -> Iterator[list[Draw]]:
        """Yield the draws of each step of a phase, see `PhaseSampler`."""
        return self.samplers[phase.stage].steps(phase, start)
