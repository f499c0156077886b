"""Proves which sample or setting made the loss of a run rise (`phasetrain why`)."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import inf, isfinite, nan
from typing import Any

import numpy as np
from torch import Tensor

from phasetrain.addons.experiments.judge.trained_runs import check_metric
from phasetrain.addons.experiments.options import WhyOptions
from phasetrain.addons.experiments.travel.forks import (
    AFTER,
    Apply,
    Cause,
    Forks,
    Goal,
    SampleScore,
    SampleSearch,
    list_samples,
    select_rows,
    with_batches,
    with_clipping,
    with_float32,
    with_fresh_optimizer,
    with_learning_rate,
)
from phasetrain.addons.experiments.travel.order import SampleOrder
from phasetrain.addons.experiments.travel.past_run import PastRun, open_past_run
from phasetrain.addons.experiments.travel.spikes import LEAST, Spike, find_spikes, measure_points
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.config.addons import find_service
from phasetrain.config.nested import to_json_value
from phasetrain.engine.plan import TRAIN
from phasetrain.errors import ConfigError, NumericsError
from phasetrain.runs.direction import Direction
from phasetrain.runs.history import read_history
from phasetrain.runtime.format import format_count, format_percent, join_first, shorten
from phasetrain.runtime.nested import list_tensors, map_tensors
from phasetrain.runtime.png import encode_png

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


MAX_TEXT = 400
"""Maximum number of characters of a text."""

MAX_UPDATES = 50
"""Maximum number of updates with a sample that are listed."""


class Answer(dict[str, Any]):
    """The answer to why a value is too high, for programs; numbers may be infinite or NaN."""

    @property
    def exit_code(self) -> int:
        """0 if a cause was found, or if there is nothing to explain."""
        return NOT_FOUND if self["goal"] is not None and self["cause"] is None else 0

    def to_text(self) -> str:
        """Return the answer for people."""
        goal = self["goal"]
        if goal is None:
            return str(self["answer"])
        run, cost = self["run"], self["cost"]
        lines = [
            f"{goal['name']} of update {goal['update']} of {run}: {goal['value']:.4g}; the median "
            f"before it is {goal['median']:.4g}, and up to {goal['usual']:.4g} is usual",
            self["answer"],
            "",
        ]
        for fork in self["forks"]:
            value = "no samples" if fork["value"] is None else f"{fork['value']:.4g}"
            after = "".join(f", then {loss:.4g}" for loss in fork["after"])
            lines.append(f"  update {fork['update']} {fork['change']}: {value}{after}")
        for sample in self["samples"]:
            lines += ["", *_format_sample(sample)]
        if self["cause_samples"]:
            ids = ",".join(map(str, self["cause_samples"]))
            lines += ["", f"the whole run without: phasetrain rerun {run} --without {ids}"]
        updates = cost["replayed"] + cost["trained"]
        lines += [
            "",
            f"look at it: phasetrain at {run} {self['cause_update'] or goal['suspect']}",
            f"cost: {format_count(updates, 'update')} ({cost['replayed']} replayed, "
            f"{cost['trained']} in forks), {format_percent(updates, cost['updates'])} of the run; "
            f"at most {cost['limit']}",
            self["path"],
        ]
        return "\n".join(lines)


def explain_spike(folder: str, options: WhyOptions) -> Answer:
    """Find the cause of a spike, and write the answer next to the run.

    Args:
        folder: the run folder; it is only read.
        options: the question.

    Raises:
        ConfigError: there is no such update (code `why.no_such_update`), metric (`judge.no_metric`)
            or ledger (`why.no_ledger`), or the budget is too small for a single fork
            (`why.budget`).
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
        losses = _read_losses(past)
        spikes = find_spikes(list(losses), [loss.value for loss in losses.values()])
        goal = _choose_goal(past, losses, spikes, options)
        limit = int(options.budget * past.last)
        answer = Answer(
            **dict.fromkeys(("cause", "cause_update", "goal")),
            **{name: [] for name in ("cause_samples", "samples", "forks", "not_tried")},
            run=past.folder.path,
            answer=goal,
            spikes=[asdict(spike) for spike in spikes],
            cost={"replayed": 0, "trained": 0, "updates": past.last, "limit": limit},
            path="",
        )
        if isinstance(goal, Goal):
            _Search(past, goal, limit).explain(answer)
            file = f"{goal.name.replace('/', '-')}-{goal.update}.why.json"
            answer["path"] = f"{past.folder.path}{SUFFIX}/{file}"
            past.write_answer(SUFFIX, file, json.dumps(to_json_value(answer)) + "\n")
        return answer


def _read_losses(past: PastRun) -> dict[int, Spike]:
    """Return update -> its loss with those before it, whether it is a spike or not; of a run that a
    loss without a number has stopped, also of the update that it has not made."""
    losses = {update: nan if row.is_skipped else row.loss for update, row in past.ledger.items()}
    status = past.view.status
    if status.state == "failed" and status.reason.startswith(NumericsError.__name__):
        losses[past.last + 1] = nan
    points = measure_points(list(losses), list(losses.values()))
    return dict(zip(losses, points, strict=True))


def _choose_goal(
    past: PastRun, losses: Mapping[int, Spike], spikes: Sequence[Spike], options: WhyOptions
) -> Goal | str:
    """Return the value to explain, or why there is none."""
    folder = past.folder.path
    if options.metric:
        return _choose_metric(past, losses, options.metric)
    if options.update is None:
        if not spikes:
            return (
                f"no spike in {format_count(len(losses), 'update')} of {folder}; --update U "
                "explains an update that you choose, --metric SPLIT/METRIC a jump of a metric"
            )
        # The one that has ended the run, or the highest.
        spike = max(spikes, key=lambda spike: (spike.last > past.last, spike.height))
        return Goal("loss", spike.update, spike.update, spike)
    chosen = losses.get(options.update)
    if chosen is None or (isfinite(chosen.value) and chosen.usual == inf):
        raise ConfigError(
            f"--update {options.update}: {folder} has made {format_count(past.last, 'update')}, "
            f"and {LEAST} before it are needed to say which losses are usual; expected one from "
            f"{min(losses) + LEAST} to {max(losses)}",
            code="why.no_such_update",
        )
    # The loss may rise only after the update that has made it rise.
    for update in range(options.update, options.update + AFTER + 1):
        spike = losses.get(update, chosen)
        if not spike.value <= spike.usual:
            return Goal("loss", update, update, spike)
    return (
        f"update {options.update} of {folder} is no spike, and neither are those after it: its "
        f"loss is {chosen.value:.4g}; the median before it is {chosen.median:.4g}, and up to "
        f"{chosen.usual:.4g} is usual"
    )


def _choose_metric(past: PastRun, losses: Mapping[int, Spike], name: str) -> Goal | str:
    """Return the largest jump of a metric between two tests, in the direction that is worse."""
    check_metric(past.folder.path, name)
    history = read_history(past.view)
    sign = -1.0 if history.direction_of(name) == Direction.LARGER else 1.0
    updates = [update for update, _ in history.scalar(name)]
    values = [sign * value for _, value in history.scalar(name)]
    rises = [after - before for before, after in pairwise(values)]
    rises = [rise if isfinite(rise) else inf for rise in rises]
    largest = max(rises, default=0.0)
    if largest <= 0:
        return f"{name} never becomes worse from one test to the next"
    place = rises.index(largest)
    before, after = updates[place : place + 2]
    half = values[place] + largest / 2 if isfinite(largest) else 2 * values[place]
    spike = Spike(after, after, values[place + 1], values[place], half, half)
    between = [loss for update, loss in losses.items() if before < update <= after]
    if not between:
        return f"{name} becomes worse without an update between the tests"
    suspect = max(between, key=lambda loss: loss.height if loss.limit < inf else loss.value)
    return Goal(name, after, suspect.update, spike, sign)


@dataclass(frozen=True)
class _Search:
    """Searches the cause of a spike by forks, with a maximum number of updates."""

    past: PastRun
    goal: Goal
    limit: int

    def explain(self, answer: Answer) -> None:
        """Search the cause, and put it into an answer."""
        goal, past = self.goal, self.past
        # At least this update is trained and compared, also if a checkpoint follows it.
        first = max(1, goal.suspect - 1)
        replayed = past.count_replayed(first) + goal.suspect - first
        least = replayed + 2 + goal.update - goal.suspect
        if least > self.limit:
            raise ConfigError(
                f"{past.folder.path!r}: {format_count(replayed, 'update')} have to be trained "
                f"to reach update {goal.suspect}, and {least} with the first fork, more than "
                f"{self.limit} of {past.last}; raise --budget to {1.5 * least / past.last:.2f} or "
                "more, or train with checkpoints (CHECKPOINT.keep_every.updates)",
                code="why.budget",
            )
        with Visit(past, first) as visit:
            forks = Forks(visit, goal, self.limit)
            if first < goal.suspect:
                differs = visit.step().differs
                forks.check(1, (first, differs) if differs else None)
            cause = self._find_cause(forks)
            scores = () if cause is None else cause.samples
            if cause is not None and scores:
                visit.goto(cause.update)
            samples = [_show_sample(visit, score) for score in scores[:MAX_SHOWN]]
        answer |= {
            "answer": _make_sentence(goal, cause, forks),
            "cause": None if cause is None else cause.kind,
            "cause_update": None if cause is None else cause.update,
            "cause_samples": [score.id for score in scores if score.id is not None],
            "samples": samples,
            "goal": {
                "name": goal.name,
                "update": goal.update,
                "suspect": goal.suspect,
                "value": goal.sign * goal.spike.value,
                "median": goal.sign * goal.spike.median,
                "usual": goal.sign * goal.spike.usual,
            },
            "forks": [asdict(fork) for fork in forks.forks],
            "not_tried": forks.skipped,
        }
        answer["cost"] |= {"replayed": forks.replayed, "trained": forks.trained}

    def _find_cause(self, forks: Forks) -> Cause | None:
        suspect = self.goal.suspect
        batches = forks.visit.batches
        cause = self._find_jump(forks)
        if cause is not None:
            return cause
        is_loss = self.goal.name == "loss" and suspect > 1
        moved = None
        if is_loss:
            change = f"with the samples of update {suspect}"
            move = partial(with_batches, batches)
            moved = forks.fork(suspect - 1, change, move, further=False, last=suspect - 1)
        # If the batch has a usual loss one update earlier, that update has damaged the weights.
        if moved is None or not moved.removes:
            cause = SampleSearch(forks, suspect).find()
        if cause is None and is_loss:
            cause = SampleSearch(forks, suspect - 1).find()
        return cause or self._find_setting(forks)

    def _find_jump(self, forks: Forks) -> Cause | None:
        """Try the last update before the spike whose learning rate jumps with the rate before."""
        suspect = self.goal.suspect
        end = suspect if self.goal.name == "loss" else self.goal.update + 1
        for update in reversed(range(suspect - JUMP_REACH, end)):
            before, row = map(self.past.ledger.get, (update - 1, update))
            if before is None or row is None or not row.lr > JUMP * before.lr > 0:
                continue
            change = f"with learning rate {before.lr:.4g} instead of {row.lr:.4g}"
            factor = before.lr / row.lr
            fork = forks.fork(update, change, partial(with_learning_rate, factor))
            if fork is None or not fork.removes:
                return None
            text = f"the learning rate of update {update}: {change}"
            return Cause("learning_rate", update, text, fork)
        return None

    def _find_setting(self, forks: Forks) -> Cause | None:
        """Search a setting of the update before the spike without which there is none."""
        goal = self.goal
        update = goal.suspect if goal.name != "loss" else max(1, goal.suspect - 1)
        half, tenth = (partial(with_learning_rate, factor) for factor in (0.5, 0.1))
        changes: list[tuple[str, str, Apply]] = [
            ("learning_rate", "with half the learning rate", half)
        ]
        # 0 if the ledger has no norms.
        rows = [self.past.ledger.get(number) for number in range(max(1, update - 50), update + 1)]
        *before, norm = [0.0 if row is None else row.norm for row in rows]
        usual = float(np.median([value for value in before if value] or [inf]))
        if norm > LARGE_GRADIENT * usual:
            text = f"with its gradient clipped to norm {usual:.4g} (it has {norm:.4g})"
            changes.append(("clip", text, partial(with_clipping, usual)))
        changes.append(("state", "with a fresh state of the optimizer", with_fresh_optimizer))
        if self.past.setup.machine.uses_autocast():
            changes.append(("precision", "in float32", with_float32))
        changes.append(("learning_rate", "with a tenth of the learning rate", tenth))
        for kind, text, apply in changes:
            fork = forks.fork(update, text, apply)
            if fork is not None and fork.removes:
                return Cause(kind, update, f"no single sample: update {update} {text}:", fork)
        return None


def _make_sentence(goal: Goal, cause: Cause | None, forks: Forks) -> str:
    """Return the answer in one sentence."""
    if cause is None:
        tried = [f"update {fork.update} {fork.change}" for fork in forks.forks]
        text = f"neither a sample nor a setting alone: tried {join_first(tried, 40)}"
        if forks.skipped:
            text += f"; not tried within the budget: {join_first(forks.skipped, 8)}"
        return text
    value = cause.fork.value
    if value is None:
        return f"{cause.text}: without it the update has no samples"
    spike = goal.sign * goal.spike.value
    return f"{cause.text} the {goal.name} stays at {value:.4g} (with: {spike:.4g})"


def _show_sample(visit: Visit, score: SampleScore) -> dict[str, Any]:
    """Return the facts about a sample of the next update of a visit, for programs.

    Returns:
        `id`, `place`, `loss` and `gradient_norm` as measured alone; `input` and `target` as text;
        `image`, `stored_image` (data URLs, as drawn and as in the dataset) and `text` if it has
        one; `seed` of its augmentation, and `updates`, all updates with it.
    """
    batch, row, _ = list_samples(visit.batches)[score.place]
    alone = select_rows(batch, [row])
    value, target = (
        map_tensors(values, lambda tensor: tensor[0] if tensor.ndim else tensor)
        for values in (alone.input, alone.target)
    )
    shown: dict[str, Any] = {
        "id": score.id,
        "place": score.place,
        "loss": score.loss,
        "gradient_norm": score.gradient_norm,
        "input": _describe(value),
        "target": _describe(target),
        "image": _draw(value),
        "text": _decode(visit, value),
    }
    if score.id is None:
        return shown
    dataset = visit.past.data[TRAIN].reader.dataset
    sample = dataset[score.id]
    stored = sample[0] if isinstance(sample, tuple | list) else sample
    shown["stored_image"] = _draw(stored)
    try:
        table = SampleOrder(visit.past).find_sample(score.id)
    except ConfigError:
        return shown  # a stream or a custom loader: its order is unknown
    updates = table.list_column("update")
    seeds = dict(zip(updates, table.list_column("seed"), strict=True))
    return {**shown, "seed": seeds.get(visit.update), "updates": updates[:MAX_UPDATES]}


def _describe(value: Any) -> str:
    """Return form and values of one sample, such as `float32 (1, 8, 8), -0.4 to 1`."""
    parts = []
    for tensor in list_tensors(value):
        numbers = tensor.detach().double().cpu().flatten()
        if len(numbers) == 1:
            parts.append(f"{float(numbers):g}")
        elif len(numbers):
            name = str(tensor.dtype).removeprefix("torch.")
            low, high = float(numbers.min()), float(numbers.max())
            parts.append(f"{name} {tuple(tensor.shape)}, {low:.4g} to {high:.4g}")
    return "; ".join(parts)


def _draw(value: Any) -> str | None:
    """Return a picture as a data URL, as the report draws it; None if it is none."""
    normalize = find_service("normalize_pixels")
    first, *_ = [*list_tensors(value), value]
    array = first.detach().cpu().float().numpy() if isinstance(first, Tensor) else np.asarray(first)
    if normalize is None or array.dtype.kind not in "biuf":
        return None
    pixels = normalize(array)
    if pixels is None:
        return None
    return f"data:image/png;base64,{b64encode(encode_png(pixels)).decode()}"


def _decode(visit: Visit, value: Any) -> str | None:
    """Return the text of a sample of tokens; None if the dataset has no tokenizer."""
    open_codec = find_service("open_dataset_codec")
    if open_codec is None or not isinstance(value, Tensor) or value.ndim != 1:
        return None
    try:
        text = open_codec(visit.task.config.DATA.TRAIN).decode(value.tolist())
    except (ConfigError, ValueError, OSError):
        return None
    return shorten(str(text), MAX_TEXT)


def _format_sample(sample: dict[str, Any]) -> list[str]:
    """Return lines about a sample, see `_show_sample`."""
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
