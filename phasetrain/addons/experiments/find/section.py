"""Section FIND: settings of RUN.engine=find_lr and find_batch_size."""

from dataclasses import dataclass

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class FindSection(Section):
    """Candidates of RUN.engine=find_lr and find_batch_size."""

    lr_from: float = key(1.0e-6, "first learning rate", scope="run", gt=0)
    lr_to: float = key(10.0, "last learning rate", scope="run", gt=0)
    updates: int = key(
        100,
        "number of updates, and of learning rates, which grow by a constant factor",
        scope="run",
        ge=10,
    )
    smoothing: float = key(
        0.9,
        "decay of the exponential moving average of the loss",
        scope="run",
        ge=0,
        lt=1,
    )
    stop_at: float = key(
        4.0,
        "stop once the smoothed loss exceeds this multiple of its minimum",
        scope="run",
        gt=1,
    )
    batch_size_from: int = key(
        8,
        "first batch size in samples; each further one is twice as large",
        scope="run",
        ge=1,
    )
    max_batch_size: int | None = key(
        4096,
        "largest batch size to try; null: until memory or data run out, which on the CPU uses all "
        "memory of the machine",
        scope="run",
        ge=1,
    )
    batch_updates: int = key(
        4, "updates per batch size; the first one is not timed", scope="run", ge=2
    )
