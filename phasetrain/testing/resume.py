"""Whether a run of one's own parts goes on bit for bit after a kill."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from phasetrain.config.compose.overrides import as_word
from phasetrain.config.stages import LENGTHS
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.hooks import Hook, Run
from phasetrain.testing.build import settled
from phasetrain.testing.kills import Killed, SaveEachStep, run_quietly
from phasetrain.testing.trace import Place, Trace

TRAIN_STEPS = 3
TEST_STEPS = 2
EPOCHS = 2
"""The cut of a run: at most so many updates per epoch and batches per test, and so many epochs."""

CAUSES = {
    "batch": (
        "another batch: a data set, transform, sampler, collate function or hook draws from a generator of its own, "
        "counts its calls, or looks at the clock; let it draw from the global generators, which are seeded before each "
        "sample, or take keys (BatchTransform)"
    ),
    "loss": (
        "the same batch gave another loss: the model, the loss or the task holds something that its state_dict does "
        "not have (a Python number, a list, a buffer with persistent=False), draws from a generator of its own, or "
        "looks at the clock"
    ),
    "metrics": "a meter holds something that is not one of its buffers",
    "hooks": "the hook does not return all that it holds from state_dict, or does not take it over in load_state_dict",
    "state": (
        "the part holds something that its state_dict does not have, draws from a generator of its own, or looks at "
        "the clock"
    ),
}
"""Usual causes, by the first word of the path that differs first."""

NOT_TAKEN_OVER = "load_state_dict does not bring back what state_dict returned"


@dataclass(frozen=True, order=True)
class Kill:
    """When an attempt ends without a word.

    Attributes:
        steps: train and test steps of the run that are complete and saved.
        phase_ends: the phase that ended with the last of them is saved as complete, too.
    """

    steps: int
    phase_ends: bool = False

    def __str__(self) -> str:
        return f"step {self.steps}" + (" and the end of its phase" if self.phase_ends else "")


class KillAt(Hook):
    """Ends the run at the first step beyond a number of completed steps, wherever the attempt
    began.

    Args:
        steps: train and test steps of the run that stay.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """End the run if it is time."""
        if steps_before(run.plan, phase.index) + run.state.step > self.steps:
            raise Killed


@dataclass
class _Story:
    """The run that is killed again and again, beside the one that is not."""

    overrides: list[str]
    config_dir: str | None
    workers: Sequence[int] | None
    unbroken: Trace = field(default_factory=Trace)

    def run_unbroken(self, folder: str) -> None:
        run_quietly(
            self._words(folder, 0, None), {"trace": self.unbroken}, config_dir=self.config_dir
        )

    def attempt(self, folder: str, number: int, kill: Kill | None) -> Trace:
        """Run or go on until the kill, or to the end, and return what was seen."""
        trace = Trace()
        hooks: dict[str, Hook] = {"trace": trace, "save_each_step": SaveEachStep()}
        if kill is not None:
            hooks["kill"] = KillAt(kill.steps)
        try:
            run_quietly(self._words(folder, number, kill), hooks, config_dir=self.config_dir)
        except Killed:
            return trace
        assert kill is None, f"the run ended before {kill}"
        return trace

    def _words(self, folder: str, number: int, kill: Kill | None) -> list[str]:
        words = [
            *self.overrides,
            f"RUN.dir={folder}",
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
    """See that a run which is killed and started again equals one that was never interrupted, bit
    for bit.

    A small cut of the run (two epochs of three updates, and two batches of each test) is run once
    as a whole, and once with kills: after the first step, after the second one (so twice within an
    epoch), at the end of the epoch before and after it is saved as complete, inside the test, and
    in the next epoch. Every batch, loss, metric and state is compared.

    Args:
        overrides: describe the run; its length and its folder do not matter.
        steps: train and test steps after which it is killed, instead.
        config_dir: a folder with configs of your own.
        workers: numbers of loader workers that the attempts take in turn; None leaves them as
            configured.

    Raises:
        AssertionError: something differs; it names the first thing that does, when, after which
            kill, and what the cause may be.

    Example:
        >>> assert_exact_resume(["experiment=digits", "LOSS.name=my_parts.focal"])
    """
    story = _Story([*overrides, *shortened(overrides, config_dir)], config_dir, workers)
    with tempfile.TemporaryDirectory() as folder:
        story.run_unbroken(f"{folder}/unbroken")
        plan = story.unbroken.plan
        assert plan is not None, "the run did not begin"
        kills = usual_kills(plan) if steps is None else [Kill(step) for step in sorted(set(steps))]
        _refuse_beyond(kills, plan)
        before: Kill | None = None
        for number, kill in zip(count(), [*kills, None], strict=False):
            trace = story.attempt(f"{folder}/killed", number, kill)
            _compare(story.unbroken, trace, before, plan)
            before = kill


def shortened(overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return the overrides that cut a run down to two short epochs with tests, saved where the kit
    asks for it."""
    config = settled(overrides, config_dir).config
    phases = config.PHASES
    words = ["PHASES.updates=null", "PHASES.samples=null", "PHASES.test_every.epochs=1"]
    if phases.stages:
        stages = [
            {key: value for key, value in stage.items() if key not in LENGTHS} | {"epochs": 1}
            for stage in config.plain()["PHASES"]["stages"]
        ]
        words += ["PHASES.epochs=null", f"PHASES.stages={as_word(stages)}"]
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


def usual_kills(plan: Plan) -> list[Kill]:
    """Return when a run is killed unless told otherwise."""
    total = sum(phase.steps for phase in plan.phases)
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
    return sum(earlier.steps for earlier in plan.phases[:phase])


def _refuse_beyond(kills: Sequence[Kill], plan: Plan) -> None:
    total = steps_before(plan, len(plan.phases))
    beyond = [kill.steps for kill in kills if not 0 < kill.steps < total]
    if beyond:
        raise ValueError(
            f"steps = {beyond}: the cut of the run has {total} steps; give some from 1 to {total - 1}"
        )


def _compare(unbroken: Trace, trace: Trace, kill: Kill | None, plan: Plan) -> None:
    if kill is None:
        when = "before the first kill, so two runs from the start differ"
    else:
        when = f"killed after {kill}"
    if kill is not None:
        if trace.restored is None:
            raise AssertionError(f"{when}, the run began anew instead of going on")
        place, state = trace.restored
        expected = {
            path: value
            for path, value in unbroken.moments[place].items()
            if path.startswith("state.")
        }
        for path in _apart(expected, state):
            raise AssertionError(
                f"{when}, restored at {_told(place, plan)}: {path} differs; {NOT_TAKEN_OVER}"
            )
    for place, moment in trace.moments.items():
        for path in _apart(unbroken.moments[place], moment):
            cause = CAUSES[path.partition(".")[0]]
            raise AssertionError(
                f"{when}: {path} differs at {_told(place, plan)}. Usual cause: {cause}"
            )


def _apart(one: dict[str, str], other: dict[str, str]) -> Iterator[str]:
    """Yield the paths that differ, in the order of the first."""
    return (path for path in {**one, **other} if one.get(path) != other.get(path))


def _told(place: Place, plan: Plan) -> str:
    index, step = place
    if step == 0:
        index, step = index - 1, plan.phases[index - 1].steps
        phase = plan.phases[index]
        return f"the end of phase {index} ({phase.split}, epoch {phase.epoch})"
    phase = plan.phases[index]
    total = steps_before(plan, index) + step
    return f"step {total} of the run (step {step} of phase {index}, {phase.split}, epoch {phase.epoch})"
