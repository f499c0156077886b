"""Section DISTRIBUTED: how several ranks train together."""

from dataclasses import dataclass
from typing import Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class DistributedSection(Section):
    """How several ranks train together."""

    # Free: strategies differ only in the rounding of sums, and other hardware may need another one.
    strategy: str = key(
        "ddp",
        "how ranks share an update; ignored with one rank. Its parameters are given next to it",
        resume="free",
    )
    reduction: Literal["native", "ordered"] = key(
        "native",
        "how gradients are summed over ranks: natively by the strategy, or in an order that does "
        "not depend on the world size, so that weights are bit-identical on 1, 2, 4, ... ranks",
        resume="adjustable",
    )
    # Forbidden: gradients are summed in the order of the shards, so their number shapes the bits.
    virtual_shards: int = key(
        8,
        "for reduction=ordered: shards into which each batch is split; a power of two, and at "
        "least the largest world size",
        resume="forbidden",
        ge=1,
    )
    sync_batch_norm: bool | int | Literal["node", "global", "apex"] = key(
        False,
        "synchronize batch norm statistics over all ranks (true, global), over groups of n ranks, "
        "or over the ranks of a node; needs CUDA if there are several ranks",
        resume="forbidden",
        ge=2,
    )
    communication: str = key(
        "none",
        "compression of gradients in `ddp`: `none`, or half precision in `fp16` or `bf16` (NCCL "
        "only)",
        resume="adjustable",
    )
    timeout_seconds: float = key(
        600, "seconds that a rank waits for another one before the run fails", resume="free", ge=1
    )
    debug: bool = key(
        False,
        "check before each collective call that all ranks make the same call; slow",
        resume="free",
    )
