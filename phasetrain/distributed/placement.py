"""Where this process stands among those of its run, as torchrun or srun tell it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from phasetrain.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """The place of a process and where the processes of its run meet.

    Attributes:
        rank, size: number of this process, and of all.
        local_rank: its number on this machine.
        nodes: machines.
        address, port: where they meet.
        hosted: whether torchrun itself answers there; else process 0 does.
        attempt: how often the launcher has started the processes again.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    nodes: int = 1
    address: str = ""
    port: int = 0
    hosted: bool = False
    attempt: int = 0


def find_placement(environment: Mapping[str, str]) -> Placement:
    """Return the place of this process: that of torchrun, that of a step of srun, or the only one.

    Raises:
        ConfigError: the environment tells of several processes, and not where they meet, or numbers
            that are none.
    """
    if "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _of_srun(environment)
    return Placement()


def _of_torchrun(environment: Mapping[str, str]) -> Placement:
    size = _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0)
    if size > 1 and not environment.keys() >= {"RANK", "MASTER_ADDR", "MASTER_PORT"}:
        raise ConfigError(
            f"WORLD_SIZE = {size}: RANK, MASTER_ADDR and MASTER_PORT are expected beside it; start the run with "
            "torchrun, which sets them, or unset WORLD_SIZE"
        )
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK = {rank} and WORLD_SIZE = {size}: RANK is expected to be from 0 to {size - 1}"
        )
    return Placement(
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", 0),
        nodes=_number(environment, "GROUP_WORLD_SIZE", 1),
        address=environment.get("MASTER_ADDR", ""),
        port=_number(environment, "MASTER_PORT", 0),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _of_srun(environment: Mapping[str, str]) -> Placement:
    job = _number(environment, "SLURM_JOB_ID", 0)
    first = first_host(
        environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    )
    return Placement(
        rank=_number(environment, "SLURM_PROCID", 0),
        size=_number(environment, "SLURM_STEP_NUM_TASKS", 1),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        nodes=_number(environment, "SLURM_STEP_NUM_NODES", 1),
        address=environment.get("MASTER_ADDR") or first or "127.0.0.1",
        port=_number(
            environment,
            "MASTER_PORT",
            10_000 + (job * 7 + _number(environment, "SLURM_STEP_ID", 0)) % 20_000,
        ),
        attempt=_number(environment, "SLURM_RESTART_COUNT", 0),
    )


def first_host(nodes: str) -> str:
    """Return the first machine of a list as SLURM writes it.

    Example:
        >>> first_host("gpu[007-009,012],cpu1")
        'gpu007'
    """
    found = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if found is None:
        return ""
    head, ranges, tail = found.groups()
    return head + (re.split("[-,]", ranges)[0] if ranges else "") + tail


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} = {text!r} in the environment: expected a whole number"
        ) from None
