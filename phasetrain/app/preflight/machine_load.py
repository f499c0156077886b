"""The load by other processes during a rehearsal, and its effect on the estimated duration."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from phasetrain.runtime.format import format_count, format_duration_range, format_estimate

BUSY = 1.25
"""Demand for cores, as a share of all cores, from which on steps take longer than on an idle
machine."""

IDLE = 0.25
"""Demand of others, as a share of all cores, that is not mentioned."""

WINDOW = 60.0
"""Seconds over which the system averages its load."""


def measure_load(threads: int) -> dict[str, float]:
    """Return how many cores other processes want and this run wants, and how many there are.

    Others want none where the system does not measure its load.

    Args:
        threads: number of threads with which this run computes on this machine.
    """
    others = 0.0
    # A system without load averages has no such function, or raises.
    with suppress(AttributeError, OSError):
        # The average of the last minute contains what this process has computed since its start.
        own = min(time.process_time() / WINDOW, float(threads))
        others = max(0.0, os.getloadavg()[0] - own)
    return {"others": others, "threads": threads, "cores": os.cpu_count() or 1}


def format_expected(seconds: float, load: Mapping[str, float]) -> str:
    """Return the expected duration of a run, and why it is uncertain if the machine is busy.

    Args:
        seconds: from steps that were timed while the machine had this load.
        load: as `measure_load` returns it.
    """
    demand = (load["others"] + load["threads"]) / load["cores"]
    if load["others"] < IDLE * load["cores"] or demand < BUSY:
        return format_estimate(seconds)
    # Nobody knows when the others end: from a run alone on the machine to one that shares it.
    span = format_duration_range(0.7 * seconds / demand, 1.5 * seconds)
    cores = format_count(int(load["cores"]), "core")
    return f"{span}, uncertain: other processes have a load of {load['others']:.1f} on {cores}"
