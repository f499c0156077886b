"""Rules of batch sizes: micro-batches, accumulation, the world size, and the learning rate."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from phasetrain.config.rules.draft import ConfigDraft, list_numbers, nearest_divisors
from phasetrain.config.sections.keys import fits_section, read_section
from phasetrain.config.sections.optimizer import LrScalingSection

MICRO = "DATA.TRAIN.micro_batch_size"
BATCH = "DATA.TRAIN.batch_size"
ACCUMULATE = "OPTIMIZER.accumulate"
SHARDS = "DISTRIBUTED.virtual_shards"
_WHOLE_BATCH = "batch_size in one piece"

RULES: Mapping[str, float] = MappingProxyType({"linear": 1.0, "sqrt": 0.5})
"""Rule -> power of the ratio of batch sizes."""


def derive_batch_size(draft: ConfigDraft) -> None:
    """Derive the batch size of a mixture whose datasets have their own batch sizes."""
    datasets = draft.get("DATA.TRAIN.datasets")
    if draft.get("DATA.TRAIN.dataset") != "mixed" or not isinstance(datasets, Mapping):
        return
    sizes: dict[str, Any] = {
        label: section.get("batch_size")
        for label, section in datasets.items()
        if isinstance(section, Mapping)
    }
    # Whether each is a number, the dataset checks.
    if not sizes or any(type(size) is not int for size in sizes.values()):
        return
    total = sum(sizes.values())
    if draft.get(BATCH) == total:
        return
    first = f"DATA.TRAIN.datasets.{next(iter(sizes))}.batch_size"
    if draft.rank_of(BATCH) >= draft.rank_of(first):
        draft.reject(
            BATCH,
            f"{BATCH} = {draft.get(BATCH)} ({draft.layer_of(BATCH)}): the batch sizes of "
            f"DATA.TRAIN.datasets add up to {total}; leave it out",
        )
        return
    draft.set(BATCH, total, "the sum of DATA.TRAIN.datasets.*.batch_size")


def derive_micro_batches(draft: ConfigDraft, world_size: int | None) -> None:
    """Derive micro-batches so that batch_size = micro_batch_size x accumulate (x world size if both
    are given).

    Args:
        draft: the config.
        world_size: number of ranks; None if it does not matter, since nothing is trained.
    """
    batch = draft.get(BATCH)
    micro = draft.get(MICRO)
    accumulate = draft.get(ACCUMULATE)
    if micro is not None and accumulate is not None:
        if world_size is not None and micro * accumulate * world_size != batch:
            _reject_product(draft, micro, accumulate, world_size, batch)
    elif accumulate is not None:
        if draft.check_divides(ACCUMULATE, accumulate, BATCH, batch):
            draft.set(MICRO, batch // accumulate, f"batch_size {batch} / {ACCUMULATE} {accumulate}")
    elif micro is None:
        draft.set(MICRO, batch, _WHOLE_BATCH)
        draft.set(ACCUMULATE, 1, _WHOLE_BATCH)
    elif draft.check_divides(MICRO, micro, BATCH, batch):
        draft.set(ACCUMULATE, batch // micro, f"batch_size {batch} / micro_batch_size {micro}")


def derive_test_micro_batches(draft: ConfigDraft) -> None:
    """Derive micro_batch_size of test splits: batch_size, unless a divisor of it is given."""
    for split, section in draft.config["DATA"].items():
        if split == "TRAIN":
            continue
        path = f"DATA.{split}"
        batch = section["batch_size"]
        micro = section["micro_batch_size"]
        if micro is None:
            draft.set(f"{path}.micro_batch_size", batch, _WHOLE_BATCH)
        else:
            draft.check_divides(f"{path}.micro_batch_size", micro, f"{path}.batch_size", batch)


def share_batch(draft: ConfigDraft, world_size: int) -> None:
    """Divide the batch among ranks: batch_size = micro_batch_size x world size x accumulate, or
    into virtual shards if the reduction is ordered."""
    # Also on one rank, so that it sums the same shards as several ranks do.
    if draft.get("DISTRIBUTED.reduction") == "ordered":
        _share_virtual_shards(draft, world_size, draft.get(SHARDS))
        return
    if world_size == 1:
        return
    if draft.get("DISTRIBUTED.strategy") == "none":
        draft.reject(
            "DISTRIBUTED.strategy",
            f"DISTRIBUTED.strategy = 'none' and {world_size} processes: each would train its own "
            "model; use a strategy such as DISTRIBUTED.strategy=ddp, or start one process",
        )
    micro_given = draft.get_given(MICRO) is not None
    if micro_given and draft.get_given(ACCUMULATE) is not None:
        return  # derive_micro_batches has checked the product
    batch = draft.get(BATCH)
    micro = draft.get(MICRO)
    accumulate = draft.get(ACCUMULATE)
    if micro_given and accumulate % world_size == 0:
        why = f"batch_size {batch} / micro_batch_size {micro} / {world_size} processes"
        draft.set(ACCUMULATE, accumulate // world_size, why)
    elif not micro_given and micro % world_size == 0:
        why = f"batch_size {batch} / accumulate {accumulate} / {world_size} processes"
        draft.set(MICRO, micro // world_size, why)
    else:
        near = _suggest_sizes(micro, accumulate, world_size)
        if micro_given:
            near = _suggest_sizes(accumulate, micro, world_size)
        if micro_given and batch % world_size == 0:
            divisors = list_numbers(nearest_divisors(batch // world_size, micro))
            near += f"; nearest {MICRO}: {divisors}"
        draft.reject(
            BATCH,
            f"{BATCH} = {batch}: {world_size} processes cannot share {accumulate} x {micro} "
            f"samples ({ACCUMULATE} x {MICRO}) evenly; {near}",
            "config.indivisible",
        )


def _share_virtual_shards(draft: ConfigDraft, world_size: int, shards: int) -> None:
    """Derive batch_size = micro_batch_size x virtual_shards, with as many shards on each rank."""
    batch = draft.get(BATCH)
    # The sum over shards is a balanced binary tree, of which each rank computes a complete part.
    if shards & (shards - 1):
        near = 1 << (shards.bit_length() - 1)
        draft.reject(
            SHARDS,
            f"{SHARDS} = {shards}: expected a power of two, such as {near} or {2 * near}",
            "config.wrong_value",
        )
    elif shards % world_size:
        draft.reject(
            SHARDS,
            f"{SHARDS} = {shards} and {world_size} processes: DISTRIBUTED.reduction = 'ordered' "
            f"needs 1, 2, 4, ... processes, at most {shards}; start one of these numbers, or set "
            "DISTRIBUTED.reduction=native",
        )
    elif draft.check_divides(SHARDS, shards, BATCH, batch):
        for key in (MICRO, ACCUMULATE):
            value = draft.get_given(key)
            if value is not None:
                draft.reject(
                    key,
                    f"{key} = {value} and DISTRIBUTED.reduction = 'ordered': it is derived from "
                    f"{SHARDS}; leave {key} out",
                )
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        why = f"{SHARDS} = {shards}, {processes}"
        draft.set(MICRO, batch // shards, why)
        draft.set(ACCUMULATE, shards // world_size, why)


def _reject_product(
    draft: ConfigDraft, micro: int, accumulate: int, world_size: int, batch: int
) -> None:
    times = f" times {world_size} processes" if world_size > 1 else ""
    draft.reject(
        MICRO,
        f"{MICRO} = {micro} times {ACCUMULATE} = {accumulate}{times} is "
        f"{micro * accumulate * world_size}, not {BATCH} = {batch}; set only one of the two, so "
        "that the other one is derived",
        "config.indivisible",
    )


def _suggest_sizes(whole: int, each: int, world_size: int) -> str:
    """Return the nearest world sizes and batch sizes for a batch of `whole` x `each` samples."""
    sizes = list_numbers(nearest_divisors(whole, world_size))
    factors = (whole // world_size, whole // world_size + 1)
    batches = list_numbers([n * world_size * each for n in factors if n])
    return f"nearest numbers of processes that work: {sizes}; nearest batch sizes: {batches}"


def scale_learning_rate(draft: ConfigDraft) -> None:
    """Multiply OPTIMIZER.lr as auto_lr_scaling says. auto_lr_scaling is null afterwards, so that a
    config written by this run is not scaled again."""
    optimizer = draft.config["OPTIMIZER"]
    scaling = optimizer["auto_lr_scaling"]
    if scaling is None or not fits_section(LrScalingSection, scaling):
        return  # other keys and types are reported by the validation
    section = read_section(LrScalingSection, scaling)
    factor, why = lr_factor(section, draft.config["DATA"]["TRAIN"]["batch_size"])
    draft.set("OPTIMIZER.lr", optimizer["lr"] * factor, why)
    draft.set("OPTIMIZER.auto_lr_scaling", None, "it is in OPTIMIZER.lr")


def lr_factor(section: LrScalingSection, batch_size: int) -> tuple[float, str]:
    """Return the factor of the learning rate at a batch size, and the reason in words.

    Args:
        section: the rule, and the batch size for which the learning rate was chosen.
        batch_size: samples per update, over all ranks and micro-batches.
    """
    ratio = f"batch_size {batch_size} / {section.base_batch_size}"
    in_words = ratio if section.rule == "linear" else f"square root of {ratio}"
    factor = (batch_size / section.base_batch_size) ** RULES[section.rule]
    return factor, f"auto_lr_scaling: times {in_words}"
