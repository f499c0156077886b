"""Proves which sample or setting made the loss of a run rise (`phasetrain why`)."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, isfinite, nan
from typing import Any

import numpy as np

from phasetrain.addons.experiments.options import WhyOptions
from phasetrain.addons.experiments.travel.forks import (
    AFTER,
    Apply,
    Fork,
    Forks,
    Goal,
    OverBudgetError,
    SampleScore,
    count_replayed,
    with_clipping,
    with_float32,
    with_fresh_optimizer,
    with_learning_rate,
)
from phasetrain.addons.experiments.travel.past_run import PastRun, open_past_run
from phasetrain.addons.experiments.travel.sample_search import SampleSearch, name_samples
from phasetrain.addons.experiments.travel.sample_view import show_sample
from phasetrain.addons.experiments.travel.spikes import (
    LEAST,
    Spike,
    find_spikes,
    measure_usual,
)
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.config.nested import to_json_value
from phasetrain.errors import ChangedError, ConfigError, NumericsError, did_you_mean
from phasetrain.runs.direction import Direction, guess_direction
from phasetrain.runs.ledger import Ledger
from phasetrain.runtime.format import format_count, format_percent, join_first

log = logging.getLogger(__name__)

SUFFIX = "-why"
"""Appended to the path of a run: the folder of the answers."""

NOT_FOUND = 9
"""Exit code if no cause was found, as of other commands that end undecided."""

JUMP = 1.5
"""A learning rate that is larger by this factor than in the update before is tried first."""

JUMP_REACH = 5
"""Number of updates before the suspect in which the learning rate is looked at."""

LARGE_GRADIENT = 2.0
"""Clipping is tried if the gradient is larger by this factor than in the update before."""

MAX_SHOWN = 4
"""Maximum number of samples that are shown."""


@dataclass(frozen=True)
class Cause:
    """The proven cause.

    Attributes:
        kind: `sample`, `samples`, `learning_rate`, `clip`, `state` or `precision`.
        update: the update in which it acted.
        text: the cause as a sentence without the values.
        fork: the fork without it.
        samples: the samples that are the cause.
    """

    kind: str
    update: int
    text: str
    fork: Fork
    samples: tuple[SampleScore, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer to why a value is too high.

    Attributes:
        run: the run folder.
        goal: the value; None if there is no spike.
        spikes: all spikes of the training loss.
        cause: the cause; None if none was found.
        forks: all forks, in order.
        skipped: changes that were not tried, because of the budget.
        samples: the samples of the cause as shown, see `show_sample`.
        replayed: updates that were trained to reach the states of the run.
        trained: updates that were trained in forks and measurements.
        updates: updates of the run.
        limit: maximum number of updates to train.
        path: file of the answer; empty if there is no spike.
        reason: why there is nothing to explain; empty with a goal.
    """

    run: str
    goal: Goal | None
    spikes: Sequence[Spike]
    cause: Cause | None = None
    forks: Sequence[Fork] = ()
    skipped: Sequence[str] = ()
    samples: Sequence[dict[str, Any]] = ()
    replayed: int = 0
    trained: int = 0
    updates: int = 0
    limit: int = 0
    path: str = ""
    reason: str = ""

    @property
    def exit_code(self) -> int:
        """0 if a cause was found, or if there is nothing to explain."""
        return NOT_FOUND if self.goal is not None and self.cause is None else 0

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.goal is None:
            return self.reason
        if self.cause is None:
            tried = [f"update {fork.update} {fork.change}" for fork in self.forks]
            text = f"neither a sample nor a setting alone: tried {join_first(tried, 40)}"
            if self.skipped:
                text += f"; not tried within the budget: {join_first(self.skipped, 8)}"
            return text
        value = self.cause.fork.value
        if value is None:
            return f"{self.cause.text}: without it the update has no samples"
        return (
            f"{self.cause.text} the {self.goal.name} stays at {value:.4g} "
            f"(with: {self.goal.sign * self.goal.spike.value:.4g})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the answer for programs; numbers that are not finite are null."""
        content: dict[str, Any] = {
            "run": self.run,
            "answer": self.sentence,
            "cause": None if self.cause is None else self.cause.kind,
            "cause_update": None if self.cause is None else self.cause.update,
            "goal": None,
            "samples": list(self.samples),
            "forks": [asdict(fork) for fork in self.forks],
            "not_tried": list(self.skipped),
            "spikes": [asdict(spike) for spike in self.spikes],
            "cost": {
                "replayed": self.replayed,
                "trained": self.trained,
                "updates": self.updates,
                "limit": self.limit,
            },
            "path": self.path,
        }
        if self.goal is not None:
            goal, spike = self.goal, self.goal.spike
            content["goal"] = {
                "name": goal.name,
                "update": goal.update,
                "value": goal.sign * spike.value,
                "median": goal.sign * spike.median,
                "usual": goal.sign * spike.usual,
            }
        cleaned: dict[str, Any] = to_json_value(content)
        return cleaned

    def to_text(self) -> str:
        """Return the answer for people."""
        if self.goal is None:
            return self.sentence
        goal, sign = self.goal, self.goal.sign
        lines = [
            f"{goal.name} of update {goal.update} of {self.run}: {sign * goal.spike.value:.4g}; "
            f"the median before it is {sign * goal.spike.median:.4g}, and up to "
            f"{sign * goal.spike.usual:.4g} is usual",
            self.sentence,
            "",
        ]
        for fork in self.forks:
            value = "no samples" if fork.value is None else f"{fork.value:.4g}"
            after = "".join(f", then {loss:.4g}" for loss in fork.after)
            lines.append(f"  update {fork.update} {fork.change}: {value}{after}")
        for sample in self.samples:
            lines += ["", *_format_sample(sample)]
        if self.cause is not None and self.cause.samples:
            ids = [str(sample.id) for sample in self.cause.samples if sample.id is not None]
            if ids:
                text = f"the whole run without: phasetrain rerun {self.run} --without"
                lines += ["", f"{text} {','.join(ids)}"]
        cost = self.replayed + self.trained
        update = goal.suspect if self.cause is None else self.cause.update
        lines += [
            "",
            f"look at it: phasetrain at {self.run} {update}",
            f"cost: {format_count(cost, 'update')} ({self.replayed} replayed, {self.trained} in "
            f"forks), {format_percent(cost, self.updates)} of the run; at most {self.limit}",
            self.path,
        ]
        return "\n".join(lines)


def explain_spike(folder: str, options: WhyOptions) -> Answer:
    """Find the cause of a spike, and write the answer next to the run.

    Args:
        folder: the run folder; it is only read.
        options: the question.

    Raises:
        ConfigError: there is no such update (codes `why.no_such_update`, `why.too_early`) or metric
            (`why.no_metric`), no ledger (`why.no_ledger`), or the budget is too small for a single
            fork (`why.budget`).
        ChangedError: the updates are not those of the run (code `why.differs`), or config or data
            differ.
    """
    with open_past_run(folder, trust=options.trust) as past:
        if not past.ledger:
            raise ConfigError(
                f"{folder!r}: the run has no ledger, which has the loss of each update; train with "
                "the hook `ledger` (HOOKS.ledger={}), which is on by default",
                code="why.no_ledger",
            )
        losses = _read_losses(past, past.ledger)
        spikes = find_spikes(list(losses), [loss.value for loss in losses.values()])
        try:
            goal = _choose_goal(past, losses, spikes, options)
        except _NothingToExplainError as reason:
            return Answer(folder, None, spikes, reason=str(reason), updates=past.last)
        search = _Search(past, past.ledger, goal, int(options.budget * past.last))
        file = f"{goal.name.replace('/', '-')}-{goal.update}.why.json"
        path = f"{past.folder.path}{SUFFIX}/{file}"
        answer = replace(search.answer(), spikes=spikes, updates=past.last, path=path)
        past.write_answer(SUFFIX, file, json.dumps(answer.to_json()) + "\n")
        return answer


class _NothingToExplainError(Exception):
    """The value that was asked about is usual."""


def _read_losses(past: PastRun, ledger: Ledger) -> dict[int, Spike]:
    """Return update -> its loss with those before it, whether it is a spike or not; of a run that a
    loss without a number has stopped, also of the update that it has not made."""
    losses = {update: nan if row.is_skipped else row.loss for update, row in ledger.items()}
    status = past.view.status
    if status.state == "failed" and status.reason.startswith(NumericsError.__name__):
        losses[past.last + 1] = nan
    values = np.array(list(losses.values()))
    rows = zip(losses, values.tolist(), *map(np.ndarray.tolist, measure_usual(values)), strict=True)
    return {update: Spike(update, update, *numbers) for update, *numbers in rows}


def _choose_goal(
    past: PastRun, losses: Mapping[int, Spike], spikes: Sequence[Spike], options: WhyOptions
) -> Goal:
    folder = past.folder.path
    if options.metric:
        return _choose_metric(past, losses, options.metric)
    if options.update is None:
        if not spikes:
            raise _NothingToExplainError(
                f"no spike in {format_count(len(losses), 'update')} of {folder}; --update U "
                "explains an update that you choose, --metric SPLIT/METRIC a jump of a metric"
            )
        # The one that has ended the run, or the highest.
        spike = max(spikes, key=lambda spike: (spike.last > past.last, spike.height))
        return Goal("loss", spike.update, spike.update, spike)
    chosen = losses.get(options.update)
    if chosen is None:
        raise ConfigError(
            f"--update {options.update}: {folder} has made {format_count(past.last, 'update')}; "
            f"expected one from {min(losses)} to {max(losses)}",
            code="why.no_such_update",
        )
    # The loss may rise only after the update that has made it rise.
    for update in range(options.update, options.update + AFTER + 1):
        spike = losses.get(update, chosen)
        if not spike.value <= spike.usual:
            return Goal("loss", update, update, spike)
    if chosen.usual == inf:
        raise ConfigError(
            f"--update {options.update}: {LEAST} updates before it are needed to say which losses "
            f"are usual; expected one from {min(losses) + LEAST} to {max(losses)}",
            code="why.too_early",
        )
    raise _NothingToExplainError(
        f"update {options.update} of {folder} is no spike, and neither are those after it: its "
        f"loss is {chosen.value:.4g}; the median before it is {chosen.median:.4g}, and up to "
        f"{chosen.usual:.4g} is usual"
    )


def _choose_metric(past: PastRun, losses: Mapping[int, Spike], name: str) -> Goal:
    """Return the largest jump of a metric between two tests, in the direction that is worse."""
    split, _, metric = name.partition("/")
    lines = [line for line in past.view.lines if line.metrics]
    measured = [line for line in lines if line.split == split and metric in line.metrics]
    if len(measured) < 2:
        known = list(dict.fromkeys(f"{line.split}/{key}" for line in lines for key in line.metrics))
        raise ConfigError(
            f"--metric {name}: the run has measured it {format_count(len(measured), 'time')}; "
            f"expected a metric of two tests, from {join_first(known, 8)}"
            f"{did_you_mean(name, known)}",
            code="why.no_metric",
        )
    stated = measured[-1].content.get("directions", {}).get(metric)
    is_larger = (stated or guess_direction(metric)) == Direction.LARGER
    sign = -1.0 if is_larger else 1.0
    values = [sign * line.metrics[metric] for line in measured]
    rises = [after - before for before, after in pairwise(values)]
    rises = [rise if isfinite(rise) else inf for rise in rises]
    place = int(np.argmax(rises))
    if rises[place] <= 0:
        raise _NothingToExplainError(f"{name} never becomes worse from one test to the next")
    before, after = measured[place], measured[place + 1]
    half = values[place] + rises[place] / 2 if isfinite(rises[place]) else 2 * values[place]
    spike = Spike(after.updates, after.updates, values[place + 1], values[place], half, half)
    between = [loss for update, loss in losses.items() if before.updates < update <= after.updates]
    if not between:
        raise _NothingToExplainError(f"{name} becomes worse without an update between the tests")
    suspect = max(between, key=lambda loss: loss.height if loss.limit < inf else loss.value)
    return Goal(name, after.updates, suspect.update, spike, sign)


class _Search:
    """Searches the cause of a spike by forks."""

    def __init__(self, past: PastRun, ledger: Ledger, goal: Goal, limit: int) -> None:
        self._past = past
        self._ledger = ledger
        self._goal = goal
        self._limit = limit
        self._jump = self._find_jump()
        # The state before this update must be reached first: those after it are kept on the way.
        self._first = max(1, goal.suspect - 1)
        if self._jump is not None:
            self._first = min(self._first, self._jump[0])

    def answer(self) -> Answer:
        """Return the answer, without the facts about the run."""
        goal, past = self._goal, self._past
        way = goal.suspect - self._first
        replayed = count_replayed(past, self._first) + way
        least = replayed + 2 + goal.update - goal.suspect
        if least > self._limit:
            raise ConfigError(
                f"{past.folder.path!r}: {format_count(replayed, 'update')} have to be trained "
                f"to reach update {goal.suspect}, and {least} with the first fork, more than "
                f"{self._limit} of {past.last}; raise --budget to {1.5 * least / past.last:.2f} or "
                "more, or train with checkpoints (CHECKPOINT.keep_every.updates)",
                code="why.budget",
            )
        with Visit(past, self._first) as visit:
            self._check(visit.first_difference)
            replayed = visit.replayed + way
            norms = [self._step(visit) for _ in range(way)]
            forks = Forks(visit, goal, self._limit, replayed)
            cause = self._find_cause(forks, norms)
            samples: list[dict[str, Any]] = []
            if cause is not None and cause.samples:
                forks.visit.goto(cause.update)
                samples = [show_sample(visit, score) for score in cause.samples[:MAX_SHOWN]]
        return Answer(
            past.folder.path,
            goal,
            (),
            cause,
            forks.forks,
            forks.skipped,
            samples,
            forks.replayed,
            forks.trained,
            limit=self._limit,
        )

    def _check(self, difference: tuple[int, Sequence[str]] | None) -> None:
        if difference is not None:
            update, components = difference
            raise ChangedError(
                f"update {update}, trained again, is not the update of the run: "
                f"{', '.join(components)} differ from the ledger, so forks would prove nothing "
                f"about it; phasetrain replay {self._past.folder.path} RUN.step={update} shows why",
                code="why.differs",
            )

    def _step(self, visit: Visit) -> float | None:
        """Train an update of the run, and return the norm of its gradient."""
        report = visit.step()
        if report.differs:
            self._check((report.update, report.differs))
        return report.gradient_norm

    def _find_jump(self) -> tuple[int, float] | None:
        """Return the last update before the spike whose learning rate jumps, and the rate before
        it."""
        suspect = self._goal.suspect
        end = suspect if self._goal.name == "loss" else self._goal.update + 1
        jumps = [
            (update, self._ledger[update - 1].lr)
            for update in range(suspect - JUMP_REACH, end)
            if update in self._ledger
            and update - 1 in self._ledger
            and self._ledger[update].lr > JUMP * self._ledger[update - 1].lr > 0
        ]
        return jumps[-1] if jumps else None

    def _find_cause(self, forks: Forks, norms: Sequence[float | None]) -> Cause | None:
        suspect = self._goal.suspect
        if self._jump is not None:
            update, lr = self._jump
            factor = lr / self._ledger[update].lr
            change = f"with learning rate {lr:.4g} instead of {self._ledger[update].lr:.4g}"
            fork = forks.fork(update, change, partial(with_learning_rate, lambda lr: lr * factor))
            if fork is not None and fork.removes:
                text = f"the learning rate of update {update}: {change}"
                return Cause("learning_rate", update, text, fork)
        is_loss = self._goal.name == "loss" and suspect > 1
        cause = None
        if not is_loss or self._is_batch_wrong(forks):
            cause = self._find_samples(forks, suspect)
        if cause is None and is_loss:
            cause = self._find_samples(forks, suspect - 1)
        return cause or self._find_setting(forks, norms)

    def _is_batch_wrong(self, forks: Forks) -> bool:
        """Return whether the batch has a high loss one update earlier, too; otherwise that update
        has damaged the weights."""
        try:
            return not forks.move_batch(self._goal.suspect - 1).removes
        except OverBudgetError:
            return True

    def _find_samples(self, forks: Forks, update: int) -> Cause | None:
        """Search the smallest group of samples of an update without which there is no spike."""
        found = SampleSearch(forks, update).find()
        if found is None:
            return None
        chosen, fork = found
        number, pronoun = ("alone", "it") if len(chosen) == 1 else ("together", "them")
        text = f"{name_samples(chosen)} {number}, in update {update}: without {pronoun}"
        kind = "sample" if len(chosen) == 1 else "samples"
        return Cause(kind, update, text, fork, tuple(chosen))

    def _find_setting(self, forks: Forks, norms: Sequence[float | None]) -> Cause | None:
        """Search a setting of the update before the spike without which there is none."""
        goal = self._goal
        update = goal.suspect if goal.name != "loss" else max(1, goal.suspect - 1)
        changes: list[tuple[str, str, Apply]] = [
            ("learning_rate", "with half the learning rate", _scale(0.5)),
        ]
        norm = dict(zip(range(self._first, goal.suspect), norms, strict=True)).get(update)
        usual = self._find_usual_norm(update)
        if norm is not None and usual is not None and norm > LARGE_GRADIENT * usual:
            text = f"with its gradient clipped to norm {usual:.4g} (it has {norm:.4g})"
            changes.append(("clip", text, partial(with_clipping, usual)))
        changes.append(("state", "with a fresh state of the optimizer", with_fresh_optimizer))
        if self._past.setup.machine.uses_autocast():
            changes.append(("precision", "in float32", with_float32))
        changes.append(("learning_rate", "with a tenth of the learning rate", _scale(0.1)))
        for kind, text, apply in changes:
            fork = forks.fork(update, text, apply)
            if fork is not None and fork.removes:
                return Cause(kind, update, f"no single sample: update {update} {text}:", fork)
        return None

    def _find_usual_norm(self, update: int) -> float | None:
        """Return the median norm of the gradients before an update, if the ledger has them."""
        norms = [
            record.norm
            for number, record in self._ledger.items()
            if update - 50 <= number < update and record.norm
        ]
        return float(np.median(norms)) if norms else None


def _scale(factor: float) -> Apply:
    return partial(with_learning_rate, lambda lr: lr * factor)


def _format_sample(sample: dict[str, Any]) -> list[str]:
    """Return lines about a sample, see `show_sample`."""
    name = f"at place {sample['place']}" if sample["id"] is None else f"{sample['id']:,}"
    lines = [
        f"sample {name}: input {sample['input']}; target {sample['target'] or 'none'}; alone its "
        f"loss is {sample['loss']:.4g} and its gradient has norm {sample['gradient_norm']:.4g}"
    ]
    if sample["text"] is not None:
        lines.append(f"  text: {sample['text']!r}")
    if sample.get("seed"):
        lines.append(f"  drawn with augmentation seed {sample['seed']}")
    if sample.get("updates"):
        lines.append(f"  all updates with it: {join_first(sample['updates'], 12)}")
    if sample["image"] is not None:
        lines.append("  its picture is in the report and in the file below")
    return lines
