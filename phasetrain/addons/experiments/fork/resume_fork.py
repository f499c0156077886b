"""Resumes from a checkpoint that was forked from another run."""

from collections.abc import Mapping

from phasetrain.app.setup import Setup
from phasetrain.app.train.resume import check_config_changes, check_data_changes
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.contents import FORK
from phasetrain.data.samplers.phase_sampler import check_batches
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ChangedError
from phasetrain.tasks import SplitData


def resume_fork(
    setup: Setup, loaded: LoadedCheckpoint, data: Mapping[str, SplitData], plan: Plan
) -> RunState:
    """Return the position of a forked checkpoint in the plan of the new run.

    Args:
        setup: the config of the new run.
        loaded: the forked checkpoint.
        data: split -> data.
        plan: the plan of the new run from scratch.

    Raises:
        ChangedError: the data, or the config with which the fork was made, has changed; or the
            plans differ before the position (code `fork.plan_differs`).
    """
    if not loaded.promised[FORK]["adopts"]:
        check_config_changes(setup, loaded)
    # The caller of `fork_run` has found that no update before the fork has such a sample.
    check_data_changes(setup, loaded, data, compares_excluded=False)
    state = RunState()
    state.load_state_dict(loaded.manifest.state)
    before = decode_plan(loaded.promised["plan"])
    if not _begin_equally(before, plan, state):
        raise ChangedError(
            f"{loaded.path}: the fork is at update {state.updates}, and the phases of the two "
            "plans differ before it; fork the run at an earlier update",
            code="fork.plan_differs",
        )
    for phase, _ in plan.phases[state.phase :].kinds:
        check_batches(data[phase.data].at(phase.stage).order, phase)
    return state


def _begin_equally(before: Plan, plan: Plan, state: RunState) -> bool:
    """Return whether two plans have the same steps up to a position."""
    if len(plan.phases) < state.phase:
        return False
    if before.phases[: state.phase] != plan.phases[: state.phase]:
        return False
    if not state.step:
        return True
    if len(plan.phases) == state.phase:
        return False
    return _has_same_steps(before.phases[state.phase], plan.phases[state.phase], state.step)


def _has_same_steps(one: Phase, other: Phase, steps: int) -> bool:
    """Return whether the first steps of two phases are over the same samples."""
    facts = ("split", "epoch", "first", "offset", "batch_size", "stage")
    return (
        min(one.steps, other.steps) >= steps
        and all(vars(one)[name] == vars(other)[name] for name in facts)
        and one.samples_in(steps - 1) == other.samples_in(steps - 1)
    )
