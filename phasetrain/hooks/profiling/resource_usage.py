"""How much memory processes and devices use, and how busy a GPU is: what the system, torch and NVML
tell."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

PROC = Path("/proc")

NOT_LINUX = "there is no /proc/self/status here, which is where Linux tells the memory of a process"


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the bytes that processes have in the machine's memory (RSS), added up; one that is
    gone has none.

    Pages that processes share, such as those of a forked one, count in each.
    """
    found = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        try:
            found += int((PROC / str(pid) / "statm").read_text("ascii").split()[1]) * page
        except (OSError, ValueError, IndexError):
            continue
    return found


def peak_resident_bytes() -> int | None:
    """Return the most bytes that this process ever had in the machine's memory; None where nobody
    tells."""
    try:
        lines = (PROC / "self" / "status").read_text("ascii", errors="replace").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    if kib is None:
        return None
    return int(kib) * 1024


def allocator_bytes(device: torch.device) -> dict[str, int]:
    """Return what torch has allocated and reserved on a CUDA device, now and at most; elsewhere
    nothing.

    The most is that since the last reset. Asks the allocator only; the device is not waited for.
    """
    if device.type != "cuda":
        return {}
    return {
        "cuda_allocated_bytes": torch.cuda.memory_allocated(device),
        "cuda_reserved_bytes": torch.cuda.memory_reserved(device),
        "cuda_peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "cuda_peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


class Gpu:
    """What NVML tells of a device; it is asked no more once it has not answered.

    Args:
        device: of the run.

    Attributes:
        silent: why there is nothing to be read; empty while there is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.silent = "" if device.type == "cuda" else f"MACHINE.device = {str(device)!r} is no GPU"

    def read(self) -> dict[str, float]:
        """Return utilisation (percent), temperature (degrees Celsius), power (watts) and used
        memory of all processes.

        Nothing where NVML does not answer; `silent` says why.
        """
        if self.silent:
            return {}
        try:
            return {
                "gpu_percent": torch.cuda.utilization(self._device),
                "gpu_celsius": torch.cuda.temperature(self._device),
                "gpu_watts": torch.cuda.power_draw(self._device) / 1000,
                "gpu_used_bytes": torch.cuda.device_memory_used(self._device),
            }
        except ModuleNotFoundError:
            self.silent = 'NVML is read through nvidia-ml-py: pip install "phasetrain[gpu]"'
        except Exception as error:  # noqa: BLE001 - the library has errors of its own, and is only asked how it goes
            self.silent = f"NVML does not answer ({type(error).__name__}: {error})"
        return {}
