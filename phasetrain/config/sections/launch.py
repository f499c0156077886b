"""Section LAUNCH: submitting the run as a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class LaunchSection(Section):
    """Submission of the run as a job."""

    cluster: Literal["slurm", "local", "debug"] | None = key(
        None,
        "where the run is submitted: to SLURM, or as a job on this machine; null: run here; "
        "debug: run in this process",
        scope="machine",
    )
    nodes: int = key(1, "number of nodes", resume="free", ge=1)
    processes: int = key(
        1,
        "processes per node; with CUDA one per GPU. Without a cluster they are started on this "
        "machine",
        resume="free",
        ge=1,
    )
    cpus: int | None = key(
        None, "cores per process; null: the cluster's default", scope="machine", ge=1
    )
    gpus: int | None = key(
        None,
        "GPUs per node; null: the cluster's default, and for a local job all of this machine",
        scope="machine",
        ge=0,
    )
    memory: float | None = key(
        None,
        "memory per node in GB; null: the cluster's default",
        scope="machine",
        gt=0,
    )
    supervise: bool | float | None = key(
        None,
        "seconds without progress after which processes on this machine are ended and started "
        "again: true is 1800; null: true with several processes, false with one",
        scope="machine",
        gt=0,
    )
    partition: str | None = key(None, "SLURM partition", scope="machine")
    account: str | None = key(None, "SLURM account", scope="machine")
    qos: str | None = key(None, "SLURM quality of service", scope="machine")
    minutes: int = key(60, "time limit of one attempt in minutes", scope="machine", ge=1)
    lead_seconds: int = key(
        120,
        "seconds before the time limit at which the run is asked to save and stop",
        scope="machine",
        ge=1,
    )
    requeues: int = key(
        3,
        "maximum number of restarts after the time limit; preemptions do not count",
        scope="machine",
        ge=0,
    )
    parameters: Mapping[str, Any] = key(
        {},
        "further SLURM parameters of submitit, such as constraint, exclude, comment, setup "
        "(commands before srun), additional_parameters",
        scope="machine",
    )
    folder: str | None = key(
        None,
        "folder for the logs of the job; null: launch/ in the run folder",
        scope="machine",
    )
