"""Records the weights after the first epoch of a run, and stops there on request."""

import json
from collections.abc import Mapping
from typing import Any

from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.models.digest import hash_model
from phasetrain.runs.view import RunView

FIRST_EPOCH_FILE = "first_epoch.json"
"""Name of the record in the run folder."""


class FirstEpoch(Hook):
    """Writes the digest of the weights after the first train phase.

    Args:
        stops: whether the run stops there, to be resumed by the same command.
    """

    observe_only = True

    def __init__(self, *, stops: bool) -> None:
        self.stops = stops

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write the digest."""
        is_first = not any(earlier.is_train for earlier in run.plan.phases[: run.state.phase - 1])
        if not phase.is_train or not is_first or run.folder is None:
            return
        content: dict[str, Any] = {"digest": hash_model(run.task.model)}
        # In the run folder, so that it is still known when the run was killed and resumed.
        run.folder.storage.replace(run.folder.file(FIRST_EPOCH_FILE), json.dumps(content).encode())
        if self.stops:
            # As an interruption, so that the same folder can be trained to its end later.
            run.stop("first epoch done", interrupted=True)


def read_first_epoch(folder: str) -> str:
    """Return the digest in a run folder, or an empty text."""
    return str(RunView(folder).read_mapping(FIRST_EPOCH_FILE).get("digest", ""))
