"""The result of a run, as `phasetrain.run` returns it and the command line prints it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from phasetrain.config.addons import find_service
from phasetrain.config.objects import GivenObjects, provide_objects
from phasetrain.runs.history import Best, History

if TYPE_CHECKING:
    from phasetrain.tasks import Task


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run.

    Attributes:
        state: `finished`, `paused`, `interrupted`, `preempted`, `planned`, `tested`, `extracted`,
            `found`, `replayed`, `submitted`, or `failed` with `on_exception="ignore"`.
        exit_code: exit code of the process.
        folder: the run folder.
        reason: why the run ended.
        updates: number of optimizer updates.
        last: latest value of every metric, by `split/name`; with `loaded_checkpoint` the ones
            measured with its weights.
        digest: SHA-256 over names and bytes of the model's state; empty if no model was trained.
        seconds: wall time of this attempt.
        loaded_checkpoint: path of the checkpoint whose weights were loaded at the end
            (CHECKPOINT.load_best), or empty.
        details: JSON data that the engine wrote: the plan, the learning rates tried, the tested
            checkpoint; empty for a training.
        history: everything that all attempts logged, as a table.
        best: best value by CHECKPOINT.best.monitor, or of the first metric of a test, with the
            checkpoint that holds its weights if that was kept; None if nothing was measured.
        objects: objects of the call that its config names.
        error: exception with which the run has failed, with `on_exception="ignore"`; else None.
    """

    state: str
    exit_code: int = 0
    folder: str = ""
    reason: str = ""
    updates: int = 0
    last: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""
    seconds: float = 0.0
    loaded_checkpoint: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    best: Best | None = None
    objects: GivenObjects = field(default_factory=GivenObjects, repr=False, compare=False)
    error: Exception | None = None

    def load(self, checkpoint: str = "latest", **options: Any) -> "Task":
        """Return the task of the run with its weights, see `phasetrain.load`."""
        from phasetrain.app.load import load

        with provide_objects(self.objects):
            return load(self.folder, checkpoint, **options)

    def _repr_html_(self) -> str | None:
        """Return the view in a notebook: state, folder, metrics and a curve; None without the
        add-on that draws it."""
        format_result = find_service("format_result")
        return format_result(self) if format_result else None

    def to_json(self) -> dict[str, Any]:
        """Return everything but the history as JSON data."""
        return {
            "state": self.state,
            "folder": self.folder,
            "reason": self.reason,
            "updates": self.updates,
            "last": dict(self.last),
            "digest": self.digest,
            "seconds": self.seconds,
            "loaded_checkpoint": self.loaded_checkpoint,
            "best": None if self.best is None else asdict(self.best),
            "details": dict(self.details),
        }
