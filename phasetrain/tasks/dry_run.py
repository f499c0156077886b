"""Passes without an update, which leave the task as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

from phasetrain.distributed import BufferSnapshot
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import Position
from phasetrain.optim import Updater
from phasetrain.tasks.base import Task
from phasetrain.tasks.state import PerRank


def warm_up(task: Task, phase: Phase) -> None:
    """Run two passes and drop their gradients, if the strategy's first passes differ from others.

    DistributedDataParallel rebuilds its buckets after the first pass, which changes the order of
    additions; a resumed run would otherwise repeat that in the middle of the training. The passes
    use the first micro-batch of the phase. Weights, buffers and all else stay as they are.

    Args:
        task: task before its first step.
        phase: the train phase to come.
    """
    strategy = task.strategy
    if not strategy.needs_warmup or not phase.steps:
        return
    task.begin(phase, fresh=False)
    loader = task.parts.loaders[phase.split]
    # Read here: asking the loader would start its workers before the run begins.
    batch = loader.read(loader.find_first_draw(phase))
    with preserve_state(task):
        # The first pass makes DDP rebuild its buckets, the second one uses them for the first time.
        for _ in range(2):
            with strategy.micro_batch(last=True):
                out = task.run_forward(batch, Position(phase.split, 0, phase.first, 0.0))
                out.loss.backward()  # type: ignore[no-untyped-call]
            for updater in task.updaters.values():
                updater.drop_gradients()


@contextmanager
def preserve_state(task: Task) -> Iterator[None]:
    """Drop the gradients of passes without an update, and undo every change that they make.

    Passes do not touch weights; they change buffers, and the state of custom parts.
    """
    parts = task.parts
    modules = (parts.model, parts.loss, *parts.losses)
    buffers = BufferSnapshot(*modules)
    untouched = {id(part) for part in modules}
    for average in parts.averages.values():
        untouched |= {id(part) for part in average.stateful().values()}
    others = [
        part
        for part in task.stateful().values()
        if id(part) not in untouched and not isinstance(part, Updater | PerRank)
    ]
    # `state_dict` refers to live tensors, which the passes would change.
    states = [deepcopy(part.state_dict()) for part in others]
    try:
        yield
    finally:
        for module in modules:
            # Not through the updater: under fsdp the optimizer holds other tensors.
            module.zero_grad()
        buffers.restore()
        for part, state in zip(others, states, strict=True):
            part.load_state_dict(state)
