"""Copies the batches of the next step to the device while those of this one are used."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phasetrain.engine.batch import Batch, mapped

Step = list[Batch]


def ahead(
    steps: Iterator[Step], copy: Callable[[Step], Step], arrive: Callable[[Step], Step]
) -> Iterator[Step]:
    """Yield the steps, the copy of each begun before the one before it is handed out.

    What goes wrong with a step is raised when it is its turn, so a step before it is still made.

    Args:
        steps: batches as they were read.
        copy: begins to copy them.
        arrive: waits for what `copy` returned, as late as can be.
    """
    waiting: Step | Exception | None = _begun(steps, copy)
    while waiting is not None:
        if isinstance(waiting, Exception):
            raise waiting
        following = _begun(steps, copy)
        yield arrive(waiting)
        waiting = following


def to_cuda(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """Yield the steps on a CUDA device, copied on a stream of their own; only pinned memory is
    copied meanwhile."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(batches: Step) -> Step:
        with torch.cuda.stream(side):
            return [batch.to(device) for batch in batches]

    def arrive(batches: Step) -> Step:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)

        def used_here(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                tensor.record_stream(
                    current
                )  # the side stream gets its memory back only after that
            return tensor

        for batch in batches:
            mapped((batch.input, batch.target, batch.mask), used_here)
        return batches

    return ahead(steps, copy, arrive)


def _begun(steps: Iterator[Step], copy: Callable[[Step], Step]) -> Step | Exception | None:
    """Return the next step with its copy begun, what went wrong with it, or None where there is
    none."""
    try:
        batches = next(steps, None)
        if batches is None:
            return None
        return copy(batches)
    except Exception as error:  # noqa: BLE001 - raised in its turn
        return error
