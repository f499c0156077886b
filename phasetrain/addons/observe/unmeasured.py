"""Names the declared metrics that a test of a checkpoint lacks because a hook adds them."""

import logging

from phasetrain.addons.observe.run_watch import read_latest
from phasetrain.engine.loop import PhaseEngine
from phasetrain.hooks import Hooks
from phasetrain.meters.base import meters_of
from phasetrain.meters.loss import MeanOfLogged
from phasetrain.tasks import Task

log = logging.getLogger(__name__)


def report_unmeasured(engine: PhaseEngine[Task, Hooks]) -> None:
    """Log a line about the meters of the kind `logged` that have measured nothing.

    Args:
        engine: has tested a checkpoint, without the hooks of its run.
    """
    metrics = read_latest(engine)
    missing = [
        f"{phase.split}/{label}"
        for phase, _ in engine.plan.phases.kinds
        for label, meter in meters_of(engine.task.meters, phase.split).items()
        if isinstance(meter, MeanOfLogged) and f"{phase.split}/{label}" not in metrics
    ]
    if missing:
        log.info(
            "%s: not measured; METERS declares what a hook or the task logs, and the test of a "
            "checkpoint calls no hooks of the run",
            ", ".join(missing),
        )
