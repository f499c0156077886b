"""From differences to sentences, with the place in the script and the usual remedy."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phasetrain.addons.audit.compare import Difference, Samples, is_effect
from phasetrain.addons.audit.cost import Cost
from phasetrain.addons.audit.remedies import find_remedy
from phasetrain.addons.audit.trace import Ranks, Trace

LISTED_RANKS = 4
"""Maximum number of ranks whose samples a sentence lists."""

EXACT, DIFFERS, NOT_AUDITED, NOT_DETERMINISTIC = range(4)
"""Exit codes."""

STATE_NAMES = {
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "max_exp_avg_sq": "largest second moment",
    "momentum_buffer": "momentum",
    "square_avg": "mean of squared gradients",
    "step": "count of steps",
    "sum": "sum of squared gradients",
}
"""Key of an optimizer's state -> what it is called."""

GENERATORS = {
    "torch": "torch's generator",
    "cuda": "the generators of CUDA",
    "numpy": "NumPy's generator",
    "python": "Python's generator (random)",
}

ROUNDED = 6
"""Digits of numbers in sentences."""


@dataclass(frozen=True)
class Finding:
    """One thing that a resume does not restore.

    Attributes:
        code: kind of it, such as `samples`; stable.
        sentence: the difference in words.
        place: `file:line` in the script, or empty.
        remedy: lines of code.
        part: the part of the state by its name.
        update: first update that differs.
        ranks: ranks in which it differs first; empty if there is one process.
    """

    code: str
    sentence: str
    place: str = ""
    remedy: str = ""
    part: str = ""
    update: int = 0
    ranks: Sequence[str] = ()


@dataclass(frozen=True)
class Check:
    """One question of the audit and its answer.

    Attributes:
        name: `resume`, `second_resume`, `workers`, `torn_save`.
        exit_code: see the codes of this module.
        sentence: the answer.
        findings: the differences, causes first.
        effects: parts that differ as a consequence.
        curves: name -> losses per update, for the page.
        cost: cost of the kill; None for a question about a kill that has been asked before.
        samples: counts of the samples of the epoch, of all ranks and of each; empty if their
            order does not differ.
        file: of a torn save, the name of its file with `#` for each number.
    """

    name: str
    exit_code: int
    sentence: str
    findings: Sequence[Finding] = ()
    effects: Sequence[str] = ()
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    cost: Cost | None = None
    samples: Sequence[Samples] = ()
    file: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON data, without its curves."""
        content = asdict(self)
        del content["curves"]
        return content


def make_findings(
    differences: Sequence[Difference], samples: Sequence[Samples], resumed: Ranks, reference: Ranks
) -> tuple[list[Finding], list[str]]:
    """Return what a resume does not restore, causes first, and the parts that differ because of it.

    A generator that differs counts only if something else does: a script may not use it.
    """
    counted = [item for item in differences if item.kind != "generator" or item.at_start]
    if all(item.kind == "generator" for item in counted):
        return [], [item.part for item in counted]
    possible = _drop_generators_of_other_ranks(counted)
    if all(item.kind in ("generator", "file") for item in counted):
        possible = [item for item in possible if item.kind == "file"]
    causes = [item for item in possible if not is_effect(item, _without(possible, item))]
    causes = _drop_unused_generators(causes, counted)
    findings = _merge(causes, samples, resumed, reference)
    named = {item.part for item in causes}
    return findings, [item.part for item in counted if item.part not in named]


def _without(differences: Sequence[Difference], excluded: Difference) -> list[Difference]:
    # A generator alone explains a loss, but not a sample or a weight at the start.
    return [other for other in differences if other is not excluded]


def _drop_generators_of_other_ranks(differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences without generators of ranks whose loss does not differ first."""
    first_loss = next((item for item in differences if item.kind == "loss"), None)
    if first_loss is None:
        return list(differences)
    ranks = set(first_loss.ranks)
    return [item for item in differences if item.kind != "generator" or ranks & set(item.ranks)]


def _drop_unused_generators(
    causes: list[Difference], counted: Sequence[Difference]
) -> list[Difference]:
    """Return the causes without generators, if other causes explain the first loss that differs.

    A generator is to blame if the loss differs although samples and state are equal.
    """
    rest = [item for item in causes if item.kind != "generator"]
    first_loss = next((item for item in counted if item.kind == "loss"), None)
    if first_loss is None:
        return rest or causes
    explained = any(
        item.update <= first_loss.update
        and item.kind in ("samples", "content", "weights", "buffers")
        for item in rest
    )
    return rest if explained else causes


def _merge(
    causes: Sequence[Difference], samples: Sequence[Samples], resumed: Ranks, reference: Ranks
) -> list[Finding]:
    """Return a finding for each kind of cause, and one for each part of the optimizer's state."""
    findings = []
    done = set()
    for cause in causes:
        if cause.kind in ("schedule", "option"):
            key = "schedule"
        elif cause.kind in ("optimizer", "generator", "checkpoint", "file"):
            key = cause.part
        else:
            key = cause.kind
        if key in done:
            continue
        done.add(key)
        rank = cause.ranks[0] if cause.ranks else next(iter(reference))
        place = _place(cause, resumed[rank])
        remedy = find_remedy(cause.kind, reference[rank].framework, len(reference))
        sentence = _describe(cause, samples, reference[rank])
        loader = _find_draw(cause, resumed[rank])
        if loader is not None:
            sentence, place, remedy = _describe_draw(cause), loader, find_remedy("seed", "")
        findings.append(
            Finding(
                cause.kind,
                _name_ranks(cause.ranks, len(reference)) + sentence,
                place,
                remedy,
                cause.part,
                cause.update,
                list(cause.ranks) if len(reference) > 1 else [],
            )
        )
    return findings


def _name_ranks(ranks: Sequence[str], world: int) -> str:
    """Return the beginning of a sentence about some ranks; empty for all of them."""
    if not ranks or len(ranks) == world:
        return ""
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(ranks)}: "


def _describe(cause: Difference, samples: Sequence[Samples], reference: Trace) -> str:
    name = cause.part.rpartition(".")[2]
    if cause.kind == "samples":
        return _describe_samples(cause, samples)
    if cause.kind == "optimizer":
        optimizer = cause.part.split(".")[1]
        words = STATE_NAMES.get(name, name)
        if not cause.at_start:
            return f"{optimizer}'s {words} differs from update {cause.update} on."
        return f"{optimizer}'s {words} was not restored."
    if cause.kind == "generator":
        library = GENERATORS.get(name, name)
        choice = "" if reference.updates[0].samples else ", the choice of samples"
        return (
            f"{library[0].upper()}{library[1:]} was not restored: dropout{choice} and other "
            f"random operations draw other numbers from update {cause.update} on."
        )
    if cause.kind == "length":
        return (
            f"The training ends after {cause.actual} updates in all, and after {cause.expected} "
            "without a kill: its counter of updates or epochs was not restored, or early stopping "
            "decides otherwise."
        )
    if cause.kind in ("option", "schedule"):
        return _describe_option(cause, name, reference)
    if cause.kind == "scaler":
        return (
            f"The scale of GradScaler was not restored: it is {_show(cause.actual)} in update "
            f"{cause.update}, and {_show(cause.expected)} in the run without a kill."
        )
    if cause.kind == "loss":
        return (
            f"The loss of update {cause.update} is {_show(cause.actual)} instead of "
            f"{_show(cause.expected)}, with equal samples, weights and optimizer state: something "
            "else that it depends on was not restored, such as a counter, a target network or a "
            "queue."
        )
    return _describe_rest(cause, name, reference)


def _find_draw(cause: Difference, resumed: Trace) -> str | None:
    """Return where the iterator of a DataLoader was made that has moved torch's generator, which
    had been restored; None if that is not the cause."""
    is_start = cause.part == "generator.torch" and cause.at_start
    return resumed.generators.get(cause.expected) if is_start else None


def _describe_draw(cause: Difference) -> str:
    return (
        "Torch's generator was restored, and then the iterator of the DataLoader drew its seed "
        "from it: dropout and other random operations draw other numbers from update "
        f"{cause.update} on."
    )


def _describe_rest(cause: Difference, name: str, reference: Trace) -> str:
    when = "were not restored" if cause.at_start else f"differ from update {cause.update} on"
    if cause.kind == "weights":
        unknown = ": no update of the run without a kill has these weights"
        return f"The weights {when}{'' if reference.world > 1 else unknown}."
    if cause.kind == "buffers":
        return f"Buffers of the model, such as running statistics of batch norm, {when}."
    if cause.kind == "content":
        return (
            f"The samples of update {cause.update} are the same and their contents differ: "
            "augmentation draws other random numbers."
        )
    if cause.kind == "file":
        name = cause.part.removeprefix("file.")
        return (
            f"{name} differs: it was last written after update {cause.actual}, and after update "
            f"{cause.expected} in the run without a kill. What decides when it is written, such as "
            "the best value, was not restored."
        )
    return (
        f"`{name}` in {cause.actual or 'the checkpoint'}, written after update {cause.update}, "
        "differs: it was not restored or is not updated as before. The trained weights are equal; "
        "an average of them (EMA) differs if it begins again with the restored weights."
    )


def _describe_samples(cause: Difference, counts: Sequence[Samples]) -> str:
    count = [len(batches) for batches in (cause.expected, cause.actual)]
    if count[0] != count[1]:
        return (
            f"Update {cause.update} has the gradient of {count[1]} batches instead of {count[0]}: "
            "gradients that had been accumulated before the kill are lost."
        )
    if not counts:
        return f"The samples of update {cause.update} differ."
    samples = counts[0]
    sentence = ""
    if samples.twice or samples.never:
        first, last = samples.updates
        sentence = (
            f"{samples.twice} of {samples.total} samples of the epoch were trained twice and "
            f"{samples.never} never{_list_ranks(counts[1:])}, in updates {first} to {last}: "
        )
    reason = {
        "again": "the loader starts its epoch again.",
        "skipped": "batches are skipped that were never trained.",
        "late": f"the order of the samples differs from update {cause.update} on.",
        "other": "the order of the samples is another one, because its generator or epoch was not "
        "restored.",
    }[samples.pattern]
    sentence = f"{sentence}{reason}" if sentence else f"{reason[0].upper()}{reason[1:]}"
    if samples.is_first_order:
        sentence += " It begins with the first batch of the training, as epoch 1 did."
    if samples.until:
        sentence += (
            f" The epoch was begun from its start: when it ends, after update {samples.until}, "
            f"{samples.twice_until} of its samples were trained twice and {samples.never_until} "
            "never."
        )
    return sentence


def _list_ranks(counts: Sequence[Samples]) -> str:
    """Return the counts of each rank, in brackets; empty if there is one."""
    texts = [
        f"rank {one.rank}: {one.twice} and {one.never} of {one.total}"
        for one in counts[:LISTED_RANKS]
    ]
    rest = ["..."] if len(counts) > LISTED_RANKS else []
    return f" ({', '.join(texts + rest)})" if texts else ""


def _describe_option(cause: Difference, name: str, reference: Trace) -> str:
    if cause.kind == "schedule":
        return (
            f"A schedule is at {_show(cause.actual)} in update {cause.update} instead of "
            f"{_show(cause.expected)}."
        )
    option = "learning rate" if name == "lr" else f"option `{name}` of the optimizer"
    path = cause.part.removeprefix("option.")
    earlier = [
        update.number
        for update in reference.updates
        if update.options.get(path) == cause.actual and update.number != cause.update
    ]
    hint = f", as in update {earlier[0]}" if len(earlier) == 1 else ""
    return (
        f"The {option} of update {cause.update} is {_show(cause.actual)}{hint}, and "
        f"{_show(cause.expected)} in the run without a kill: the schedule was not restored, or is "
        "stepped at another time."
    )


def _show(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return _show(value[0])
    if isinstance(value, float):
        return f"{value:.{ROUNDED}g}"
    return str(value)


def _place(cause: Difference, resumed: Trace) -> str:
    """Return where the script would have to change."""
    first = resumed.updates[0]
    if cause.kind in ("samples", "content"):
        return first.place
    wanted = {"weights": "module", "buffers": "module", "scaler": "scaler"}.get(cause.kind, "")
    wanted = {"optimizer": "optimizer", "schedule": "schedule", "option": "schedule"}.get(
        cause.kind, wanted
    )
    for restore in resumed.restores:
        if restore["what"] == wanted:
            return str(restore["place"])
    # Nothing of the kind was loaded: where a checkpoint is read, or else the step.
    if resumed.loads:
        return str(resumed.loads[0]["place"])
    return first.step_place
