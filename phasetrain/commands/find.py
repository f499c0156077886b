"""Finding a learning rate, and the largest batch, before a training (RUN.engine=find_lr,
find_batch_size)."""

import gc
import io
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from typing import Any

import torch

from phasetrain.commands.result import RunResult
from phasetrain.commands.setup import Setup
from phasetrain.config.attrdict import AttrDict
from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, is_out_of_memory
from phasetrain.hooks import Hook, Hooks, Run
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Builder

log = logging.getLogger(__name__)

FOLDER = "find"
"""Folder in the run folder to which the finders write; it makes no run of it."""

HEAD = 0.1
"""Share of the learning rates, from the smallest on, that are never suggested: their losses say
little yet."""

ROWS = 12
"""Points that are printed; the file has all."""

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Label -> x and y of a line in a plot."""


@dataclass(frozen=True)
class Suggestion:
    """What a range of learning rates says.

    Attributes:
        smoothed: losses, smoothed.
        steepest: the learning rate at which they fall fastest; None where they never fall.
        lowest: the learning rate at which they are lowest.
    """

    smoothed: list[float]
    steepest: float | None
    lowest: float


class LrRange(Hook):
    """Raises the learning rate from update to update by the same factor, until the loss runs away
    (Smith 2017).

    Args:
        lr: learning rate of the config, of which those of all groups are factors.
        lrs: the learning rate of each update.
        smoothing: of the loss, see `smoothed`.
        stop_at: ends the run once the smoothed loss is so many times the lowest one.

    Attributes:
        losses: of the updates made, as far as they are numbers.
    """

    def __init__(
        self, lr: float, lrs: Sequence[float], *, smoothing: float, stop_at: float
    ) -> None:
        self.lr = lr
        self.lrs = lrs
        self.smoothing = smoothing
        self.stop_at = stop_at
        self.losses: list[float] = []

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Set the first learning rate."""
        self._set(run)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Keep the loss, and set the next learning rate."""
        loss = float(out.loss)
        if not math.isfinite(loss):
            run.stop("the loss is not finite")
            return
        self.losses.append(loss)
        curve = smoothed(self.losses, self.smoothing)
        if len(curve) > HEAD * len(self.lrs) and curve[-1] > self.stop_at * min(curve):
            run.stop(f"the loss is {self.stop_at:g} times its lowest value")
        self._set(run)

    def _set(self, run: Run) -> None:
        if run.state.updates < len(self.lrs):
            run.task.updater.factor = self.lrs[run.state.updates] / self.lr


class Stopwatch(Hook):
    """Notes when each step was complete."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Wait for the device and look at the clock."""
        float(out.loss)
        self.times.append(time.perf_counter())


def find_lr(setup: Setup) -> RunResult:
    """Train from scratch with a learning rate that rises from FIND.lr_from to FIND.lr_to, and
    suggest one.

    After Smith 2017 (arXiv:1506.01186): the loss falls fastest at a good learning rate. All groups
    of weights keep their factors; schedules are left out. Begins no run in the folder; equal calls
    give equal numbers.

    Raises:
        ConfigError: settings that make no range, or a loss that is not finite from the start.
    """
    began = time.perf_counter()
    section = setup.config.FIND
    optimizer = setup.config.OPTIMIZER
    if section.lr_to <= section.lr_from:
        raise ConfigError(
            f"FIND.lr_to = {section.lr_to:g}: expected more than FIND.lr_from = {section.lr_from:g}"
        )
    if optimizer.lr == 0:
        raise ConfigError(
            "OPTIMIZER.lr = 0: those of groups are factors of it; set it to any other value to find one"
        )
    lrs = rising(section.lr_from, section.lr_to, section.updates)
    watch = LrRange(optimizer.lr, lrs, smoothing=section.smoothing, stop_at=section.stop_at)
    reason = _trained(setup, _changed(setup.config, updates=section.updates), watch)
    if len(watch.losses) < 3:
        raise ConfigError(
            f"FIND.lr_from = {section.lr_from:g}: the loss was not finite after {len(watch.losses)} updates; go lower"
        )
    lrs = lrs[: len(watch.losses)]
    found = suggested(lrs, watch.losses, section.smoothing)
    line = _lr_line(setup, found.steepest)
    content = {
        "line": line,
        "steepest": found.steepest,
        "lowest": found.lowest,
        "stopped": reason,
        "lr": lrs,
        "loss": watch.losses,
        "smoothed": found.smoothed,
    }
    points = list(zip(lrs, watch.losses, found.smoothed, strict=True))
    rows = [
        (f"{lr:.3g}", f"{loss:.4f}", f"{smooth:.4f}")
        for lr, loss, smooth in points[:: 1 + len(points) // ROWS]
    ]
    setup.terminal.print_table(
        f"learning rates, {reason or 'all tried'}", ("lr", "loss", "smoothed"), rows
    )
    series = {"loss": (lrs, watch.losses), "smoothed": (lrs, found.smoothed)}
    marks = [] if found.steepest is None else [found.steepest]
    _write(setup, "find_lr", content, lambda: plot(series, ("learning rate", "loss"), marks))
    setup.terminal.say(
        f"the loss falls fastest here: {line}" if line else _no_fall(section.lr_from, section.lr_to)
    )
    return RunResult(
        "found",
        folder=setup.config.RUN.dir,
        reason=line,
        seconds=time.perf_counter() - began,
        details=content,
    )


def find_batch_size(setup: Setup) -> RunResult:
    """Make a few updates with batches of FIND.batch_size_from samples, of twice as many, and so on
    until none fit.

    Each size starts from scratch and makes its batches in one piece. Begins no run in the folder.

    Raises:
        ConfigError: not even the first size fits.
    """
    began = time.perf_counter()
    section = setup.config.FIND
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
            f"FIND.batch_size_from = {section.batch_size_from} is too large: {stopped}"
        )
    largest = max(rates)
    fastest = max(rates, key=lambda size: rates[size])
    line = f"DATA.TRAIN.batch_size={largest}"
    if largest < batch_size:
        pieces = max(size for size in range(1, largest + 1) if batch_size % size == 0)
        line = f"DATA.TRAIN.micro_batch_size={pieces} OPTIMIZER.accumulate=null"
    content = {"line": line, "largest": largest, "stopped": stopped, "tried": list(rates)}
    content["time"] = {
        "fastest": fastest,
        "samples_per_second": {str(size): rate for size, rate in rates.items()},
    }
    rows = [(str(size), f"{rate:,.0f}") for size, rate in rates.items()]
    setup.terminal.print_table("batches in one piece", ("samples", "samples/s"), rows)
    series = {"samples/s": (list(rates), list(rates.values()))}
    _write(
        setup,
        "find_batch_size",
        content,
        lambda: plot(series, ("batch size", "samples per second"), [largest]),
    )
    setup.terminal.say(
        f"the largest that works has {largest} samples ({stopped}), the fastest {fastest}: {line}"
    )
    return RunResult(
        "found",
        folder=setup.config.RUN.dir,
        reason=line,
        seconds=time.perf_counter() - began,
        details=content,
    )


def rising(first: float, last: float, number: int) -> list[float]:
    """Return `number` learning rates from `first` to `last`, each the same factor above the one
    before it."""
    return [first * (last / first) ** (n / (number - 1)) for n in range(number)]


def smoothed(losses: Sequence[float], smoothing: float) -> list[float]:
    """Return the running mean of losses, `smoothing` in [0, 1) being the share of the past, without
    a bias to 0."""
    mean = 0.0
    found = []
    for number, loss in enumerate(losses, 1):
        mean = smoothing * mean + (1 - smoothing) * loss
        found.append(mean / (1 - smoothing**number))
    return found


def suggested(lrs: Sequence[float], losses: Sequence[float], smoothing: float) -> Suggestion:
    """Return where the smoothed loss falls fastest, up to where it is lowest, and where that is.

    Args:
        lrs: learning rates, each the same factor above the one before it.
        losses: as many, finite.
        smoothing: see `smoothed`.
    """
    curve = smoothed(losses, smoothing)
    lowest = min(range(len(curve)), key=lambda n: curve[n])
    begin = max(
        int(HEAD * len(curve)), math.ceil(1 / (1 - smoothing))
    )  # before, the mean is of a few losses
    falls = {
        n: after - before
        for n, (before, after) in enumerate(pairwise(curve))
        if begin <= n < lowest
    }
    steepest = min(falls, key=lambda n: falls[n]) if falls else 0
    fall = falls.get(steepest, 0.0)
    return Suggestion(curve, lrs[steepest] if fall < 0 else None, lrs[lowest])


def plot(series: Series, labels: tuple[str, str], marks: Sequence[float]) -> bytes:
    """Return a PNG of lines over a logarithmic x, with a vertical line at each of `marks`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, (x, y) in series.items():
        axes.plot(x, y, label=label, marker="." if len(x) < 30 else None)
    for mark in marks:
        axes.axvline(mark, linestyle=":", color="gray", label=f"{mark:.3g}")
    axes.set_xscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()


class _TooLargeError(Exception):
    """A batch size that does not fit; the message says where."""


def _changed(config: AttrDict, *, updates: int, batch_size: int | None = None) -> AttrDict:
    """Return the config of a training of so many updates without tests, schedules and averages."""
    plain = config.plain()
    lengths: dict[str, Any] = {"epochs": None, "updates": updates, "samples": None, "stages": []}
    plain["PHASES"] |= lengths | {
        "test_first": False,
        "test_every": {"epochs": None, "updates": None, "when": None},
    }
    plain["DATA"] = {"TRAIN": plain["DATA"]["TRAIN"]}
    plain["METERS"] = {}
    plain["MODEL"] |= {"ema": None, "swa": None}
    plain["OPTIMIZER"] |= {"SCHEDULES": {}, "on_nonfinite": "ignore"}
    for other in plain["OPTIMIZER"]["others"].values():
        other["SCHEDULES"] = {}
    if batch_size is not None:
        plain["DATA"]["TRAIN"] |= {
            "batch_size": batch_size,
            "micro_batch_size": batch_size,
            "drop_last": True,
        }
        plain["OPTIMIZER"]["accumulate"] = 1
        plain["DISTRIBUTED"]["reduction"] = "native"
    return AttrDict(plain)


def _trained(setup: Setup, config: AttrDict, hook: Hook) -> str:
    """Train as a config says, leaving nothing behind, and return why it ended early, or nothing."""
    builder = Builder(config, setup.machine, World())
    data = builder.data()
    plan = builder.plan(data)
    state = RunState()
    engine = PhaseEngine(
        builder.task(builder.parts(data, plan)), plan, state, Hooks({"find": hook})
    )
    with setup.machine.apply_settings():
        engine.run()
    if state.finished == "completed":
        return ""
    return state.finished


def _samples_per_second(setup: Setup, size: int) -> float:
    """Return how fast batches of a size go; the first update, which allocates memory, is not
    timed."""
    watch = Stopwatch()
    try:
        _trained(
            setup,
            _changed(setup.config, updates=setup.config.FIND.batch_updates, batch_size=size),
            watch,
        )
    except (RuntimeError, MemoryError, ConfigError) as error:
        if not any(map(is_out_of_memory, _causes(error))):
            raise
        raise _TooLargeError(
            f"{size} samples do not fit into the memory of {setup.machine.device}"
        ) from None
    finally:
        gc.collect()
        if setup.machine.device.type == "cuda":
            torch.cuda.empty_cache()
    return size * (len(watch.times) - 1) / (watch.times[-1] - watch.times[0])


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from: a task wraps what its model raises."""
    while error is not None:
        yield error
        error = error.__cause__


def _lr_line(setup: Setup, lr: float | None) -> str:
    if lr is None:
        return ""
    scaled = setup.composed.config["OPTIMIZER"]["auto_lr_scaling"] is not None
    return f"OPTIMIZER.lr={lr:.2g}" + (" OPTIMIZER.auto_lr_scaling=null" if scaled else "")


def _no_fall(first: float, last: float) -> str:
    return (
        f"the loss falls nowhere between {first:g} and {last:g}, so nothing is suggested; try another range "
        "(FIND.lr_from, FIND.lr_to), more updates (FIND.updates), or see that the model learns at all"
    )


def _write(setup: Setup, name: str, content: Mapping[str, Any], draw: Callable[[], bytes]) -> None:
    """Write the numbers, and the plot if matplotlib is there."""
    folder = RunFolder(setup.config.RUN.dir)
    path = folder.file(FOLDER)
    with folder.writing():
        folder.storage.make_folder(path)
        folder.storage.replace(
            f"{path}/{name}.json", (json.dumps(content, indent=1) + "\n").encode(), durable=False
        )
        try:
            folder.storage.replace(f"{path}/{name}.png", draw(), durable=False)
        except ImportError:
            log.info("no plot: it needs matplotlib, pip install 'phasetrain[plot]'")
    setup.terminal.say(f"written to {path}/{name}.json")
