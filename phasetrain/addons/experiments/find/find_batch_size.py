"""Find the largest batch that fits into memory (RUN.engine=find_batch_size)."""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile

import torch

from phasetrain.addons.experiments.find.section import FindSection
from phasetrain.addons.experiments.find.trial import (
    draw_plot,
    run_trial,
    trial_config,
    write_results,
)
from phasetrain.app.engines import Extras
from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.errors import ConfigError, is_out_of_memory
from phasetrain.hooks import Hook, Run


class _TooLargeError(Exception):
    """A batch size that does not fit; the message names the device."""


class Stopwatch(Hook):
    """Records when each step was complete."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Wait for the device and record the time."""
        float(out.loss)  # waits for the device, whose kernels would still be running
        self.times.append(time.perf_counter())


def find_batch_size(setup: Setup, extras: Extras | None = None) -> RunResult:
    """Run a few updates with batches of FIND.batch_size_from samples, then double the size until a
    batch does not fit.

    Each size starts from scratch, without gradient accumulation. Starts no run in the folder.

    Raises:
        ConfigError: not even the first size fits.
    """
    began = time.perf_counter()
    section: FindSection = setup.config["FIND"]
    batch_size = setup.config.DATA.TRAIN.batch_size
    rates: dict[int, float] = {}
    samples = setup.builder().data()[TRAIN].length
    limit = samples
    stopped = f"DATA.TRAIN has {samples} samples"
    if section.max_batch_size is not None and section.max_batch_size < samples:
        limit = section.max_batch_size
        stopped = f"FIND.max_batch_size = {section.max_batch_size}"
    for size in takewhile(
        lambda size: size <= limit, (section.batch_size_from << n for n in count())
    ):
        try:
            rates[size] = _samples_per_second(setup, size)
        except _TooLargeError as error:
            stopped = str(error)
            break
    if not rates:
        raise ConfigError(
            f"FIND.batch_size_from = {section.batch_size_from}: too large, {stopped}; "
            "choose a smaller one",
            code="machine.out_of_memory",
        )
    largest = max(rates)
    fastest = max(rates, key=lambda size: rates[size])
    line = f"DATA.TRAIN.batch_size={largest}"
    if largest < batch_size:
        micro = max(size for size in range(1, largest + 1) if batch_size % size == 0)
        line = f"DATA.TRAIN.micro_batch_size={micro} OPTIMIZER.accumulate=null"
    content = {"line": line, "largest": largest, "stopped": stopped, "tried": list(rates)}
    content["time"] = {
        "fastest": fastest,
        "samples_per_second": {str(size): rate for size, rate in rates.items()},
    }
    rows = [(str(size), f"{rate:,.0f}") for size, rate in rates.items()]
    setup.terminal.print_table("batches without accumulation", ("samples", "samples/s"), rows)
    series = {"samples/s": (list(rates), list(rates.values()))}
    result = write_results(
        setup,
        "find_batch_size",
        content,
        lambda: draw_plot(series, ("batch size", "samples per second"), [largest]),
    )
    setup.terminal.say(
        f"the largest batch that fits has {largest} samples ({stopped}), the fastest {fastest}: "
        f"{line}"
    )
    return replace(result, seconds=time.perf_counter() - began)


def _samples_per_second(setup: Setup, size: int) -> float:
    """Return the throughput for a batch size, without the first update, which allocates memory."""
    watch = Stopwatch()
    try:
        run_trial(
            setup,
            trial_config(setup.config, updates=setup.config["FIND"].batch_updates, batch_size=size),
            watch,
        )
    except (RuntimeError, MemoryError, ConfigError) as error:
        if not any(map(is_out_of_memory, _causes(error))):
            raise
        raise _TooLargeError(
            f"{size} samples do not fit into the memory of {setup.machine.device}"
        ) from None
    finally:
        # The traceback of an out-of-memory error keeps tensors alive in reference cycles, and the
        # allocator keeps freed blocks: without both lines the next size starts with less memory.
        gc.collect()
        if setup.machine.device.type == "cuda":
            torch.cuda.empty_cache()
    return size * (len(watch.times) - 1) / (watch.times[-1] - watch.times[0])


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, because a task wraps the errors of its model."""
    while error is not None:
        yield error
        error = error.__cause__
