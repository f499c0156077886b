"""Checks that a run with custom parts resumes bit-identically after a kill."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from phasetrain.config.compose.override_text import format_literal
from phasetrain.config.stages import LENGTHS
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.hooks import Hook, Run
from phasetrain.testing.build import resolve_overrides
from phasetrain.testing.kills import Killed, SaveEachStep, run_quietly
from phasetrain.testing.trace import Place, Trace

TRAIN_STEPS = 3
TEST_STEPS = 2
EPOCHS = 2
"""Size of the shortened run: updates per epoch, batches per test, and epochs."""

CAUSES = {
    "batch": (
        "another batch: a dataset, transform, sampler, collate function or hook uses a random "
        "generator that the run does not seed, counts its calls, or reads the clock; let it draw "
        "from the global generators, which are seeded before each sample, or take keys "
        "(BatchTransform)"
    ),
    "loss": (
        "the same batch gave another loss: the model, the loss or the task holds something that "
        "is not in its state_dict (a Python number, a list, a buffer with persistent=False), uses "
        "a random generator that the run does not seed, or reads the clock"
    ),
    "metrics": "a meter holds something that is not one of its buffers",
    "hooks": (
        "the hook's state_dict is incomplete, or its load_state_dict does not load all of it"
    ),
    "state": (
        "the part holds something that is not in its state_dict, uses a random generator that the "
        "run does not seed, or reads the clock"
    ),
}
"""Usual causes, by the first component of the first path that differs."""

NOT_LOADED = "load_state_dict does not restore the state that state_dict returned"


@dataclass(frozen=True, order=True)
class Kill:
    """The moment at which an attempt is killed.

    Attributes:
        steps: number of train and test steps that are completed and saved.
        phase_ends: whether the phase that ended with the last of them is saved as complete.
    """

    steps: int
    phase_ends: bool = False

    def __str__(self) -> str:
        return f"step {self.steps}" + (" and the end of its phase" if self.phase_ends else "")


class KillAt(Hook):
    """Kills the run in the first step after a number of completed steps of the whole run.

    Args:
        steps: number of train and test steps.
    """

    observe_only = True

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Kill the run if the steps are exceeded."""
        # Counted over the run, not the attempt: after a resume the count goes on.
        if steps_before(run.plan, phase.index) + run.state.step > self.steps:
            raise Killed


@dataclass
class _Runs:
    """A run without kills, and the attempts of a run that is killed repeatedly."""

    overrides: list[str]
    config_dir: str | None
    workers: Sequence[int] | None
    unbroken: Trace = field(default_factory=Trace)

    def run_unbroken(self, folder: str) -> None:
        run_quietly(
            self._words(folder, 0, None), {"trace": self.unbroken}, config_dir=self.config_dir
        )

    def run_attempt(self, folder: str, number: int, kill: Kill | None) -> Trace:
        """Start or resume the run until the kill or the end, and return its trace."""
        trace = Trace()
        hooks: dict[str, Hook] = {"trace": trace, "save_each_step": SaveEachStep()}
        if kill is not None:
            hooks["kill"] = KillAt(kill.steps)
        try:
            run_quietly(self._words(folder, number, kill), hooks, config_dir=self.config_dir)
        except Killed:
            return trace  # valid up to the kill: the trace is kept in memory, not in the run
        assert kill is None, f"the run ended before {kill}"
        return trace

    def _words(self, folder: str, number: int, kill: Kill | None) -> list[str]:
        words = [
            *self.overrides,
            f"RUN.dir={folder}",
            # What the rehearsal would find is found here at more places, and with its causes.
            "RUN.rehearse=false",
            # Saves at the end of a phase only where the kill is to come after such a save.
            f"CHECKPOINT.every_epochs={1 if kill and kill.phase_ends else 'null'}",
        ]
        if self.workers:
            words.append(f"DATA.TRAIN.workers={self.workers[number % len(self.workers)]}")
        return words


def assert_exact_resume(
    overrides: Sequence[str],
    *,
    steps: Sequence[int] | None = None,
    config_dir: str | None = None,
    workers: Sequence[int] | None = (0, 2),
) -> None:
    """Assert that a killed and resumed run is bit-identical to an uninterrupted one.

    A shortened run (two epochs of three updates, and two batches of each test) is run without
    kills, and again with kills: after the first and after the second step, at the end of the epoch
    before and after it is saved as complete, during the test, and in the next epoch. All batches,
    losses, metrics and states are compared.

    Args:
        overrides: describe the run; its length and its folder do not matter.
        steps: numbers of steps after which to kill it, instead of the default ones.
        config_dir: folder with custom configs.
        workers: numbers of loader workers, used by the attempts in turn; None: as configured.

    Raises:
        AssertionError: names the first difference, the step, the kill before it and a usual cause.

    Example:
        >>> assert_exact_resume(["experiment=digits", "LOSS.name=my_parts.focal"])
    """
    runs = _Runs([*overrides, *shortening_overrides(overrides, config_dir)], config_dir, workers)
    with tempfile.TemporaryDirectory() as folder:
        runs.run_unbroken(f"{folder}/unbroken")
        plan = runs.unbroken.plan
        assert plan is not None, "the run did not begin"
        kills = (
            default_kills(plan) if steps is None else [Kill(step) for step in sorted(set(steps))]
        )
        _check_range(kills, plan)
        before: Kill | None = None
        # The last attempt, without a kill, runs to the end.
        for number, kill in zip(count(), [*kills, None], strict=False):
            trace = runs.run_attempt(f"{folder}/killed", number, kill)
            _compare(runs.unbroken, trace, before, plan)
            before = kill


def shortening_overrides(overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return overrides that shorten a run to two epochs with tests, without scheduled saves."""
    config = resolve_overrides(overrides, config_dir).config
    phases = config.PHASES
    # The other units of length are reset: only one may be set.
    words = ["PHASES.updates=null", "PHASES.samples=null", "PHASES.test_every.epochs=1"]
    if phases.stages:
        stages = [
            {key: value for key, value in stage.items() if key not in LENGTHS} | {"epochs": 1}
            for stage in config.plain()["PHASES"]["stages"]
        ]
        words += ["PHASES.epochs=null", f"PHASES.stages={format_literal(stages, 'PHASES.stages')}"]
    else:
        words.append(f"PHASES.epochs={EPOCHS}")
    if phases.test_every.updates is not None:
        words.append(f"PHASES.test_every.updates={min(phases.test_every.updates, TRAIN_STEPS - 1)}")
    for split, most in (("train", TRAIN_STEPS), ("test", TEST_STEPS)):
        words.append(f"PHASES.limit.{split}={min(phases.limit[split] or most, most)}")
    return [
        *words,
        "RUN.engine=train",
        "RUN.resume=auto",
        "CHECKPOINT.every_updates=null",
        "CHECKPOINT.at_end=true",
    ]


def default_kills(plan: Plan) -> list[Kill]:
    """Return the default kills."""
    total = steps_before(plan, len(plan.phases))
    found = {Kill(1), Kill(2)}
    for phase in plan.phases:
        before = steps_before(plan, phase.index)
        if phase.is_train and phase.epoch == 0 and phase.ends_epoch:
            found |= {Kill(before + phase.steps), Kill(before + phase.steps, phase_ends=True)}
        elif phase.epoch <= 1 or (phase.is_train and len(plan.stages) > 1):
            found.add(Kill(before + 1))
    return sorted(kill for kill in found if 0 < kill.steps < total)


def steps_before(plan: Plan, phase: int) -> int:
    """Return the number of train and test steps in the phases before one."""
    return int(plan.phases[:phase].column("steps").sum())


def _check_range(kills: Sequence[Kill], plan: Plan) -> None:
    total = steps_before(plan, len(plan.phases))
    beyond = [kill.steps for kill in kills if not 0 < kill.steps < total]
    if beyond:
        raise ValueError(
            f"steps = {beyond}: the shortened run has {total} steps; give some from 1 to "
            f"{total - 1}"
        )


def _compare(unbroken: Trace, trace: Trace, kill: Kill | None, plan: Plan) -> None:
    if kill is None:
        when = "before the first kill, so two runs from the start differ"
    else:
        when = f"killed after {kill}"
    if kill is not None:
        if trace.restored is None:
            raise AssertionError(f"{when}, the run started from the beginning instead of resuming")
        place, state = trace.restored
        expected = {
            path: value
            for path, value in unbroken.moments[place].items()
            if path.startswith("state.")
        }
        for path in _differing_paths(expected, state):
            raise AssertionError(
                f"{when}, restored at {_describe_place(place, plan)}: {path} differs; {NOT_LOADED}"
            )
    for place, moment in trace.moments.items():
        for path in _differing_paths(unbroken.moments[place], moment):
            cause = CAUSES[path.partition(".")[0]]
            raise AssertionError(
                f"{when}: {path} differs at {_describe_place(place, plan)}. Usual cause: {cause}"
            )


def _differing_paths(one: dict[str, str], other: dict[str, str]) -> Iterator[str]:
    """Yield the paths that differ, in the order of the first."""
    return (path for path in {**one, **other} if one.get(path) != other.get(path))


def _describe_place(place: Place, plan: Plan) -> str:
    index, step = place
    if step == 0:  # the position after a phase is the start of the next one
        index -= 1
        phase = plan.phases[index]
        return f"the end of phase {index} ({phase.split}, epoch {phase.epoch})"
    phase = plan.phases[index]
    total = steps_before(plan, index) + step
    where = f"step {step} of phase {index}, {phase.split}, epoch {phase.epoch}"
    return f"step {total} of the run ({where})"
