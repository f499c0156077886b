"""Submit a run to a cluster through submitit, and supervise it there (section LAUNCH).

In each task of the job, a small process of submitit waits for the training, which is a child
process: before the time limit, and when the job is preempted, it asks the training to save and end,
and has the job put back into the queue. Torch is not imported there.
"""

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasetrain.errors import ConfigError, LaunchError
from phasetrain.runs.archive_run import archive_run
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.child_processes import (
    COMMAND,
    convert_exit_code,
    make_rank_environment,
    stop_with_parent,
)

if TYPE_CHECKING:
    from phasetrain.app.setup import Setup

log = logging.getLogger(__name__)

SECOND_SIGNAL_SECONDS = 5.0
"""Time after a SIGTERM within which the signal may follow with which submitit requeues the job."""

FIRST_PORT = 10_000
PORTS = 20_000
"""Range of rendezvous ports. The job id selects the port, so that two jobs rarely share one."""

_OWN = re.compile(r"[+~]*LAUNCH(?=[.=@]|$)")
_OF_TORCHRUN = re.compile(
    r"TORCHELASTIC_|(GROUP_|ROLE_)(RANK|WORLD_SIZE|NAME)$|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_"
)


def submit(setup: "Setup") -> str:
    """Submit the run of a config, and return the job id.

    Raises:
        ConfigError: submitit or SLURM is missing, a parameter is unknown to them, or there are
            already several processes.
        LaunchError: the cluster rejected the job.
    """
    section = setup.config.LAUNCH
    run_folder = setup.config.RUN.dir
    if setup.place.size > 1 or "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"LAUNCH.cluster = {section.cluster!r}: the job starts its processes itself; run the "
            "command once, without torchrun or srun"
        )
    if section.supervise:
        raise ConfigError(
            f"LAUNCH.supervise = {section.supervise} and LAUNCH.cluster = {section.cluster!r}: "
            "only processes on this machine are supervised; remove one of the two"
        )
    if section.folder is None and "://" in run_folder:
        raise ConfigError(
            f"LAUNCH.folder = null and RUN.dir = {run_folder!r}: the logs of the job need a "
            "folder of a file system that all machines share, as in LAUNCH.folder=logs"
        )
    folder = Path(section.folder or f"{run_folder}/launch").absolute()
    executor = _make_executor(section, setup.config.RUN.name, folder)
    flags: tuple[str, ...] = ()
    if setup.config_dir is not None:
        flags = ("--config-dir", str(Path(setup.config_dir).absolute()))
    if setup.config.RUN.resume == "restart" and RunFolder(run_folder).has_run():
        # Here, not in the job, whose logs are in the folder, and which may be requeued.
        log.info("%s is kept as %s", run_folder, archive_run(RunFolder(run_folder)))
    try:
        job = executor.submit(Training((*flags, *_job_words(setup))))
    except (RuntimeError, OSError) as error:  # submitit's own errors are RuntimeErrors
        raise LaunchError(
            f"LAUNCH.cluster = {section.cluster!r}: the job was not accepted: {str(error).strip()}"
        ) from error
    _print_job(section, folder, str(job.job_id), run_folder)
    return str(job.job_id)


def _job_words(setup: "Setup") -> list[str]:
    """Return the words of the command of the job."""
    from phasetrain.app.stored.stored_config import OF_FOLDER
    from phasetrain.config.compose.override_text import key_of

    stored = setup.stored
    folder = setup.config.RUN.dir
    if stored is None or stored.folder != folder:
        return job_overrides(setup)
    # The records of a folder have no secrets, and config.yaml has them.
    engine = setup.config.RUN.engine
    changes = [
        word
        for word in stored.changes
        if key_of(word) not in OF_FOLDER and _OWN.match(word) is None
    ]
    words = ["resume" if engine == "train" else engine, stored.path, *changes]
    if setup.config.RUN.checkpoint != "latest" and engine != "train":
        words.append(f"--checkpoint={setup.config.RUN.checkpoint}")
    if stored.is_trusted:
        words.append("--trust")
    return [*words, "LAUNCH.cluster=null"]


def job_overrides(setup: "Setup") -> list[str]:
    """Return the overrides with which the job starts the run: the given ones, without section
    LAUNCH."""
    from phasetrain.config.compose.composed import compose
    from phasetrain.config.compose.override_text import key_of

    words = [word for word in setup.composed.overrides if _OWN.match(word) is None]
    if setup.config.RUN.resume == "restart":
        words = [word for word in words if key_of(word) != "RUN.resume"]
        words.append("RUN.resume=auto")
    if "RUN.dir" not in map(key_of, words):
        words.append(f"RUN.dir={setup.config.RUN.dir}")
    # LAUNCH may also be set in a file, and the job must not submit itself once more.
    again = compose(words, config_dir=setup.config_dir, schema=setup.schema)
    if again.config["LAUNCH"]["cluster"] is not None:
        words.append("LAUNCH.cluster=null")
    return words


def _make_executor(section: Any, name: str, folder: Path) -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ConfigError(
            f"LAUNCH.cluster = {section.cluster!r}: needs submitit, which cannot be imported "
            f"({error}); install it with pip install 'phasetrain[cluster]', or set "
            "LAUNCH.cluster=null"
        ) from error
    shared = {
        "timeout_min": section.minutes,
        "tasks_per_node": section.processes,
        "stderr_to_stdout": True,
    }
    if section.cluster == "local":
        local = submitit.LocalExecutor(folder, max_num_timeout=section.requeues)
        local.update_parameters(
            **shared, gpus_per_node=_count_gpus(section), signal_delay_s=section.lead_seconds
        )
        return local
    parameters = section.parameters.plain()
    asked = {
        "partition": section.partition,
        "account": section.account,
        "qos": section.qos,
        **parameters,
    }
    try:
        executor = submitit.AutoExecutor(
            folder, cluster="slurm", slurm_max_num_timeout=section.requeues
        )
        executor.update_parameters(
            **shared,
            name=name,
            nodes=section.nodes,
            cpus_per_task=section.cpus,
            gpus_per_node=section.gpus,
            mem_gb=section.memory,
            slurm_signal_delay_s=section.lead_seconds,
            **{f"slurm_{key}": value for key, value in asked.items()},
        )
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"LAUNCH.parameters = {parameters}: {error}") from error
    except RuntimeError as error:
        raise ConfigError(
            f"LAUNCH.cluster = 'slurm': {error} Submit on a machine of the cluster, or set "
            "LAUNCH.cluster=local"
        ) from error
    return executor


def _count_gpus(section: Any) -> int:
    """Return the number of GPUs for a local job: all GPUs of this machine by default."""
    import torch

    if section.gpus is None:
        return torch.cuda.device_count()
    return int(section.gpus)


def _print_job(section: Any, folder: Path, job: str, run_folder: str) -> None:
    size = f"{section.nodes} x {section.processes} processes, {section.minutes} minutes"
    log.info("submitted as job %s (%s, %s)", job, section.cluster, size)
    log.info("output: tail -F %s/%s_0_log.out", folder, job)
    log.info("state of the run: %s/status.json", run_folder)
    commands = ("ps -p", "kill -INT")
    if section.cluster == "slurm":
        commands = ("squeue -j", "scancel")
    log.info("state of the job: %s %s; to stop it: %s %s", commands[0], job, commands[1], job)


class Training:
    """The function that each task of the job calls: it runs the training in a child process.

    Args:
        words: flags and overrides of the command line.
        command: starts the program.
    """

    def __init__(self, words: tuple[str, ...], command: tuple[str, ...] = COMMAND) -> None:
        self.words = words
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False

    def __call__(self) -> int:
        """Run to the end and return the exit code.

        On ranks other than 0, a requested stop exits with 0: SLURM may end all processes of a job
        when one fails, and rank 0 has yet to requeue the job.

        Raises:
            SystemExit: with the exit code, if it is not 0.
        """
        import submitit

        job = submitit.JobEnvironment()
        # submitit's own handler only takes note of a SIGTERM, and the training would never save
        before = signal.signal(signal.SIGTERM, lambda *_: self._ask_to_stop())
        try:
            code = self._run_process(job_environment(job, os.environ))
            if code == 128 + signal.SIGTERM and job.global_rank:
                return code
            if self._asked:
                time.sleep(SECOND_SIGNAL_SECONDS)
        finally:
            signal.signal(signal.SIGTERM, before)
        if code:
            raise SystemExit(code)
        return code

    def _run_process(self, environment: Mapping[str, str]) -> int:
        """Run the process to its end and return its exit code, as a shell does."""
        words = [*self.command, *self.words]
        # No training outlives a task that is killed.
        self._process = subprocess.Popen(words, env=environment, preexec_fn=stop_with_parent)
        self._wait_for_end()
        return convert_exit_code(self._process.wait())

    def checkpoint(self) -> Any:
        """Ask the run to save and stop, wait for it, and return the callable that submitit starts
        again."""
        import submitit

        self._ask_to_stop()
        self._wait_for_end()
        return submitit.helpers.DelayedSubmission(Training(self.words, self.command))

    def _ask_to_stop(self) -> None:
        """Ask once: a second signal would stop the run at once."""
        if self._process is not None and not self._asked:
            self._asked = True
            # It may have ended meanwhile.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def _wait_for_end(self) -> None:
        """Wait for the end in a way that allows a signal handler to wait as well."""
        if self._process is not None:
            # Not Popen.wait(): its lock is not reentrant, and a handler that interrupts the wait in
            # this thread would wait for it forever. WNOWAIT leaves the exit code for Popen.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


def job_environment(job: Any, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run, with the variables that torchrun would set.

    Args:
        job: a `submitit.JobEnvironment`.
        inherited: environment of the task.
    """
    # Variables of a torchrun around the submission would make the run join that process group.
    clean = {key: value for key, value in inherited.items() if _OF_TORCHRUN.match(key) is None}
    if job.num_tasks == 1:
        return clean
    if job.num_nodes == 1:
        address = "127.0.0.1"  # the name of a machine need not resolve on the machine itself
    else:
        address = job.hostnames[0]
    threads = inherited.get("SLURM_CPUS_PER_TASK", "1")
    return make_rank_environment(
        {"OMP_NUM_THREADS": threads, **clean},
        rank=job.global_rank,
        size=job.num_tasks,
        local_rank=job.local_rank,
        nodes=job.num_nodes,
        address=address,
        port=FIRST_PORT + int(job.raw_job_id) * 7 % PORTS,
    )
