"""Section EXTRACT: settings of RUN.engine=extract."""

from dataclasses import dataclass
from typing import Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class ExtractSection(Section):
    """Output of RUN.engine=extract."""

    layers: tuple[str, ...] = key(
        [], "names of modules of the model whose outputs are written", scope="run"
    )
    pool: Literal["none", "mean", "first"] = key(
        "none",
        "pooling of outputs with positions: none; the mean over (N, C, H, W) or over tokens "
        "(N, T, D); or the first token",
        scope="run",
    )
    predictions: bool = key(
        True,
        "write the output of the model as `scores`, and the class with the highest score as "
        "`label`",
        scope="run",
    )
    splits: tuple[str, ...] | None = key(
        None,
        "splits to extract, in lower case, such as [train, test]; null: all",
        scope="run",
    )
    weights: str = key(
        "model",
        "which weights of the checkpoint to use: `model`, or the name of an average such as `ema`",
        scope="run",
    )
    format: Literal["safetensors", "npz"] = key(
        "safetensors", "file format of the shards", scope="run"
    )
    rows_per_shard: int = key(
        8192,
        "samples per file; one rank computes a file",
        scope="run",
        ge=1,
    )
    dir: str | None = key(
        None,
        "output folder; null: extract/ and the name of the checkpoint, in the run folder",
        scope="run",
    )
