"""Copies the batches of the next step to the device while the current ones are used."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phasetrain.engine.batch import Batch
from phasetrain.runtime.nested import map_tensors

Step = list[Batch]


def prefetch_steps(
    steps: Iterator[Step], start_copy: Callable[[Step], Step], wait_for_copy: Callable[[Step], Step]
) -> Iterator[Step]:
    """Yield the steps; the copy of each begins before the previous one is handed out.

    An error in a step is raised when it is its turn, so the steps before it are still used.

    Args:
        steps: batches as they were read.
        start_copy: starts to copy them.
        wait_for_copy: makes the device wait for the result of `start_copy`.
    """
    waiting: Step | Exception | None = _start_copy(steps, start_copy)
    while waiting is not None:
        if isinstance(waiting, Exception):
            raise waiting
        # Before the next copy begins, so that the step does not wait for that one, too.
        current = wait_for_copy(waiting)
        waiting = _start_copy(steps, start_copy)
        yield current


def prefetch_to_cuda(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """Yield the steps on a CUDA device, copied on a side stream; only pinned memory is copied
    concurrently."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start_copy(batches: Step) -> Step:
        with torch.cuda.stream(side):
            return [batch.to(device) for batch in batches]

    def wait_for_copy(batches: Step) -> Step:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)

        def record_use(tensor: Tensor) -> Tensor:
            # Tells the allocator that the current stream uses the memory; otherwise the side stream
            # would overwrite it with the next batch.
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        for batch in batches:
            map_tensors((batch.input, batch.target, batch.mask), record_use)
        return batches

    return prefetch_steps(steps, start_copy, wait_for_copy)


def _start_copy(
    steps: Iterator[Step], start_copy: Callable[[Step], Step]
) -> Step | Exception | None:
    """Return the next step with its copy started, its error, or None at the end."""
    try:
        batches = next(steps, None)
        if batches is None:
            return None
        return start_copy(batches)
    except Exception as error:  # noqa: BLE001 - raised when it is its turn
        return error
