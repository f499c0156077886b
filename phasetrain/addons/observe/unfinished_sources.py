"""A check for initial weights that come from a run which has not finished."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasetrain.runs.view import RunView

log = logging.getLogger(__name__)


def check_unfinished_sources(report: Mapping[str, Any]) -> None:
    """Warn of run folders on this machine whose run can still go on.

    Args:
        report: where the weights of MODEL.weights come from.
    """
    for source in report["sources"]:
        # A checkpoint was chosen on purpose; of a folder, the run decides which one it is.
        if not Path(source["path"]).is_dir():
            continue
        view = RunView(source["path"])
        state = view.status.state
        if state and state != "finished":
            whole = f" of {view.plan.updates}" if view.plan.updates else ""
            log.warning(
                "MODEL.weights: the run in %s has not finished: it is %s at update %d%s, and its "
                "weights may still change; finish it, or name one of its checkpoints as path",
                source["path"],
                # Also of a run that was killed, and could not say so.
                state if state != "running" else "running, or was killed,",
                view.status.updates,
                whole,
            )
