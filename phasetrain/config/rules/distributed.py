"""Rules of section DISTRIBUTED: compatibility with the device and the reduction."""

from phasetrain.config.problems import format_value
from phasetrain.config.rules.draft import ConfigDraft

_COMMUNICATION = "DISTRIBUTED.communication"
_SYNC = "DISTRIBUTED.sync_batch_norm"


def check_distributed(draft: ConfigDraft, world_size: int) -> None:
    """Reject settings that the device cannot do, or that break the promise of the reduction."""
    section = draft.config["DISTRIBUTED"]
    device = draft.config["MACHINE"]["device"]
    _check_communication(draft, world_size)
    if section["reduction"] == "ordered":
        _check_ordered(draft)
    compiles = draft.config["MACHINE"]["compile"] is not None
    if compiles and world_size > 1 and section["strategy"] == "sharded_ddp":
        draft.reject(
            "MACHINE.compile",
            "MACHINE.compile and DISTRIBUTED.strategy = 'sharded_ddp': fairscale does not support "
            "torch.compile; use the strategy zero or ddp, or leave out MACHINE.compile",
        )
    if (
        draft.config["MACHINE"]["channels_last"]
        and world_size > 1
        and section["strategy"] == "fsdp"
    ):
        draft.reject(
            "MACHINE.channels_last",
            "MACHINE.channels_last = true and DISTRIBUTED.strategy = 'fsdp': torch shards weights "
            "in the usual layout only; use the strategy zero or ddp, or leave out "
            "MACHINE.channels_last",
        )
    if section["sync_batch_norm"] and world_size > 1 and device != "cuda":
        draft.reject(
            _SYNC,
            f"{_SYNC} = {format_value(section['sync_batch_norm'])} and MACHINE.device = "
            f"{device!r}: torch synchronizes batch norm over several processes on CUDA devices "
            "only; leave it out here",
        )


def _check_communication(draft: ConfigDraft, world_size: int) -> None:
    method = draft.config["DISTRIBUTED"]["communication"]
    device = draft.config["MACHINE"]["device"]
    if method == "powersgd":
        draft.reject(
            _COMMUNICATION,
            f"{_COMMUNICATION} = 'powersgd': each process keeps an error buffer as large as the "
            "gradient, which no checkpoint holds, so no resume would be exact; use fp16 or bf16",
            "config.wrong_value",
        )
    elif method not in ("none", "fp16", "bf16"):
        layer = draft.layer_of(_COMMUNICATION)
        draft.reject(
            _COMMUNICATION,
            f"{_COMMUNICATION} = {method!r} ({layer}): expected none, fp16 or bf16",
            "config.wrong_value",
        )
    elif method == "bf16" and world_size > 1 and device != "cuda":
        draft.reject(
            _COMMUNICATION,
            f"{_COMMUNICATION} = 'bf16' and MACHINE.device = {device!r}: only NCCL, between CUDA "
            "devices, adds bf16 gradients; use fp16 or none",
        )


def _check_ordered(draft: ConfigDraft) -> None:
    section = draft.config["DISTRIBUTED"]
    keys = {
        "communication": section["communication"] != "none",
        "sync_batch_norm": bool(section["sync_batch_norm"]),
    }
    for key, is_set in keys.items():
        if is_set:
            draft.reject(
                f"DISTRIBUTED.{key}",
                f"DISTRIBUTED.{key} = {format_value(section[key])} and DISTRIBUTED.reduction = "
                "'ordered': the weights would depend on the number of processes, and `ordered` "
                "promises that they do not; leave one of the two out",
            )
