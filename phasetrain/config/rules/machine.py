"""Rules of sections MACHINE and DISTRIBUTED: device, precision, compilation and communication."""

from collections.abc import Mapping
from typing import Any

from phasetrain.config.problems import format_value
from phasetrain.config.rules.draft import ConfigDraft
from phasetrain.config.sections.keys import fits_section, section_keys
from phasetrain.config.sections.machine import CompileSection

_COMPILE = "MACHINE.compile"

_COMMUNICATION = "DISTRIBUTED.communication"

_SYNC = "DISTRIBUTED.sync_batch_norm"


def derive_device(draft: ConfigDraft) -> None:
    """Replace MACHINE.device = auto by the device of this machine."""
    if draft.config["MACHINE"]["device"] == "auto":
        draft.set("MACHINE.device", draft.device, "the best device of this machine")


def derive_precision(draft: ConfigDraft) -> None:
    """Replace settings of Apex by torch's equivalents, and reject tf32 except on CUDA."""
    machine = draft.config["MACHINE"]
    if machine["precision"] == "apex":
        draft.set("MACHINE.precision", "fp16", "torch.amp replaces the mixed precision of Apex")
    if machine["precision"] == "tf32" and draft.device != "cuda":
        draft.reject(
            "MACHINE.precision",
            f"MACHINE.precision = 'tf32' and MACHINE.device = {draft.device!r}: only CUDA "
            "devices support it; use fp32",
        )
    if draft.config["DISTRIBUTED"]["sync_batch_norm"] == "apex":
        draft.set("DISTRIBUTED.sync_batch_norm", "global", "torch's replaces that of Apex")


def derive_compile(draft: ConfigDraft) -> None:
    """Complete MACHINE.compile, and reject settings with which results vary between attempts, or
    batches vary in size."""
    settings = draft.config["MACHINE"]["compile"]
    if settings is False:
        draft.config["MACHINE"]["compile"] = None
    if settings in (None, False):
        return
    if settings is True:
        settings = {}
    if isinstance(settings, str):
        settings = {"backend": settings}
    if not fits_section(CompileSection, settings):
        return  # reported by the validation
    defaults = {name: key.default for name, key in section_keys(CompileSection, _COMPILE).items()}
    complete = {**defaults, **settings}
    problem_count = len(draft.problems)
    _check_compile(draft, complete)
    if len(draft.problems) == problem_count and complete != draft.config["MACHINE"]["compile"]:
        draft.set(_COMPILE, complete, "completed with the defaults")


def _check_compile(draft: ConfigDraft, complete: Mapping[str, Any]) -> None:
    mode = complete["mode"]
    if mode is not None and complete["options"]:
        draft.reject(
            f"{_COMPILE}.mode",
            f"{_COMPILE}.mode = {mode!r} and options are both set; torch.compile takes one of "
            "the two",
        )
        return
    # Autotuning times kernels and keeps the fastest one, which may differ from attempt to attempt.
    if (mode or "").startswith("max-autotune") and draft.config["MACHINE"]["deterministic"]:
        draft.reject(
            f"{_COMPILE}.mode",
            f"{_COMPILE}.mode = {mode!r} and MACHINE.deterministic = true: autotuning picks the "
            "kernels that are fastest in this attempt, and other kernels give other bits; use "
            "another mode, or MACHINE.deterministic=false",
        )
    train = draft.config["DATA"]["TRAIN"]
    fixes = (("drop_last", False, "true"), ("on_bad_sample", "drop", "substitute"))
    for key, value, wanted in fixes:
        if train[key] == value:
            draft.reject(
                f"DATA.TRAIN.{key}",
                f"{_COMPILE} and DATA.TRAIN.{key} = {format_value(value)}: the model is compiled "
                f"for one batch size, and this gives smaller batches; set DATA.TRAIN.{key}="
                f"{wanted}, or leave out {_COMPILE}",
            )
    distributed = draft.config["DISTRIBUTED"]
    if distributed["strategy"] in ("ddp", "zero") and distributed.get("bucket_cap_mb", 25) < 1:
        draft.reject(
            "DISTRIBUTED.bucket_cap_mb",
            f"{_COMPILE} and DISTRIBUTED.bucket_cap_mb = {distributed['bucket_cap_mb']}: "
            "torch.compile expects buckets of at least 1 MiB",
        )


def check_distributed(draft: ConfigDraft, world_size: int) -> None:
    """Reject settings that the device cannot do, or that break the promise of the reduction."""
    section = draft.config["DISTRIBUTED"]
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
    if section["sync_batch_norm"] and world_size > 1 and draft.device != "cuda":
        draft.reject(
            _SYNC,
            f"{_SYNC} = {format_value(section['sync_batch_norm'])} and MACHINE.device = "
            f"{draft.device!r}: torch synchronizes batch norm over several processes on CUDA "
            "devices only; leave it out here",
        )


def _check_communication(draft: ConfigDraft, world_size: int) -> None:
    method = draft.config["DISTRIBUTED"]["communication"]
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
    elif method == "bf16" and world_size > 1 and draft.device != "cuda":
        draft.reject(
            _COMMUNICATION,
            f"{_COMMUNICATION} = 'bf16' and MACHINE.device = {draft.device!r}: only NCCL, between "
            "CUDA devices, adds bf16 gradients; use fp16 or none",
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
