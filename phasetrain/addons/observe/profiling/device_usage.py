"""Peak memory of this process, memory of devices and GPU utilization, from the system, torch and
NVML."""

from pathlib import Path

import torch

PROC = Path("/proc")

NOT_LINUX = "the memory of a process is read from /proc/self/status, which only Linux has"


def peak_resident_bytes() -> int | None:
    """Return the peak resident set size of this process in bytes; None if it is not known."""
    try:
        lines = (PROC / "self" / "status").read_text("ascii", errors="replace").splitlines()
    except OSError:
        return None
    # Not `ru_maxrss`, which a process takes over from the one that has started it.
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    if kib is None:
        return None
    return int(kib) * 1024


def allocator_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes that torch has allocated and reserved on a CUDA device; {} elsewhere.

    Peaks are since the last reset. This reads counters of the allocator and does not wait for the
    device.
    """
    if device.type != "cuda":
        return {}
    return {
        "cuda_allocated_bytes": torch.cuda.memory_allocated(device),
        "cuda_reserved_bytes": torch.cuda.memory_reserved(device),
        "cuda_peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "cuda_peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


class GpuReader:
    """Reads utilization, temperature and power of a GPU from NVML, until NVML fails once.

    Args:
        device: the device of the run.

    Attributes:
        unavailable: the reason if nothing can be read, or empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.unavailable = ""
        if device.type != "cuda":
            self.unavailable = f"MACHINE.device = {str(device)!r} is not a CUDA device"

    def read(self) -> dict[str, float]:
        """Return utilization (%), temperature (°C), power (W) and used memory of all processes.

        Returns {} if NVML does not answer; `unavailable` has the reason.
        """
        if self.unavailable:
            return {}
        try:
            return {
                "gpu_percent": torch.cuda.utilization(self._device),
                "gpu_celsius": torch.cuda.temperature(self._device),
                "gpu_watts": torch.cuda.power_draw(self._device) / 1000,
                "gpu_used_bytes": torch.cuda.device_memory_used(self._device),
            }
        except ModuleNotFoundError:
            self.unavailable = 'NVML is read through nvidia-ml-py: pip install "phasetrain[gpu]"'
        except Exception as error:  # noqa: BLE001 - monitoring must not end a run
            self.unavailable = f"NVML does not answer ({type(error).__name__}: {error})"
        return {}
