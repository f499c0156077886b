"""Describes the machine, its devices, packages and settings for environment.json.

torch.utils.collect_env starts pip, compilers and nvidia-smi, which takes seconds; this takes
milliseconds, and redacts secrets.
"""

import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from phasetrain.runtime.redaction import REDACTED, SECRET_NAME, Redaction

VARIABLES = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH|OMP|MKL|OPENBLAS"
    r"|ATEN|ONEDNN|DNNL|NUMEXPR|KMP|MALLOC|SLURM|HF|WANDB|MLFLOW|TOKENIZERS|PHASETRAIN)_"
    r"|(PYTHON|LD_|LANG|LC_|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_)"
)
"""Prefixes of environment variables that may influence a computation."""

_DISTRIBUTION = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")


def describe_host() -> dict[str, Any]:
    """Return name, operating system, processors and memory of this machine."""
    memory = None
    if sys.platform == "linux":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _processor_name(),
        "cores": os.cpu_count(),
        "usable_cores": count_usable_cores(),
        "memory_bytes": memory,
    }


def count_usable_cores() -> int:
    """Return the number of cores that this process may use; a container or a scheduler may grant
    fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_devices(kind: str) -> list[dict[str, Any]]:
    """Return the accelerators of a kind that this process can use; none for `cpu`."""
    if kind != "cuda":
        return []
    devices = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    return [
        {
            "name": device.name,
            "memory_bytes": device.total_memory,
            "capability": f"{device.major}.{device.minor}",
        }
        for device in devices
    ]


def describe_numerics(*, deterministic: bool) -> dict[str, Any]:
    """Return the settings that decide the order of additions, and so the last bits.

    Args:
        deterministic: MACHINE.deterministic, which is in effect only while the run lasts.
    """
    return {
        "deterministic": deterministic,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.version": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def describe_platform(kind: str) -> dict[str, Any]:
    """Return the processors that results depend on bit by bit, without naming this machine.

    Args:
        kind: type of the device, such as `cpu`.
    """
    return {
        "cpu": _processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerators": [device["name"] for device in list_devices(kind)],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def list_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may influence a computation, redacted."""
    redaction = Redaction(environment)
    return {
        name: REDACTED if SECRET_NAME.search(name) else redaction.redact_text(value)
        for name, value in sorted(environment.items())
        if VARIABLES.match(name)
    }


def list_distributions(path: Iterable[str]) -> dict[str, str]:
    """Return the versions of the distributions on a module search path, by name."""
    # From the names of folders: importlib.metadata opens a file of each of hundreds of packages.
    versions: dict[str, str] = {}
    for folder in path:
        try:
            names = sorted(entry.name for entry in Path(folder or ".").iterdir())
        # An entry of the path may be a zip file, or may not exist.
        except OSError:
            continue
        for name in names:
            if match := _DISTRIBUTION.fullmatch(name):
                versions.setdefault(match["name"], match["version"])
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _processor_name() -> str:
    # platform.processor() is empty on most Linux systems.
    name = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            models = (line.partition(":")[2] for line in file if line.startswith("model name"))
            name = next(models, "").strip()
    except OSError:
        pass
    return name or platform.processor() or platform.machine()
