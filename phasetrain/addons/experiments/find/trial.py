"""Short trial trainings that leave no run behind, and the files that describe them."""

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup
from phasetrain.config.attrdict import AttrDict
from phasetrain.distributed import World
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import COMPLETED, RunState
from phasetrain.hooks import Hook, Hooks
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Builder

log = logging.getLogger(__name__)

FOLDER = "find"
"""Folder in the run folder for the results. It does not make the folder a run."""

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Label -> x and y of a line in a plot."""


def trial_config(config: AttrDict, *, updates: int, batch_size: int | None = None) -> AttrDict:
    """Return the config of a training of `updates` updates without tests, schedules and
    averages."""
    plain = config.plain()
    lengths: dict[str, Any] = {"epochs": None, "updates": updates, "samples": None, "stages": []}
    plain["PHASES"] |= lengths | {
        "test_first": False,
        "test_every": {"epochs": None, "updates": None, "when": None},
    }
    plain["DATA"] = {"TRAIN": plain["DATA"]["TRAIN"]}
    plain["METERS"] = {}
    plain["MODEL"] |= {"ema": None, "swa": None}  # a copy of the weights would distort the memory
    # a loss that is not finite ends a range test, and is a result rather than an error
    plain["OPTIMIZER"] |= {"SCHEDULES": {}, "on_nonfinite": "ignore"}
    for other in plain["OPTIMIZER"]["others"].values():
        other["SCHEDULES"] = {}
    for section in (plain["OPTIMIZER"], *plain["OPTIMIZER"]["others"].values()):
        section["groups"] = [{**rule, "SCHEDULES": {}} for rule in section.get("groups", ())]
    if batch_size is not None:
        # no accumulation and no short last batch: every step then holds the whole batch in memory
        plain["DATA"]["TRAIN"] |= {
            "batch_size": batch_size,
            "micro_batch_size": batch_size,
            "drop_last": True,
        }
        plain["OPTIMIZER"]["accumulate"] = 1
        plain["DISTRIBUTED"]["reduction"] = "native"
    return AttrDict(plain)


def run_trial(setup: Setup, config: AttrDict, hook: Hook) -> str:
    """Train a config without writing anything, and return why it ended early, or an empty text."""
    builder = Builder(config, setup.machine, World())
    data = builder.data()
    plan = builder.plan(data)
    state = RunState()
    # without a folder, so that nothing is written
    engine = PhaseEngine(
        builder.task(builder.parts(data, plan)), plan, state, Hooks({"find": hook})
    )
    with setup.machine.apply_settings():
        engine.run()
    if state.finished == COMPLETED:
        return ""
    return state.finished


def draw_plot(series: Series, labels: tuple[str, str], marks: Sequence[float]) -> bytes:
    """Return a PNG of lines over a logarithmic x axis, with a vertical line at each of `marks`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Figure instead of pyplot, which would choose a window system and keep every figure alive
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, (x, y) in series.items():
        marker = "." if len(x) < 30 else None
        axes.plot(x, y, label=label, marker=marker)
    for mark in marks:
        axes.axvline(mark, linestyle=":", color="gray", label=f"{mark:.3g}")
    axes.set_xscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    file = io.BytesIO()
    # without matplotlib's version in the file, equal trials write equal bytes
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()


def write_results(
    setup: Setup, name: str, content: Mapping[str, Any], draw: Callable[[], bytes]
) -> RunResult:
    """Write the numbers, and a plot if matplotlib is installed; return the result of the search."""
    folder = RunFolder(setup.config.RUN.dir)
    path = folder.file(FOLDER)
    with folder.writing():
        folder.storage.make_folder(path)
        folder.storage.replace_json(f"{path}/{name}.json", content, durable=False)
        try:
            folder.storage.replace(f"{path}/{name}.png", draw(), durable=False)
        except ImportError:
            log.info("no plot: it needs matplotlib, pip install 'phasetrain[plot]'")
    setup.terminal.say(f"written to {path}/{name}.json")
    return RunResult("found", folder=folder.path, reason=str(content["line"]), details=content)
