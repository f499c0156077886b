"""Sections EXTRACT and FIND: settings of RUN.engine=extract, find_lr and find_batch_size."""

from dataclasses import dataclass
from typing import Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class ExtractSection(Section):
    """Output of RUN.engine=extract."""

    layers: tuple[str, ...] = key(
        [], "names of modules of the model whose outputs are written", resume="free"
    )
    pool: Literal["none", "mean", "first"] = key(
        "none",
        "pooling of outputs with positions: none; the mean over (N, C, H, W) or over tokens "
        "(N, T, D); or the first token",
        resume="free",
    )
    predictions: bool = key(
        True,
        "write the output of the model as `scores`, and the class with the highest score as "
        "`label`",
        resume="free",
    )
    splits: tuple[str, ...] | None = key(
        None,
        "splits to extract, in lower case, such as [train, test]; null: all",
        resume="free",
    )
    weights: str = key(
        "model",
        "which weights of the checkpoint to use: `model`, or the name of an average such as `ema`",
        resume="free",
    )
    format: Literal["safetensors", "npz"] = key(
        "safetensors", "file format of the shards", resume="free"
    )
    rows_per_shard: int = key(
        8192, "samples per file, each of which is computed by one rank", resume="free", ge=1
    )
    dir: str | None = key(
        None,
        "output folder; null: extract/ and the name of the checkpoint, in the run folder",
        resume="free",
    )


@dataclass(frozen=True, kw_only=True)
class FindSection(Section):
    """Candidates of RUN.engine=find_lr and find_batch_size."""

    lr_from: float = key(1.0e-6, "first learning rate", resume="free", gt=0)
    lr_to: float = key(10.0, "last learning rate", resume="free", gt=0)
    updates: int = key(
        100,
        "number of updates, and of learning rates, which grow by a constant factor",
        resume="free",
        ge=10,
    )
    smoothing: float = key(
        0.9, "decay of the exponential moving average of the loss", resume="free", ge=0, lt=1
    )
    stop_at: float = key(
        4.0,
        "stop once the smoothed loss exceeds this multiple of its minimum",
        resume="free",
        gt=1,
    )
    batch_size_from: int = key(
        8, "first batch size in samples; each further one is twice as large", resume="free", ge=1
    )
    max_batch_size: int | None = key(
        4096,
        "largest batch size to try; null: until memory or data run out, which on the CPU uses all "
        "memory of the machine",
        resume="free",
        ge=1,
    )
    batch_updates: int = key(
        4, "updates per batch size; the first one is not timed", resume="free", ge=2
    )
