"""Values that depend on the length of a run that is trained longer, such as its learning rate."""

from collections.abc import Sequence

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.app.setup import Setup
from phasetrain.app.train.resume import LENGTH_KEYS
from phasetrain.app.train.summary import LOW_LR, read_remaining_lr
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.config.changes import Change
from phasetrain.engine.plan import Plan
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ConfigError
from phasetrain.optim.schedules.param_schedules import ParamSchedules, Schedules
from phasetrain.tasks import Parts, Task
from phasetrain.tasks.build.builder import list_updates_per_epoch
from phasetrain.tasks.build.optimizer_builder import build_schedules

WAYS = (
    "PHASES.extend=stretch computes the schedule over the new length, and PHASES.extend=cycle "
    "begins it again"
)
"""What to do about a learning rate that has fallen."""


def list_longer_warnings(
    run_spec: RunSpec, loaded: LoadedCheckpoint, task: Task, state: RunState
) -> list[str]:
    """Return warnings of settings that depend on the length of a run that was made longer: its
    learning rate, and parts that were built with a fact of the plan.

    Args:
        run_spec: the run.
        loaded: the checkpoint that it resumes from.
        task: its task.
        state: the position from which it resumes.
    """
    plan = run_spec.plan
    low_lr = warn_of_low_lr(plan, state, read_remaining_lr(task, plan.where(state)))
    return [*filter(None, [low_lr]), *list_changed_facts(run_spec, loaded, task.parts)]


def warn_of_low_lr(plan: Plan, state: RunState, remaining_lr: float) -> str:
    """Return a warning if a longer run continues with a learning rate that has fallen, or an empty
    string.

    Args:
        plan: the plan, after the change of its length.
        state: the position from which the run resumes.
        remaining_lr: highest learning rate from here on, as a fraction of its peak.
    """
    is_extended = plan.anchor.updates == state.updates and plan.anchor.where > 0
    left = plan.updates - state.updates
    if not is_extended or remaining_lr >= LOW_LR or not left:
        return ""
    return (
        f"PHASES.extend = 'continue': the learning rate continues at {100 * remaining_lr:.1f} % of "
        f"its peak, for the remaining {left:,} updates; {WAYS}: stop the run and start the command "
        "again with one of them and RUN.allow=PHASES"
    )


def list_changed_facts(run_spec: RunSpec, loaded: LoadedCheckpoint, parts: Parts) -> list[str]:
    """Return a line for each part that was built with a fact of the plan that has changed.

    Args:
        run_spec: the run.
        loaded: the checkpoint that it resumes from.
        parts: its parts.
    """
    plans = decode_plan(loaded.promised["plan"]), run_spec.plan
    before, now = (run_spec.builder.facts(run_spec.data, plan) for plan in plans)
    return [
        f"{key} is {value} from here on, and was built for {name} = {before[name]} until the "
        "checkpoint: the length of the run has changed"
        for key, value in parts.facts.items()
        # By their texts, since NaN differs from itself.
        if (name := key.rpartition(".")[2]) in before and str(before[name]) != str(now.get(name))
    ]


def warn_before_longer(setup: Setup, changes: Sequence[Change], plan: Plan, updates: int) -> str:
    """Return a line about the learning rate for a run that may not be trained longer yet, or an
    empty string.

    Args:
        setup: the present config.
        changes: changes of the config that are rejected.
        plan: the plan of the checkpoint.
        updates: number of completed updates.
    """
    if setup.config.PHASES.extend != "continue" or setup.stages:
        return ""
    if not any(change.path in LENGTH_KEYS for change in changes):
        return ""
    remaining_lr = _find_remaining_lr(setup, plan, plan.where_at(min(updates, plan.updates - 1)))
    if remaining_lr >= LOW_LR:
        return ""
    return f"The learning rate would continue at {100 * remaining_lr:.1f} % of its peak: {WAYS}"


def _find_remaining_lr(setup: Setup, plan: Plan, where: float) -> float:
    """Return the highest learning rate from `where` on as a fraction of its peak, without building
    the model; 1.0 for a schedule that needs to know more than the plan."""
    facts = {
        "batch_size": setup.config.DATA.TRAIN.batch_size,
        "epochs": plan.epochs,
        "updates": plan.updates,
        "updates_per_epoch": list_updates_per_epoch(plan)[0],
    }
    optimizer = setup.config.OPTIMIZER
    section = {key: value for key, value in optimizer.SCHEDULES.items() if key == "lr"}
    try:
        context = setup.builder().context
        made = build_schedules(context, section, "OPTIMIZER", facts, {"lr": optimizer.lr})
        return ParamSchedules([{"lr": 1.0}], Schedules(made)).remaining_lr(where)
    except ConfigError:
        return 1.0
