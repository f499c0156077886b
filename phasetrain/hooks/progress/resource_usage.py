"""Memory of processes, from the system."""

import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the resident set sizes of processes; a process that has ended counts as 0.

    Pages that processes share, such as those after a fork, count once per process.
    """
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        try:
            total += int((PROC / str(pid) / "statm").read_text("ascii").split()[1]) * page
        except (OSError, ValueError, IndexError):
            continue
    return total
