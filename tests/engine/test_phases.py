"""A plan is a table of numbers: its phases are made when they are asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phasetrain
from phasetrain.app.train.summary import format_timeline
from phasetrain.engine import interleave as planning
from phasetrain.engine.interleave import interleave, splice
from phasetrain.engine.phases import Phase, PhaseTable, PhaseTableBuilder
from phasetrain.engine.plan import PhaseSettings, Plan, Split, SplitInterval, Stage
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan, encode_plan
from phasetrain.hooks import Hook

TRAINED = [Phase(at, "train", 0, 2 * at, 2, 8 * at, 18, 4) for at in range(3)]
TESTED = Phase(3, "test@ema", 0, 0, 1, 0, 5, 8, 1)
TABLE = PhaseTable([*TRAINED, TESTED])


class TestTable:
    def test_items_are_the_phases_with_their_index(self) -> None:
        assert (list(TABLE), len(TABLE), TABLE[-1]) == ([*TRAINED, TESTED], 4, TESTED)
        assert (TABLE[1], TABLE[1], TABLE[2]) == (TRAINED[1], TRAINED[1], TRAINED[2])
        with pytest.raises(IndexError):
            TABLE[4]

    def test_slice_keeps_the_indices(self) -> None:
        rest = TABLE[2:]
        assert (list(rest), rest[0].index, rest[-1].index) == ([TRAINED[2], TESTED], 2, 3)
        assert list(rest[1:]) == [TESTED]

    def test_join_knows_the_splits_of_both(self) -> None:
        joined = PhaseTable([TESTED]) + TABLE
        assert [phase.split for phase in joined] == ["test@ema", *["train"] * 3, "test@ema"]
        assert [phase.index for phase in joined] == [0, 1, 2, 3, 4]

    def test_columns_agree_with_the_phases(self) -> None:
        assert TABLE.column("offset").tolist() == [0, 8, 16, 0]
        assert TABLE.samples.tolist() == [phase.samples for phase in TABLE] == [8, 8, 2, 5]
        assert TABLE.is_train.tolist() == [True, True, True, False]
        assert TABLE.ends_epoch.tolist() == [False, False, True, True]
        assert TABLE.updates_before.tolist() == [0, 2, 4, 6, 6]
        assert list(TABLE.select(~TABLE.is_train)) == [Phase(0, "test@ema", 0, 0, 1, 0, 5, 8, 1)]

    def test_kinds_are_counted_in_their_order(self) -> None:
        later = [Phase(0, "train", 1, 2 * at, 2, 8 * at, 18, 4) for at in range(3)]
        kinds = (TABLE + later).kinds
        assert kinds == ((TRAINED[0], 4), (TRAINED[2], 2), (TESTED, 1))

    def test_kinds_differ_after_a_change_of_the_batch_size(self) -> None:
        moved = Phase(0, "train", 0, 1, 2, 8, 18, 4)
        assert PhaseTable([TRAINED[0], moved]).kinds == (
            (TRAINED[0], 1),
            (Phase(1, "train", 0, 1, 2, 8, 18, 4), 1),
        )

    def test_phases_of_a_split_include_tests_of_averaged_weights(self) -> None:
        plain = Phase(4, "test", 0, 0, 1, 0, 5, 8, 1)
        plan = Plan(PhaseTable([*TABLE, plain, TRAINED[0]]))
        assert list(plan.following(TESTED)) == [TESTED, plain]

    def test_empty_table(self) -> None:
        empty = PhaseTable()
        assert (empty.kinds, list(empty + TABLE), not empty) == ((), list(TABLE), True)
        assert (Plan().updates, Plan().stages) == (0, ((0, 0),))


class TestBuilder:
    def test_repetition_moves_train_phases_within_the_epoch(self) -> None:
        builder = PhaseTableBuilder()
        for phase in (TRAINED[0], TESTED):
            builder.append(phase)
        builder.repeat(0, 2, epochs=0, steps=2, samples=8)
        assert [(one.first, one.offset) for one in builder.build()] == [
            *((0, 0), (0, 0), (2, 8)),
            *((0, 0), (4, 16), (0, 0)),
        ]

    def test_repetition_of_a_repetition(self) -> None:
        builder = PhaseTableBuilder()
        builder.append(TRAINED[0])
        builder.repeat(0, 2, epochs=0, steps=2, samples=8)
        builder.append(TESTED)
        builder.repeat(0, 1, epochs=1, steps=0, samples=0)
        assert [(one.split, one.epoch, one.offset) for one in builder.build()] == [
            *(("train", 0, 0), ("train", 0, 8), ("train", 0, 16), ("test@ema", 0, 0)),
            *(("train", 1, 0), ("train", 1, 8), ("train", 1, 16), ("test@ema", 1, 0)),
        ]


def make_stage(
    *,
    length: int = 23,
    windows: tuple[int, ...] = (),
    every: SplitInterval | None = None,
    **settings: Any,
) -> Stage:
    splits = [
        Split("train", sum(windows) or length, 4, drop_last=False, windows=windows),
        Split("test", 5, 8, drop_last=False),
        Split("other", 9, 8, drop_last=False, every=every),
    ]
    return Stage({split.name: split for split in splits}, PhaseSettings(**settings))


STAGES = {
    "epochs": make_stage(epochs=9),
    "updates": make_stage(updates=47),
    "samples": make_stage(samples=181, test_every_updates=5),
    "within an epoch": make_stage(
        length=99, epochs=3, test_every_epochs=None, test_every_updates=2
    ),
    "both intervals": make_stage(length=61, epochs=9, test_every_epochs=2, test_every_updates=7),
    "interval of a split": make_stage(length=61, epochs=9, every=SplitInterval(3, 2)),
    "order at the end of an epoch": make_stage(length=40, epochs=4, every=SplitInterval(updates=1)),
    "only at the end": make_stage(epochs=9, every=SplitInterval()),
    "windows": make_stage(windows=(8, 0, 13), epochs=4, test_every_epochs=2),
    "limits": make_stage(epochs=9, limit_train=3, test_every_updates=2, limit_test=1),
    "averages": make_stage(epochs=9, averaged={"ema": 0.5}, test_first=True),
    "a function": make_stage(epochs=9, test_when=lambda at: at.updates % 4 == 1),
}


@pytest.mark.parametrize("name", list(STAGES))
def test_repetitions_are_the_phases_that_are_planned_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [STAGES[name], make_stage(epochs=5), STAGES[name]]
    plans = []
    for fewest in (1, 1_000_000):
        monkeypatch.setattr(planning, "FEWEST_REPEATED", fewest)
        plan = interleave(stages)
        state = RunState(phase=5, step=1, updates=plan.updates_before(5) + 1, samples=37)
        plans.append((plan, splice(plan, state, stages)))
    assert plans[0] == plans[1]


def test_repetitions_depend_on_the_splits_tested_before_a_splice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Windows without samples train nothing, so what was tested before them counts.
    stages = [make_stage(windows=(8, 0, 0), epochs=5, every=SplitInterval(3), test_first=True)]
    state = RunState(phase=3, updates=2, samples=8)
    plans = []
    for fewest in (1, 1_000_000):
        monkeypatch.setattr(planning, "FEWEST_REPEATED", fewest)
        plans.append(splice(interleave(stages), state, stages))
    assert plans[0] == plans[1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the indices of all phases that are made."""
    found: list[int] = []
    init = Phase.__init__

    def count(phase: Phase, index: int, *values: Any, **named: Any) -> None:
        found.append(index)
        init(phase, index, *values, **named)

    monkeypatch.setattr(Phase, "__init__", count)
    return found


def test_plan_of_a_hundred_thousand_phases_makes_a_few(made: list[int]) -> None:
    stage = make_stage(epochs=33_333)
    plan = interleave([stage])
    assert (len(plan.phases), plan.updates) == (99_999, 33_333 * 6)
    decoded = decode_plan(encode_plan(plan))
    assert np.array_equal(decoded.phases.rows, plan.phases.rows)
    state = RunState(phase=60_000, step=2, updates=120_002, samples=460_008)
    assert decoded.position(state).updates == 120_002
    assert splice(decoded, state, [stage]).updates == plan.updates
    assert decoded.phases.kinds[0][1] == 33_333
    assert format_timeline(decoded) == "33333 x (train 6, test 1, other 2)"
    assert len(made) < 500


@pytest.mark.feature("16")
def test_run_of_many_phases_makes_those_that_it_lists_or_runs(
    tmp_path: Path, made: list[int]
) -> None:
    words = [
        "PHASES={epochs: 50000, limit: {train: 1, test: 1}}",
        "DATA.TRAIN.batch_size=8",
        "MODEL={name: mlp, hidden: [4]}",
        f"RUN.dir={tmp_path}",
    ]
    for last in (2, 4):

        class Stop(Hook):
            def on_update(self, run: Any, phase: Any, last: int = last) -> None:
                if run.state.updates == last:
                    run.stop("enough", interrupted=True)

        made.clear()
        assert phasetrain.run(words, hooks={"stop": Stop()}).updates < 6
        # plan.json lists the first and the last 500.
        assert len(made) < 1500
