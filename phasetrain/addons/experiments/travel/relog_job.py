"""Runs hooks over one segment of a past run; several segments run in a process each.

python -m phasetrain.addons.experiments.travel.relog_job ORDER.json RESULT.json
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isclass
from pathlib import Path
from typing import Any

import torch

from phasetrain.addons.experiments.replay.updates import (
    ReplayStart,
    find_content,
    replay_updates,
    start_at,
)
from phasetrain.addons.experiments.travel.past_run import PastRun, open_past_run
from phasetrain.addons.experiments.travel.script_folder import search_script_folder
from phasetrain.app.build_hooks import label_hooks
from phasetrain.checkpoint.promised import FOLDER
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.hooks import Hook, Run
from phasetrain.hooks.ledger import Content
from phasetrain.hooks.metrics import Metrics
from phasetrain.proof.held import Saved, find_holders, list_kinds, list_modules, read_held
from phasetrain.proof.positions import StepPosition
from phasetrain.runtime.child_processes import stop_with_parent


@dataclass(frozen=True)
class Segment:
    """Updates from a state of the run up to another one.

    Attributes:
        checkpoint: name of the checkpoint to begin with; empty for the newest valid one before
            `first`, and without one for the start of the run.
        first: the first update that is wanted.
        last: the last update to train.
        end: phase and step at which it ends; None: after the last update, or at the end of the run.
        from_start: begin at the start of the run.
    """

    checkpoint: str
    first: int
    last: int
    end: tuple[int, int] | None = None
    from_start: bool = False


@dataclass(frozen=True)
class Job:
    """A segment and the hooks that log in it.

    Attributes:
        folder: the run folder.
        hooks: file of the hooks; empty for none.
        segment: the segment.
        every: updates between two logged steps.
        logged: names that the run has logged.
        trust: run the code that the config of the run names.
    """

    folder: str
    hooks: str
    segment: Segment
    every: int
    logged: tuple[str, ...] = ()
    trust: bool = False


@dataclass
class SegmentLog:
    """Numbers that hooks have logged in a segment.

    Attributes:
        lines: the lines of metrics.jsonl, without times.
        steps: for each step with new names: phase, weight, and the values by name.
        averages: phases whose metrics include the means of logged numbers.
        begun: the phase in the middle of which the segment begins; None if it begins with a phase.
        checked: updates that were compared with the ledger.
        difference: the first of these that differs, with its components.
        changed: attributes of hooks that have changed in the segment.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)
    averages: list[int] = field(default_factory=list)
    begun: int | None = None
    checked: int = 0
    difference: tuple[int, list[str]] | None = None
    changed: list[str] = field(default_factory=list)


def load_hooks(path: str) -> dict[str, Hook]:
    """Return label -> hook of a file: its hooks, and objects of its classes of hooks.

    Raises:
        ConfigError: it cannot be read (code `relog.no_file`), or has no hook (`relog.no_hook`).
    """
    if not path:
        return {}
    # With a prefix: a file `numpy.py` must not hide the package.
    name = f"relog_{Path(path).stem}"
    spec = spec_from_file_location(name, path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"--hook {path}: there is no such file; expected a file of Python code with hooks",
            code="relog.no_file",
        )
    module = module_from_spec(spec)
    # `list_modules`, which finds the variables that hooks change, looks the module up here.
    sys.modules[name] = module
    with search_script_folder(path):
        spec.loader.exec_module(module)
    hooks = [value for value in vars(module).values() if isinstance(value, Hook)]
    made = {type(hook) for hook in hooks}
    for value in vars(module).values():
        is_own = isclass(value) and issubclass(value, Hook) and value.__module__ == name
        if is_own and value not in made:
            try:
                hooks.append(value())
            except TypeError as error:
                raise ConfigError(
                    f"--hook {path}: {value.__name__}() fails: {error}; make the hook in the file, "
                    f"such as hook = {value.__name__}(...)",
                    code="relog.no_hook",
                ) from error
    if not hooks:
        raise ConfigError(
            f"--hook {path}: there is no hook in it; expected a subclass of phasetrain.hooks.Hook, "
            "or a function with @phasetrain.hooks.on(...)",
            code="relog.no_hook",
        )
    return label_hooks(hooks)


def run_segment(past: PastRun, job: Job) -> SegmentLog:
    """Train a segment again with hooks, and return their numbers."""
    segment = job.segment
    start = _find_start(past, segment)
    hooks = load_hooks(job.hooks)
    log = SegmentLog(begun=start.state.phase if start.state.step else None)
    recorder = _Recorder(log, hooks, job.logged)
    # The labels of a live run, because the random numbers of a hook are a function of its label;
    # with a prefix where the config has another hook of this label.
    taken = {*past.setup.config.HOOKS, "replay", "replayed"}
    labelled = {
        f"relog.{label}" if label in taken else label: hook for label, hook in hooks.items()
    }
    state_at: dict[StepPosition, Callable[[dict[str, Any]], None]] = {}
    if segment.end is not None:
        state_at[segment.end] = lambda state: None
    content: Content = "none"
    if past.ledger:
        content = find_content(past.ledger[past.ledger.last])
    replayed = replay_updates(
        past.setup,
        past.data,
        start,
        segment.last,
        content=content,
        # The order of a live run: hooks of the config, then those that were added. The recorder is
        # the last one, which gets closing events first.
        hooks={"relog.lines": _Lines(job.every, log.lines), **labelled, "relog.recorder": recorder},
        state_at=state_at,
    )
    for update in replayed:
        differs = past.compare(replayed[update])
        log.checked += differs is not None
        if differs and log.difference is None:
            log.difference = update, differs
    return log


def _find_start(past: PastRun, segment: Segment) -> ReplayStart:
    if segment.from_start:
        return past.find_start(1)
    if not segment.checkpoint:
        return past.find_start(segment.first)
    reader = CheckpointReader(f"{past.folder.path}/{FOLDER}", past.folder.storage)
    loaded = reader.load(f"{reader.root}/{segment.checkpoint}")
    return start_at(past.setup, past.data, loaded)


class _Lines(Metrics):
    """Keeps the lines of metrics.jsonl in place of writing them.

    Args:
        every_updates: see `Metrics`.
        lines: where to put them, without times.
    """

    def __init__(self, every_updates: int, lines: list[dict[str, Any]]) -> None:
        super().__init__(every_updates)
        self._lines = lines

    def record(self, record: dict[str, Any]) -> None:
        """Keep a line."""
        self._lines.append({key: value for key, value in record.items() if key != "time"})


class _Recorder(Hook):
    """Reads the numbers that other hooks log, and which of their attributes change.

    Args:
        log: where to put it.
        hooks: label -> hook to watch.
        logged: names that the run has logged.
    """

    main_only = False
    observe_only = True

    def __init__(self, log: SegmentLog, hooks: Mapping[str, Hook], logged: tuple[str, ...]) -> None:
        self._log = log
        self._logged = frozenset(logged)
        self._holders = find_holders(hooks.items())
        self._modules = list_modules(list_kinds(self._holders))
        self._saved = Saved((), [holder for _, holder in self._holders])
        self._before: dict[str, Any] = {}

    def on_start(self, run: Run) -> None:
        """Read the attributes of the hooks, which have started."""
        self._before = self._read_keys()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the new numbers of the step, before the closing event reaches the other hooks."""
        self._find_changes()
        if not out.weight:
            return
        values = {
            # In double, as `phasetrain.tasks.metering.LogMeans` adds up the mean over the phase.
            name: float(torch.as_tensor(value).double())
            for name, value in out.logs.items()
            if name not in self._logged
        }
        if values:
            self._log.steps.append((phase.index, float(out.weight), values))

    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        """Read the attributes of the hooks, which may reset them now."""
        self._find_changes()

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record whether the metrics of the phase have the means of logged numbers."""
        self._find_changes()
        if run.task.parts.train_meters or not phase.is_train:
            self._log.averages.append(phase.index)

    def on_end(self, run: Run) -> None:
        """Read the attributes of the hooks for the last time."""
        self._find_changes()

    def _read_keys(self) -> dict[str, Any]:
        held = read_held(self._holders, self._modules, self._saved, is_whole=True)
        return {path: value.key for path, value in held.items()}

    def _find_changes(self) -> None:
        if self._log.changed:
            return
        now = self._read_keys()
        names = {**self._before, **now}
        self._log.changed = [
            path
            for path in names
            if path not in self._before or now.get(path) != self._before[path]
        ]


def main(order: str, result: str) -> int:
    """Run the job in a file, and write the result or the error to another."""
    stop_with_parent()
    content = json.loads(Path(order).read_text(encoding="utf-8"))
    segment = content["segment"]
    if segment["end"] is not None:
        segment["end"] = tuple(segment["end"])  # JSON has no tuples
    content["logged"] = tuple(content["logged"])
    job = Job(**{**content, "segment": Segment(**segment)})
    answer: dict[str, Any]
    try:
        with open_past_run(job.folder, trust=job.trust) as past:
            answer = {"log": asdict(run_segment(past, job))}
    except PhasetrainError as error:
        answer = {"error": str(error), "code": error.code, "kind": type(error).__name__}
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
