"""Rank, world size and rendezvous address of this process, as torchrun or srun set them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from phasetrain.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Rank of a process, and the address at which the ranks of its run meet.

    Attributes:
        rank: rank of this process.
        size: world size.
        local_rank: rank of this process on its machine.
        nodes: number of machines.
        address: host of the rendezvous store.
        port: port of the rendezvous store.
        hosted: whether torchrun itself serves the store; else rank 0 does.
        attempt: how often the launcher has restarted the processes.
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
    """Return the placement of this process under torchrun, under srun, or as the only process.

    Raises:
        ConfigError: the environment describes several processes without an address, or a variable
            is not a number.
    """
    # torchrun first: started by srun, it inherits SLURM's variables, which describe torchrun.
    if "WORLD_SIZE" in environment:
        return _torchrun_placement(environment)
    # A batch script has SLURM_NTASKS but no step: only processes of a step are ranks.
    if _parse_int(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _srun_placement(environment)
    return Placement()


def _torchrun_placement(environment: Mapping[str, str]) -> Placement:
    size = _parse_int(environment, "WORLD_SIZE", 1)
    rank = _parse_int(environment, "RANK", 0)
    if size > 1 and not environment.keys() >= {"RANK", "MASTER_ADDR", "MASTER_PORT"}:
        raise ConfigError(
            f"WORLD_SIZE = {size}: RANK, MASTER_ADDR and MASTER_PORT are expected as well; start "
            "the run with torchrun, which sets them, or unset WORLD_SIZE",
            code="environment.incomplete",
        )
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK = {rank} and WORLD_SIZE = {size}: RANK is expected to be from 0 to {size - 1}",
            code="environment.out_of_range",
        )
    return Placement(
        rank=rank,
        size=size,
        local_rank=_parse_int(environment, "LOCAL_RANK", 0),
        nodes=_parse_int(environment, "GROUP_WORLD_SIZE", 1),
        address=environment.get("MASTER_ADDR", ""),
        port=_parse_int(environment, "MASTER_PORT", 0),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_parse_int(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _srun_placement(environment: Mapping[str, str]) -> Placement:
    job = _parse_int(environment, "SLURM_JOB_ID", 0)
    step = _parse_int(environment, "SLURM_STEP_ID", 0)
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # srun sets no port. One computed from job and step is the same on all ranks, and differs
    # between jobs that share a machine.
    port = 10_000 + (job * 7 + step) % 20_000
    return Placement(
        rank=_parse_int(environment, "SLURM_PROCID", 0),
        size=_parse_int(environment, "SLURM_STEP_NUM_TASKS", 1),
        local_rank=_parse_int(environment, "SLURM_LOCALID", 0),
        nodes=_parse_int(environment, "SLURM_STEP_NUM_NODES", 1),
        address=environment.get("MASTER_ADDR") or first_host(hosts) or "127.0.0.1",
        port=_parse_int(environment, "MASTER_PORT", port),
        attempt=_parse_int(environment, "SLURM_RESTART_COUNT", 0),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list in SLURM's notation.

    Example:
        >>> first_host("gpu[007-009,012],cpu1")
        'gpu007'
    """
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", hosts)
    if match is None:
        return ""
    head, ranges, tail = match.groups()
    if not ranges:
        return head + tail
    return head + re.split("[-,]", ranges)[0] + tail


def _parse_int(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} = {text!r} in the environment: expected a whole number",
            code="environment.wrong_type",
        ) from None
