"""What MACHINE.compile may be, alone and beside other keys."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from phasetrain.config.problems import shown
from phasetrain.errors import did_you_mean

COMPILE: Mapping[str, Any] = MappingProxyType(
    {"backend": "inductor", "mode": None, "fullgraph": False, "options": {}}
)
"""Keys of MACHINE.compile, with what they are when not given."""


def compile_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return MACHINE.compile spelled out, and what is wrong with it: alone, or beside other keys of
    a config."""
    machine = config["MACHINE"]
    path = "MACHINE.compile"
    if isinstance(machine["compile"], str):
        given = {"backend": machine["compile"]}
    else:
        given = machine["compile"]
    spelled = {**COMPILE, **given}
    problems = [f"{path}.{problem}" for problem in _compile_problems(given, spelled)]
    if problems:
        return spelled, problems
    if (spelled["mode"] or "").startswith("max-autotune") and machine["deterministic"]:
        problems.append(
            f"{path}.mode = {spelled['mode']!r} and MACHINE.deterministic = true: it takes the kernels that are "
            "the fastest in this very attempt, and others have other bits; take another mode, or "
            "MACHINE.deterministic=false"
        )
    train = config["DATA"]["TRAIN"]
    distributed = config["DISTRIBUTED"]
    for key, value, wanted in (
        ("drop_last", False, "true"),
        ("on_bad_sample", "drop", "substitute"),
    ):
        if train[key] == value:
            problems.append(
                f"{path} and DATA.TRAIN.{key} = {shown(value)}: the model is compiled for one size of batches, and "
                f"this makes smaller ones; set DATA.TRAIN.{key}={wanted}, or leave out {path}"
            )
    if distributed["strategy"] in ("ddp", "zero") and distributed.get("bucket_cap_mb", 25) < 1:
        problems.append(
            f"{path} and DISTRIBUTED.bucket_cap_mb = {distributed['bucket_cap_mb']}: torch.compile expects buckets "
            "of at least 1 MiB"
        )
    return spelled, problems


def _compile_problems(given: dict[str, Any], spelled: dict[str, Any]) -> list[str]:
    """Return what is wrong with the mapping MACHINE.compile, key by key."""
    found = [
        f"{key}: no such key{did_you_mean(key, COMPILE) or '.'} It takes: {', '.join(COMPILE)}"
        for key in given.keys() - COMPILE.keys()
    ]
    expected = {"backend": str, "mode": str | None, "fullgraph": bool, "options": dict}
    words = {
        "backend": "a name",
        "mode": "a name or null",
        "fullgraph": "true or false",
        "options": "a mapping",
    }
    found += [
        f"{key} = {shown(spelled[key])}: expected {words[key]}"
        for key in COMPILE
        if not isinstance(spelled[key], expected[key])
    ]
    if not found and spelled["mode"] is not None and spelled["options"]:
        found.append(
            f"mode = {spelled['mode']!r} and options are both set; torch.compile takes one of the two"
        )
    return found
