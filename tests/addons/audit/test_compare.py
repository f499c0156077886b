"""What a comparison of two records finds: equal and shifted runs, written by hand."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from phasetrain.addons.audit.compare import (
    Samples,
    compare,
    compare_lengths,
    count_samples,
    find_epoch,
    find_start,
    find_undone,
    merge_ranks,
)
from phasetrain.addons.audit.cost import (
    Cost,
    describe_cost,
    describe_worst_kill,
    format_time,
    measure_cost,
)
from phasetrain.addons.audit.remedies import find_remedy
from phasetrain.addons.audit.trace import Save, Trace, Update, drop_undone
from phasetrain.addons.audit.verdict import make_findings

BATCH, EPOCH = 2, 4  # samples of an update, updates of an epoch

BEFORE = {"weights": 5, "buffers": {"Net": [5]}, "optimizer.Adam.exp_avg": 5}
"""Digests after update 5."""


def one(number: int, sample: int | None = None, **changes: Any) -> Update:
    """Update `number` of a run with an epoch of 8 samples in order, or with other first samples."""
    first = (number - 1) % EPOCH * BATCH if sample is None else sample
    update = Update(
        number=number,
        samples=((first, first + 1),),
        content=((first, first + 1),),
        losses=(1.0 / number,),
        loss_digests=(number,),
        options={"0.lr": 0.1 / number, "schedule.0": number},
        state={"weights": number, "buffers": {"Net": [number]}, "optimizer.Adam.exp_avg": number},
        before=None,
        generators={"torch": 7},
        place="train.py:3",
        step_place="train.py:9",
    )
    return replace(update, **changes)


def run(updates: Sequence[Update], start: int = 0, **content: Any) -> Trace:
    """A process that makes these updates; it numbers them from 1."""
    numbered = [replace(update, number=i) for i, update in enumerate(updates, 1)]
    state = {"weights": start, "buffers": {"Net": [start]}, "optimizer.Adam.exp_avg": start}
    numbered[0] = replace(numbered[0], before=numbered[0].before or state)
    return Trace(numbered, **content)


REFERENCE = run([one(number) for number in range(1, 13)])
KILLED = run([one(number) for number in range(1, 8)])  # its last checkpoint: update 5


def resumed(first: int = 6, **changes: Any) -> Trace:
    """The updates after the checkpoint, with changes of the first one."""
    updates = [one(number) for number in range(first, 13)]
    return run([replace(updates[0], **changes), *updates[1:]], start=5)


def test_an_exact_resume_has_no_difference() -> None:
    assert find_start(REFERENCE, resumed()) == 5
    assert compare(REFERENCE, resumed(), 5) == []
    assert count_samples({"0": REFERENCE}, {"0": KILLED}, {"0": resumed()}, 5) == []


@pytest.mark.parametrize(
    ("changes", "part", "at_start"),
    [
        ({"before": {**BEFORE, "optimizer.Adam.exp_avg": 0}}, "optimizer.Adam.exp_avg", True),
        ({"before": {**BEFORE, "buffers": {"Net": [0]}}}, "buffers", True),
        ({"generators": {"torch": 8}}, "generator.torch", True),
        ({"options": {"0.lr": 0.1, "schedule.0": 6}}, "option.0.lr", True),
        ({"options": {"0.lr": 0.1 / 6, "schedule.0": 7}}, "schedule.0", True),
        ({"loss_digests": (0,)}, "loss", False),
        ({"samples": ((0, 1),)}, "samples", False),
        ({"content": ((9, 9),)}, "content", False),
        ({"state": {"weights": 0}}, "weights", False),
    ],
)
def test_the_part_that_differs_is_named(changes: dict[str, Any], part: str, at_start: bool) -> None:
    first = compare(REFERENCE, resumed(**changes), 5)[0]
    assert (first.part, first.update, first.at_start) == (part, 6, at_start)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        # Updates 6 to 8 end the epoch that began with update 5 and samples 0 and 1.
        ([0, 2, 4], Samples(8, 2, 2, "again")),
        ([4, 6, 0], Samples(8, 2, 2, "skipped")),
        ([6, 4, 2], Samples(8, 0, 0, "skipped")),
        ([2, 6, 6], Samples(8, 2, 2, "late")),
        ([5, 1, 3], Samples(8, 1, 1, "other")),
        # The epoch is begun again and trained to its end: nothing is left out of that.
        ([0, 2, 4, 6], Samples(8, 2, 2, "again", until=9, twice_until=2)),
        ([0, 2, 4, 0], Samples(8, 2, 2, "again")),
    ],
)
def test_samples_that_were_trained_twice_or_never_are_counted(
    samples: list[int], expected: Samples
) -> None:
    updates = [one(6 + number, sample) for number, sample in enumerate(samples)]
    other = {"0": run(updates, start=5)}
    found = count_samples({"0": REFERENCE}, {"0": KILLED}, other, 5)
    assert found == [replace(expected, updates=(5, 8))]


@pytest.mark.parametrize(("sample", "is_first"), [(0, True), (1, False)])
def test_the_order_of_the_first_epoch_is_recognised(sample: int, is_first: bool) -> None:
    shuffled = [one(number) for number in range(1, 5)]
    shuffled += [one(4 + number, sample) for number, sample in enumerate((6, 2, 4, 0), 1)]
    shuffled[-1] = one(8, samples=((1, 0),))
    other = {"0": run([one(6, sample), one(7, 2), one(8, 4)], start=5)}
    reference, killed = {"0": run(shuffled)}, {"0": run(shuffled[:7])}
    (found,) = count_samples(reference, killed, other, 5)
    assert (found.pattern, found.is_first_order, found.updates) == ("other", is_first, (5, 8))


def test_an_epoch_ends_before_a_sample_that_it_has_seen() -> None:
    assert [find_epoch(REFERENCE, number) for number in (0, 3, 4, 11)] == [
        (0, 4),
        (0, 4),
        (4, 8),
        (8, 12),
    ]


def test_weights_that_the_run_never_had_have_no_start() -> None:
    assert find_start(REFERENCE, run([one(6)], start=99)) is None
    assert find_start(REFERENCE, run([one(1)], start=0)) == 0


@pytest.mark.parametrize(("last", "found"), [(11, 11), (14, 14)])
def test_another_number_of_updates_is_a_cause(last: int, found: int) -> None:
    other = run([one(number) for number in range(6, last + 1)], start=5)
    assert compare(REFERENCE, other, 5) == []
    (length,) = compare_lengths(REFERENCE, other, 5)
    assert (length.part, length.update) == ("length", min(12, found) + 1)
    findings, _ = make_findings([length], [], {"0": other}, {"0": REFERENCE})
    assert [finding.code for finding in findings] == ["length"]
    assert compare_lengths(REFERENCE, resumed(), 5) == []


def test_updates_of_a_rehearsal_are_found() -> None:
    again = run([one(1), *(one(number) for number in range(7, 13))], start=0)
    assert find_undone(REFERENCE, again) == (1, 5)
    assert find_undone(REFERENCE, run([one(number) for number in range(1, 7)])) == (0, 0)


def test_a_checkpoint_is_compared_with_that_of_the_same_update() -> None:
    saved = replace(REFERENCE, saves=[Save(10, "a.pt", {"ema.0": 1, "model.0": 2}, "")])
    again = replace(resumed(), saves=[Save(5, "b.pt", {"ema.0": 0, "model.0": 2}, "train.py:5")])
    found = compare(saved, again, 5)
    assert [(one.part, one.update) for one in found] == [("checkpoint.ema", 10)]
    # Of several files, those with the same name; and the file is named.
    first, second = Save(10, "best.pt", {"net.0": 1}, ""), Save(10, "last.pt", {"net.0": 2}, "")
    saved = replace(REFERENCE, saves=[first, second])
    again = replace(
        resumed(), saves=[replace(first, after=5, leaves={"net.0": 9}), replace(second, after=5)]
    )
    found = compare(saved, again, 5)
    assert [(one.part, one.update) for one in found] == [("checkpoint.net", 10)]
    (finding,) = make_findings(found, [], {"0": again}, {"0": saved})[0]
    assert "`net` in best.pt" in finding.sentence
    assert "EMA" in finding.sentence


@pytest.mark.parametrize(
    ("changes", "codes", "effects"),
    [
        # The moment explains the weights; the generator does not matter where no loss differs.
        (
            {
                "before": {**BEFORE, "optimizer.Adam.exp_avg": 0},
                "state": {"weights": 0, "buffers": {"Net": [6]}, "optimizer.Adam.exp_avg": 0},
            },
            ["optimizer"],
            ["weights"],
        ),
        ({"generators": {"torch": 8}}, [], ["generator.torch"]),
        ({"generators": {"torch": 8}, "loss_digests": (0,)}, ["generator"], ["loss"]),
        (
            {"generators": {"torch": 8}, "samples": ((0, 1),), "loss_digests": (0,)},
            ["samples"],
            ["generator.torch", "loss"],
        ),
        # A learning rate follows from its schedule.
        ({"options": {"0.lr": 0.1, "schedule.0": 1}}, ["schedule"], []),
        ({"loss_digests": (0,)}, ["loss"], []),
    ],
)
def test_causes_are_told_from_their_effects(
    changes: dict[str, Any], codes: list[str], effects: list[str]
) -> None:
    other = resumed(**changes)
    found = merge_ranks({"0": compare(REFERENCE, other, 5)})
    samples = count_samples({"0": REFERENCE}, {"0": KILLED}, {"0": other}, 5)
    findings, rest = make_findings(found, samples, {"0": other}, {"0": REFERENCE})
    assert [finding.code for finding in findings] == codes
    assert rest == effects
    assert findings == [] or findings[0].ranks == []


SECOND = run([one(number, (number - 1) % EPOCH * BATCH + 8) for number in range(1, 13)])
"""Rank 1, with samples 8 to 15."""

NOISE, LOSS = {"generators": {"torch": 8}}, {"loss_digests": (0,)}
WRONG = {"state": {"weights": 0, "buffers": {"Net": [6]}, "optimizer.Adam.exp_avg": 6}}


@pytest.mark.feature("audit.ranks", "Audit of several ranks, one by one and their samples together")
@pytest.mark.parametrize(
    ("changes", "named", "effects", "counts"),
    [
        ([{}, {}], [], [], []),
        ([{}, {**NOISE, **LOSS}], [("generator", ["1"])], ["loss"], []),
        ([{**NOISE, **LOSS}] * 2, [("generator", ["0", "1"])], ["loss"], []),
        # The generator of rank 0 explains no loss of rank 1; its weights follow from that loss.
        (
            [{**NOISE, **WRONG}, {**LOSS, **WRONG}],
            [("loss", ["1"])],
            ["generator.torch", "weights"],
            [],
        ),
        ([{}, {"before": {**BEFORE, "weights": 0}}], [("weights", ["1"])], [], []),
        # Rank 0 trains what belongs to rank 1; then it is a sample of the epoch that is seen twice.
        (
            [{"samples": ((10, 11),)}, {}],
            [("samples", ["0"])],
            [],
            [(16, 2, 2, ""), (8, 2, 2, "0"), (8, 0, 0, "1")],
        ),
        # Ranks that exchange their samples lose none.
        (
            [{"samples": ((10, 11),)}, {"samples": ((2, 3),)}],
            [("samples", ["0", "1"])],
            [],
            [(16, 0, 0, ""), (8, 2, 2, "0"), (8, 2, 2, "1")],
        ),
    ],
)
def test_ranks_are_compared_one_by_one(
    changes: list[dict[str, Any]],
    named: list[tuple[str, list[str]]],
    effects: list[str],
    counts: list[tuple[Any, ...]],
) -> None:
    reference = {"0": replace(REFERENCE, world=2), "1": replace(SECOND, world=2)}
    killed = {rank: replace(each, updates=each.updates[:7]) for rank, each in reference.items()}
    other = {
        rank: run([replace(each.updates[5], **change), *each.updates[6:]], start=5)
        for change, (rank, each) in zip(changes, reference.items(), strict=True)
    }
    found = merge_ranks({rank: compare(reference[rank], other[rank], 5) for rank in other})
    samples = count_samples(reference, killed, other, 5)
    findings, rest = make_findings(found, samples, other, reference)
    assert [(finding.code, finding.ranks) for finding in findings] == named
    assert rest == effects
    assert [(each.total, each.twice, each.never, each.rank) for each in samples] == counts
    for finding in findings:
        assert finding.sentence.startswith(f"Rank {finding.ranks[0]}: ") == (
            len(finding.ranks) == 1
        )


@pytest.mark.feature("audit.cost", "What a kill has cost, in updates, samples and time")
def test_the_cost_of_a_kill_is_that_of_the_updates_after_its_checkpoint() -> None:
    times = [9.0, *[2.0] * 4, 60.0, 3000.0, *[1.0] * 5]  # with the start of the process: 9 s
    timed = [
        replace(update, seconds=seconds)
        for update, seconds in zip(REFERENCE.updates, times, strict=True)
    ]
    unbroken = {"0": replace(REFERENCE, updates=timed), "1": SECOND}
    killed = {"0": KILLED, "1": replace(SECOND, updates=SECOND.updates[:7])}
    again = {"0": resumed(seconds=4.0), "1": resumed(seconds=5.0)}
    cost = measure_cost(unbroken, killed, again, 5)
    assert cost == Cost(7, 5, updates=2, samples=8, seconds=3060.0, restart=5.0)
    assert measure_cost(unbroken, killed, {}, 0) == Cost(7, 0, 7, 28, 3068.0, None)
    assert "2 updates with 8 samples, which took 51.0 minutes: " in describe_cost(cost)
    assert measure_cost(unbroken, killed, again, 9).updates == 0
    assert "was 51.0 minutes, with 5 updates" in describe_worst_kill(unbroken, [5, 10])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (59.94, "59.9 s"), (90.0, "1.5 minutes"), (9000.0, "2.5 hours")],
)
def test_a_time_has_a_unit_that_fits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def gan(number: int, *, before: int = 0, optimizer_state: int = 0) -> Update:
    """Update of a GAN, whose two optimizers step in turns."""
    which = (number - 1) % 2
    state = {"weights": 10 * number, "buffers": {"Net": [number]}, "optimizer.Adam.exp_avg": number}
    begin = {"weights": 10 * before, "buffers": {}, "optimizer.Adam.exp_avg": optimizer_state}
    return one(number, state=state, before=begin if before else None, optimizer=which)


@pytest.mark.parametrize(("moment", "parts"), [(6, []), (0, [("optimizer.Adam.exp_avg", 8, True)])])
def test_each_optimizer_is_compared_with_its_own_state(
    moment: int, parts: list[tuple[str, int, bool]]
) -> None:
    reference = run([gan(number) for number in range(1, 13)])
    first = [gan(7, before=5, optimizer_state=5), gan(8, before=6, optimizer_state=moment)]
    again = run([*first, *(gan(number) for number in range(9, 13))])
    assert find_start(reference, again) == 6
    found = compare(reference, again, 6)
    assert [(each.part, each.update, each.at_start) for each in found] == parts


def test_updates_before_an_optimizer_that_begins_with_the_first_weights_are_undone() -> None:
    begin = {"weights": 0, "optimizer.Adam.exp_avg": 0}
    rehearsal = [one(1, before={"weights": 0}), one(2)]
    training = [replace(one(number), optimizer=1) for number in range(1, 5)]
    training[0] = replace(training[0], begins=begin)
    trace = drop_undone(run([*rehearsal, *training], files=[(1, "a.pt"), (5, "b.pt")]))
    assert trace.undone == 2
    assert [update.state for update in trace.updates] == [update.state for update in training]
    assert trace.updates[0].before == begin
    assert trace.files == [(0, "a.pt"), (3, "b.pt")]
    assert drop_undone(REFERENCE) == REFERENCE


def test_samples_are_not_compared_if_one_run_reads_without_a_loader() -> None:
    without = run([one(number, samples=(), content=()) for number in range(6, 13)], start=5)
    assert compare(REFERENCE, without, 5) == []


@pytest.mark.parametrize(
    ("generators", "place", "is_seed"),
    [
        ({}, "train.py:9", False),
        ({6: "a.py:1"}, "train.py:9", False),
        ({7: "a.py:1"}, "a.py:1", True),
    ],
)
def test_a_generator_that_the_loader_moves_after_the_load_is_told(
    generators: dict[int, str], place: str, is_seed: bool
) -> None:
    # Update 6 had digest 7 before its forward pass; here 8, and 7 before the iterator was made.
    other = replace(resumed(generators={"torch": 8}, loss_digests=(0,)), generators=generators)
    found = merge_ranks({"0": compare(REFERENCE, other, 5)})
    (finding,) = make_findings(found, [], {"0": other}, {"0": REFERENCE})[0]
    assert (finding.code, finding.part, finding.place) == ("generator", "generator.torch", place)
    assert finding.remedy == find_remedy("seed" if is_seed else "generator", "")


def test_the_remedy_for_generators_can_be_run(tmp_path: Path) -> None:
    checkpoint: dict[str, Any] = {}
    save, load = find_remedy("generator", "").split("torch.set_rng_state", 1)
    names: dict[str, Any] = {
        "checkpoint": checkpoint,
        "torch": torch,
        "numpy": numpy,
        "random": random,
    }
    exec(save, names)
    torch.save(checkpoint, tmp_path / "last.pt")
    expected = [torch.rand(1).item(), numpy.random.rand(), random.random()]
    names["checkpoint"] = torch.load(tmp_path / "last.pt", weights_only=True)
    exec("torch.set_rng_state" + load.partition("DataLoader")[0], names)
    assert [torch.rand(1).item(), numpy.random.rand(), random.random()] == expected
