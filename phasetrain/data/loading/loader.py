"""Batches of one split for the whole run, read in this process or by workers that live as long as
the run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from phasetrain.data.bad_samples import BadSamples, SampleError, format_samples
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.per_stage import PerStageReader, PerStageSampler
from phasetrain.data.loading.reader import BatchReader
from phasetrain.data.loading.settings import LoaderSettings
from phasetrain.data.samplers.phase_sampler import Draw, PhaseSampler
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase, Plan

if TYPE_CHECKING:
    from phasetrain.data.loading.worker_stream import WorkerStream


class StreamPosition:
    """Saves the position after the batches that were handed out, and restores it.

    Positions come with the batches, because workers read ahead, each with its own copy of the
    dataset. With another world size every rank begins at the position of rank 0, which is before
    the samples of all ranks, and reads the few samples to its own.

    Args:
        dataset: the dataset of this process.
    """

    is_optional = True

    def __init__(self, dataset: ForwardDataset) -> None:
        self._dataset = dataset
        self._latest: Mapping[str, Any] | None = None

    def record(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield the steps, and remember the position after each."""
        for batches in steps:
            positions = [batch.position for batch in batches if batch.position is not None]
            if positions:
                # The furthest one: a rank without samples of its own reads those of another one.
                self._latest = max(positions, key=lambda position: int(position["next"]))
            yield batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position; empty before the first batch."""
        if self._latest is None:
            return {}
        return dict(self._latest)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; the dataset begins there when a batch is requested."""
        self._latest = dict(state) or None
        if self._latest is not None:
            self._dataset.load_position(self._latest)

    rank_state = state_dict
    load_rank_state = load_state_dict

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Keep the position of rank 0, which `load_state_dict` has loaded."""


class PhaseLoader:
    """The batches of one split.

    Workers get one stream of draws over all coming phases of the split, so they live, and read
    ahead, across the ends of phases and epochs. Batches that were only read ahead are not part of
    the run state.

    Args:
        reader: makes the batch of a draw.
        sampler: the draws of each phase.
        plan: the phases of the split in order.
        settings: workers and the like.

    Attributes:
        plan: the phases; may be replaced by a plan that is equal up to the current position.
        bad: the bad samples in the batches that were handed out; None if the reader raises.
        stop_asked: returns the reason to stop the run, such as SIGTERM, or an empty string; called
            while waiting for workers.
    """

    def __init__(
        self,
        reader: BatchReader | PerStageReader,
        sampler: PhaseSampler | PerStageSampler,
        plan: Plan,
        settings: LoaderSettings,
    ) -> None:
        self.reader = reader
        self.sampler = sampler
        self.plan = plan
        self.settings = settings
        policy = reader.on_bad_sample
        self.bad = None if policy == "raise" else BadSamples(policy, settings.bad_sample_budget)
        self.stop_asked: Callable[[], str] = str
        self._stream: WorkerStream | None = None
        self._stream_plan = plan  # whose phases the stream reads ahead
        self._next: tuple[int, int] | None = None  # phase and step of the next batch of the stream
        self._position: StreamPosition | None = None

    def batches(self, phase: Phase, start: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of `phase` from step `start` on.

        A micro-batch whose samples were all dropped is skipped, or replaced by a fully masked
        padding batch if all ranks have to make the same number.

        Raises:
            SampleError: a sample could not be read, bad samples exceed the budget or are all that a
                step has, or a worker died or did not answer in time.
        """
        if self.settings.workers:
            steps = self._read_by_workers(phase, start)
        else:
            steps = self._read_here(phase, start)
        if self.settings.device is not None:
            from phasetrain.data.loading.device_prefetch import prefetch_to_cuda

            steps = prefetch_to_cuda(steps, self.settings.device)
        # After prefetching, like the bad samples below.
        if (stream := self._get_stream_position()) is not None:
            steps = stream.record(steps)
        # Bad samples are counted after prefetching: the count is part of the run state, so it must
        # cover the batches that were used, not the batches that were read ahead.
        if self.bad is None:
            return steps
        if self.bad.policy == "drop" and self.sampler.in_step:
            # The sampler repeats its draws, because they are a pure function of phase and step, so
            # nothing has to be passed back from the workers.
            draws = self.sampler.steps(phase, start)
            return map(partial(self._replace_dropped, phase.data, self.bad), steps, draws)
        return map(partial(self._remove_dropped, phase.data, self.bad), steps)

    @property
    def may_lack_samples(self) -> bool:
        """Whether a step may have fewer samples than the plan knows."""
        drops = self.bad is not None and self.bad.policy == "drop"
        return drops or self.sampler.excluded is not None

    def find_first_draw(self, phase: Phase) -> Draw:
        """Return the first draw of a phase; a step whose samples are all excluded has none."""
        return next(draws[0] for draws in self.sampler.steps(phase) if draws)

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the workers; empty if this process reads."""
        if self._stream is None:
            return []
        return self._stream.worker_ids

    def stateful(self) -> dict[str, Any]:
        """Return the objects with state by the suffix of the split's name in a checkpoint."""
        by_suffix: dict[str, Any] = {}
        if self.bad is not None:
            by_suffix[""] = self.bad
        if (stream := self._get_stream_position()) is not None:
            by_suffix[".stream"] = stream
        return by_suffix

    def read(self, draw: Draw) -> Batch:
        """Return the batch of a draw, read in this process; fully masked if all samples are
        dropped."""
        batch = self._read_single_threaded(draw, self.reader.__getitem__)
        if batch.input is not None:
            return batch
        return self._read_single_threaded(draw, self.reader.padding)

    def close(self) -> None:
        """Stop the workers; a worker that hangs is killed."""
        stream = self._stream
        self._stream = None
        self._next = None
        if stream is not None:
            stream.close()

    def _get_stream_position(self) -> StreamPosition | None:
        """Return the position of a dataset that is read forward, if it saves one."""
        dataset = self.reader.dataset
        # Asked each time: the check before the first step may find that positions are wrong.
        if not isinstance(dataset, ForwardDataset) or not dataset.saves_position:
            return None
        if self._position is None:
            self._position = StreamPosition(dataset)
        return self._position

    def _replace_dropped(
        self, split: str, bad: BadSamples, batches: list[Batch], draws: list[Draw]
    ) -> list[Batch]:
        """Count the bad samples of a step, and replace dropped micro-batches by padding."""
        bad.add(split, [pair for batch in batches for pair in batch.bad])
        return [
            batch
            if batch.input is not None
            else self._read_single_threaded(draw, self.reader.padding)
            for batch, draw in zip(batches, draws, strict=True)
        ]

    def _remove_dropped(self, split: str, bad: BadSamples, batches: list[Batch]) -> list[Batch]:
        """Count the bad samples of a step, and remove dropped micro-batches."""
        met = [pair for batch in batches for pair in batch.bad]
        if not met:
            return batches
        remaining = [batch for batch in batches if batch.input is not None]
        if not remaining:
            where = f"DATA.{split.upper()}"
            raise SampleError(
                f"{where}.on_bad_sample = 'drop': none of the samples of a step can be read: "
                f"{format_samples(met)}; fix the data, use larger batches, or set "
                f"{where}.on_bad_sample=substitute",
                code="data.empty_step",
            )
        bad.add(split, met)
        return remaining

    def _read_here(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        read = self.reader.__getitem__
        if self.reader.draws_at_random:
            read = partial(self._read_single_threaded, read=read)
        for draws in self.sampler.steps(phase, start):
            yield [read(draw) for draw in draws]

    def _read_by_workers(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        from phasetrain.data.loading.worker_stream import WorkerStream

        if self._stream is None or not self._continues_at(phase, start):
            self.close()
            draws = _UpcomingDraws(self.sampler, self.plan, phase, start)
            self._stream_plan = self.plan
            # Through a lambda, because `stop_asked` may be replaced while the workers live.
            self._stream = WorkerStream(
                self.reader, draws, phase.data, self.settings, lambda: self.stop_asked()
            )
        # The stream of the workers is flat: the sampler, asked once more, says where each step
        # ends.
        for step, of_step in enumerate(self.sampler.steps(phase, start), start + 1):
            assert self._stream is not None, "the loader was closed"
            batches = [self._stream.receive() for _ in of_step]
            self._next = (phase.index, step)
            yield batches

    def _continues_at(self, phase: Phase, start: int) -> bool:
        """Return whether the next batch of the stream is the one of this phase and step."""
        if self._next is None:
            return False
        index, step = self._next
        if index == phase.index:
            return step == start
        plan = self._stream_plan
        ended = plan.phases[index]
        following = next(islice(plan.following(ended), 1, None), None)
        return start == 0 and step == ended.steps and following == phase

    def _read_single_threaded(self, draw: Draw, read: Callable[[Draw], Batch]) -> Batch:
        # Workers have one thread. With more, torch's sums over large tensors differ in the last
        # bits, and batches would depend on the number of workers.
        threads = torch.get_num_threads()
        if threads == 1:
            return read(draw)
        torch.set_num_threads(1)
        try:
            return read(draw)
        finally:
            torch.set_num_threads(threads)


class _UpcomingDraws(Sampler[Draw]):
    """The draws of a phase from a step on, and of all later phases of its split."""

    def __init__(
        self, sampler: PhaseSampler | PerStageSampler, plan: Plan, phase: Phase, start: int
    ) -> None:
        self._sampler = sampler
        self._plan = plan
        self._phase = phase
        self._start = start

    def __iter__(self) -> Iterator[Draw]:
        start = self._start
        for phase in self._plan.following(self._phase):
            for draws in self._sampler.steps(phase, start):
                # No end between phases: workers read the next phase ahead while this one is used.
                yield from draws
            start = 0
