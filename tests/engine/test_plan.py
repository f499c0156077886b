"""Phases end with an epoch or when a test is due, and a splice covers every sample of the epoch
once."""

import json
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from phasetrain.engine.interleave import Extension, interleave, splice
from phasetrain.engine.plan import (
    Anchor,
    Phase,
    PhaseSettings,
    Plan,
    Split,
    SplitInterval,
    Stage,
    make_test_phase,
)
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan, encode_plan
from phasetrain.errors import ConfigError

TRAIN = Split("train", 20, 6, drop_last=True)
TEST = Split("test", 5, 3, drop_last=False)


def splits(
    *tests: Split, length: int = 20, batch_size: int = 6, drop_last: bool = True
) -> dict[str, Split]:
    train = Split("train", length, batch_size, drop_last)
    return {"train": train, **{test.name: test for test in tests or (TEST,)}}


def shown(plan: Plan) -> list[str]:
    """Return each phase as `split epoch first+steps [begin, end)`."""
    return [
        f"{p.split} {p.epoch} {p.first}+{p.steps} [{p.offset}, {p.offset + p.samples})"
        for p in plan.phases
    ]


class TestInterleave:
    @pytest.mark.feature("14", "training by epochs", "`PHASES.epochs`")
    def test_test_follows_each_epoch(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        assert plan.phases == (
            Phase(0, "train", epoch=0, first=0, steps=3, offset=0, end=18, batch_size=6),
            Phase(1, "test", epoch=0, first=0, steps=2, offset=0, end=5, batch_size=3),
            Phase(2, "train", epoch=1, first=0, steps=3, offset=0, end=18, batch_size=6),
            Phase(3, "test", epoch=1, first=0, steps=2, offset=0, end=5, batch_size=3),
        )
        assert (plan.updates, plan.epochs, plan.total_samples) == (6, 2, 36)

    def test_short_last_batch_is_kept_without_drop_last(self) -> None:
        plan = interleave([Stage(splits(drop_last=False), PhaseSettings(epochs=1))])
        assert shown(plan) == ["train 0 0+4 [0, 20)", "test 0 0+2 [0, 5)"]
        assert [plan.phases[0].samples_in(step) for step in range(4)] == [6, 6, 6, 2]
        assert [plan.phases[1].samples_in(step) for step in range(2)] == [3, 2]

    def test_drop_last_applies_to_tests(self) -> None:
        plan = interleave(
            [Stage(splits(Split("test", 5, 3, drop_last=True)), PhaseSettings(epochs=1))]
        )
        assert shown(plan)[1:] == ["test 0 0+1 [0, 3)"]

    @pytest.mark.feature(
        "15", "training by updates or samples", "`PHASES.updates`, `PHASES.samples`"
    )
    def test_run_of_updates_can_end_within_an_epoch(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(updates=4))])
        assert shown(plan) == [
            "train 0 0+3 [0, 18)",
            "test 0 0+2 [0, 5)",
            "train 1 0+1 [0, 6)",
            "test 1 0+2 [0, 5)",
        ]
        assert (plan.epochs, plan.phases[2].ends_epoch) == (2, False)

    @pytest.mark.parametrize(("samples", "updates"), [(18, 3), (19, 4), (24, 4), (25, 5)])
    def test_samples_are_rounded_up_to_whole_updates(self, samples: int, updates: int) -> None:
        assert interleave([Stage(splits(), PhaseSettings(samples=samples))]).updates == updates

    def test_short_batches_count_with_their_samples(self) -> None:
        plan = interleave(
            [Stage(splits(drop_last=False), PhaseSettings(samples=22, test_every_epochs=None))]
        )
        assert shown(plan) == ["train 0 0+4 [0, 20)", "train 1 0+1 [0, 6)", "test 1 0+2 [0, 5)"]

    @pytest.mark.feature(
        "18",
        "tests every n updates, without affecting the order of data",
        "`PHASES.test_every.updates`",
    )
    def test_tests_every_n_updates_are_counted_across_epochs(self) -> None:
        plan = interleave(
            [Stage(splits(), PhaseSettings(epochs=2, test_every_epochs=None, test_every_updates=2))]
        )
        assert shown(plan) == [
            "train 0 0+2 [0, 12)",
            "test 0 0+2 [0, 5)",
            "train 0 2+1 [12, 18)",
            "train 1 0+1 [0, 6)",
            "test 1 0+2 [0, 5)",
            "train 1 1+2 [6, 18)",
            "test 1 0+2 [0, 5)",
        ]

    def test_tests_by_epochs_and_updates_are_combined(self) -> None:
        plan = interleave(
            [Stage(splits(), PhaseSettings(epochs=2, test_every_epochs=1, test_every_updates=2))]
        )
        assert [(p.split, p.steps) for p in plan.phases if p.is_train] == [
            ("train", s) for s in (2, 1, 1, 2)
        ]
        assert [p.is_train for p in plan.phases] == [True, False] * 4

    @pytest.mark.feature(
        "17",
        "tests after every n epochs and at the end, or first",
        "`PHASES.test_every.epochs`, `PHASES.test_first`",
    )
    def test_tests_follow_every_second_epoch_and_the_last(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=3, test_every_epochs=2))])
        assert [(p.split, p.epoch) for p in plan.phases] == [
            ("train", 0), ("train", 1), ("test", 1), ("train", 2), ("test", 2),
        ]  # fmt: skip

    def test_only_the_end_is_tested_without_an_interval(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=2, test_every_epochs=None))])
        assert [p.split for p in plan.phases] == ["train", "train", "test"]

    def test_test_first_precedes_training(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=1, test_first=True))])
        assert shown(plan) == ["test 0 0+2 [0, 5)", "train 0 0+3 [0, 18)", "test 0 0+2 [0, 5)"]

    @pytest.mark.feature("23", "limited test batches", "`PHASES.limit.test`")
    def test_limits_shorten_epochs_and_tests(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=2, limit_train=2, limit_test=1))])
        assert shown(plan) == [
            "train 0 0+2 [0, 12)",
            "test 0 0+1 [0, 3)",
            "train 1 0+2 [0, 12)",
            "test 1 0+1 [0, 3)",
        ]
        assert plan.phases[0].ends_epoch

    def test_limit_beyond_the_split_changes_nothing(self) -> None:
        settings = PhaseSettings(epochs=1, limit_train=99, limit_test=99)
        assert interleave([Stage(splits(drop_last=False), settings)]) == interleave(
            [Stage(splits(drop_last=False), PhaseSettings(epochs=1))]
        )

    def test_several_test_splits_keep_their_order(self) -> None:
        plan = interleave(
            [
                Stage(
                    splits(Split("hard", 4, 4, False), Split("easy", 2, 4, False)),
                    PhaseSettings(epochs=1),
                )
            ]
        )
        assert shown(plan) == ["train 0 0+3 [0, 18)", "hard 0 0+1 [0, 4)", "easy 0 0+1 [0, 2)"]

    @pytest.mark.feature("22", "training without tests", "`DATA.TEST=null`")
    def test_run_without_a_test_split_only_trains(self) -> None:
        assert shown(
            interleave([Stage({"train": TRAIN}, PhaseSettings(epochs=1, test_first=True))])
        ) == ["train 0 0+3 [0, 18)"]

    @pytest.mark.parametrize(
        "settings", [PhaseSettings(epochs=0), PhaseSettings(updates=0), PhaseSettings(samples=0)]
    )
    def test_length_of_0_gives_an_empty_plan(self, settings: PhaseSettings) -> None:
        plan = interleave([Stage(splits(), settings)])
        assert (plan.phases, plan.updates, plan.epochs, plan.where(RunState())) == ((), 0, 0, 0.0)

    def test_empty_split_is_rejected(self) -> None:
        with raises(ConfigError, key="DATA.TEST"):
            interleave([Stage(splits(Split("test", 0, 3, False)), PhaseSettings(epochs=1))])

    def test_batch_larger_than_the_split_is_rejected_with_drop_last(self) -> None:
        with pytest.raises(ConfigError, match=r"^DATA\.TRAIN\.batch_size = 6 .* 5 samples"):
            interleave([Stage(splits(length=5), PhaseSettings(epochs=1))])
        assert (
            interleave([Stage(splits(length=5, drop_last=False), PhaseSettings(epochs=1))]).updates
            == 1
        )

    @pytest.mark.parametrize("settings", [PhaseSettings(), PhaseSettings(epochs=1, updates=1)])
    def test_missing_or_second_length_is_rejected(self, settings: PhaseSettings) -> None:
        with raises(ConfigError, key="PHASES.epochs"):
            interleave([Stage(splits(), settings)])


class TestPlan:
    def test_where_is_the_fraction_of_completed_updates(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=1))])
        assert [plan.where(RunState(updates=n)) for n in range(3)] == [0.0, 1 / 3, 2 / 3]

    def test_step_of_a_position_counts_from_the_start_of_the_epoch(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=1, test_every_updates=2))])
        assert plan.position(RunState(phase=2, step=0, updates=2)).step == 2

    def test_where_continues_from_an_anchor(self) -> None:
        plan = Plan(
            interleave([Stage(splits(), PhaseSettings(epochs=2))]).phases,
            anchor=Anchor(2, 0.5, 0.5),
        )
        assert [plan.where_at(n) for n in range(2, 6)] == [0.5, 0.625, 0.75, 0.875]

    def test_following_lists_later_phases_of_the_same_split(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=3))])
        assert [phase.index for phase in plan.following(plan.phases[2])] == [2, 4]
        assert [phase.index for phase in plan.following(plan.phases[1])] == [1, 3, 5]

    def test_plan_survives_json(self) -> None:
        plan = Plan(
            interleave([Stage(splits(), PhaseSettings(epochs=2))]).phases,
            anchor=Anchor(3, 1 / 3, 1 / 5),
        )
        assert decode_plan(json.loads(json.dumps(encode_plan(plan)))) == plan

    def test_plan_without_stages_is_loaded(self) -> None:
        phase = {
            "index": 0,
            "split": "train",
            "epoch": 0,
            "first": 0,
            "steps": 3,
            "offset": 0,
            "end": 18,
        }
        plan = decode_plan({"anchor": [1, 0.25], "phases": [{**phase, "batch_size": 6}]})
        assert (plan.anchor, plan.phases[0].stage, plan.stages) == ((1, 0.25, 0.25), 0, ((0, 3),))

    def test_make_test_phase_applies_the_limit(self) -> None:
        assert make_test_phase(TEST, epoch=2, limit=1) == Phase(0, "test", 2, 0, 1, 0, 3, 3)


def positions(plan: Plan) -> Iterator[RunState]:
    """Yield every position of a run at which it may be saved."""
    state = RunState()
    for phase in plan.phases:
        yield RunState(**state.state_dict())
        for _ in range(phase.steps):
            state.finish_step(phase)
            yield RunState(**state.state_dict())
        state.finish_phase()
    yield state


def rest(plan: Plan, state: RunState) -> list[tuple[str, int, int, int]]:
    """Return (split, epoch, first sample, end) of every step that is left."""
    found = []
    for phase in plan.phases[state.phase :]:
        begun = state.step if phase.index == state.phase else 0
        for step in range(begun, phase.steps):
            first = phase.offset + step * phase.batch_size
            found.append((phase.split, phase.epoch, first, first + phase.samples_in(step)))
    return found


def check_splice(
    before: Plan,
    state: RunState,
    given: Mapping[str, Split],
    settings: PhaseSettings,
    *,
    tail: int = 0,
) -> Plan:
    """Splice and see that each epoch is covered in order, once, up to `tail` samples at its end,
    and tested last."""
    after = splice(before, state, [Stage(given, settings)])
    assert after.phases[: state.phase] == before.phases[: state.phase]
    assert [phase.index for phase in after.phases] == list(range(len(after.phases)))
    consumed: dict[int, int] = {}
    for phase in before.phases[: state.phase + 1]:
        if phase.is_train:
            steps = state.step if phase.index == state.phase else phase.steps
            consumed[phase.epoch] = phase.offset + sum(
                phase.samples_in(step) for step in range(steps)
            )
    for split, epoch, first, end in rest(after, state):
        if split == "train":
            assert first == consumed.get(epoch, 0)
            assert first < end
            consumed[epoch] = end
    planned = sum(phase.samples for phase in after.phases if phase.is_train)
    assert planned == sum(consumed.values())
    for epoch in range(after.epochs - 1):  # the last one may end early
        assert given["train"].length - consumed[epoch] <= tail
    if after.updates:
        assert not after.phases[-1].is_train
    before_where = before.where(state)
    assert after.where(state) == pytest.approx(
        min(before_where, before.where_at(before.updates - 1))
    )
    wheres = [after.where_at(n) for n in range(state.updates, after.updates)]
    assert wheres == sorted(wheres)
    assert all(0 <= where < 1 for where in wheres)
    return after


class TestSplitIntervals:
    """Test splits that are not tested as PHASES.test_every says."""

    END = Split("test", 5, 3, drop_last=False, every=SplitInterval())
    OFTEN = Split("often", 3, 3, drop_last=False, every=SplitInterval(updates=2))
    RARELY = Split("rarely", 3, 3, drop_last=False, every=SplitInterval(epochs=2))
    VALID = Split("valid", 3, 3, drop_last=False)

    def names(self, *stages: Stage) -> list[str]:
        return [f"{p.split}{p.steps if p.is_train else ''}" for p in interleave(stages).phases]

    @pytest.mark.feature(
        "splits",
        "a test interval, meters and losses of a split",
        "`DATA.TEST.every: end`, `METERS.x.splits`, `LOSS.losses.x.splits`",
    )
    def test_split_at_the_end_is_tested_once_and_last(self) -> None:
        stage = Stage(splits(self.END, self.VALID), PhaseSettings(epochs=2, test_first=True))
        assert self.names(stage) == ["valid", "train3", "valid", "train3", "valid", "test"]

    def test_interval_of_a_split_leaves_the_others_alone(self) -> None:
        stage = Stage(splits(self.RARELY, self.VALID), PhaseSettings(epochs=3))
        assert self.names(stage) == [
            *("train3", "valid", "train3", "rarely", "valid", "train3", "valid", "rarely")
        ]

    def test_interval_in_updates_divides_epochs(self) -> None:
        stage = Stage(splits(self.OFTEN), PhaseSettings(epochs=1))
        assert self.names(stage) == ["train2", "often", "train1", "often"]

    def test_stage_ends_with_the_splits_without_an_interval(self) -> None:
        stage = Stage(splits(self.END, self.VALID), PhaseSettings(epochs=1, test_every_epochs=None))
        assert self.names(stage, stage) == ["train3", "valid", "train3", "valid", "test"]

    def test_run_without_updates_tests_all_splits_if_asked_to(self) -> None:
        stage = Stage(splits(self.END, self.VALID), PhaseSettings(epochs=0, test_first=True))
        assert self.names(stage) == ["valid", "test"]

    def test_longer_run_is_tested_at_its_new_end(self) -> None:
        stage = Stage(splits(self.END, self.VALID), PhaseSettings(epochs=1))
        before = interleave([stage])
        state = RunState(phase=3, updates=3, samples=18)
        longer = Stage(stage.splits, PhaseSettings(epochs=2))
        after = splice(before, state, [longer])
        assert [phase.split for phase in after.phases[3:]] == ["train", "valid", "test"]

    def test_split_that_is_due_since_a_change_is_tested_after_the_last_update(self) -> None:
        before = interleave([Stage(splits(self.VALID), PhaseSettings(epochs=1))])
        state = RunState(phase=2, updates=3, samples=18)
        after = splice(
            before, state, [Stage(splits(self.END, self.VALID), PhaseSettings(epochs=1))]
        )
        assert [phase.split for phase in after.phases] == ["train", "valid", "test"]


class TestSplice:
    BEFORE = interleave(
        [Stage(splits(drop_last=False), PhaseSettings(epochs=3, test_every_updates=3))]
    )

    @pytest.mark.parametrize("batch_size", [1, 4, 6, 9, 20, 50])
    @pytest.mark.parametrize("epochs", [3, 5])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_splice_at_every_position_covers_each_epoch(
        self, batch_size: int, epochs: int, drop_last: bool
    ) -> None:
        if drop_last and batch_size == 50:
            pytest.skip("refused: no whole batch")
        given = splits(batch_size=batch_size, drop_last=drop_last)
        for state in positions(self.BEFORE):
            after = check_splice(
                self.BEFORE,
                state,
                given,
                PhaseSettings(epochs=epochs),
                tail=batch_size - 1 if drop_last else 0,
            )
            assert after.epochs == epochs
            trained = {phase.epoch for phase in after.phases if phase.is_train}
            assert trained == set(range(epochs))

    def test_splice_within_an_epoch_has_these_phases(self) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        state = RunState(phase=2, step=1, updates=4, samples=24)
        after = splice(before, state, [Stage(splits(batch_size=4), PhaseSettings(epochs=3))])
        assert shown(after) == [
            "train 0 0+3 [0, 18)",
            "test 0 0+2 [0, 5)",
            "train 1 0+1 [0, 6)",
            "train 1 1+3 [6, 18)",
            "test 1 0+2 [0, 5)",
            "train 2 0+5 [0, 20)",
            "test 2 0+2 [0, 5)",
        ]
        assert (after.anchor, after.where(state)) == ((4, 4 / 6, 4 / 6), 4 / 6)

    def test_splice_after_the_last_step_of_an_epoch_keeps_its_test(self) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        state = RunState(phase=0, step=3, updates=3, samples=18)
        after = splice(before, state, [Stage(splits(batch_size=10), PhaseSettings(epochs=2))])
        assert shown(after) == [
            "train 0 0+3 [0, 18)",
            "test 0 0+2 [0, 5)",
            "train 1 0+2 [0, 20)",
            "test 1 0+2 [0, 5)",
        ]

    def test_splice_within_a_test_keeps_the_test(self) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        state = RunState(phase=1, step=1, updates=3, samples=18)
        after = splice(before, state, [Stage(splits(batch_size=10), PhaseSettings(epochs=1))])
        assert shown(after) == ["train 0 0+3 [0, 18)", "test 0 0+2 [0, 5)"]

    def test_splice_beyond_the_new_end_adds_a_last_test(self) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        state = RunState(phase=2, step=1, updates=4, samples=24)
        after = splice(before, state, [Stage(splits(), PhaseSettings(epochs=1))])
        assert shown(after)[2:] == ["train 1 0+1 [0, 6)", "test 1 0+2 [0, 5)"]

    def test_epoch_without_room_for_a_larger_batch_is_still_tested(self) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        for epoch, phase in ((0, 0), (1, 2)):
            state = RunState(phase=phase, step=2, updates=2 + 3 * epoch, samples=12 + 18 * epoch)
            after = splice(before, state, [Stage(splits(batch_size=10), PhaseSettings(epochs=2))])
            tests = [p.epoch for p in after.phases if not p.is_train]
            assert tests == [0, 1]

    def test_where_is_1_in_the_test_after_the_last_update(self) -> None:
        plan = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        last = RunState(phase=len(plan.phases) - 1, updates=plan.updates)
        assert (plan.position(last).split, plan.position(last).where) == ("test", 1.0)

    def test_where_stays_below_1_when_a_finished_run_is_extended(self) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        state = RunState(phase=4, updates=6, samples=36, finished="completed")
        after = splice(before, state, [Stage(splits(), PhaseSettings(epochs=4))])
        assert [p.epoch for p in after.phases if p.is_train] == [0, 1, 2, 3]
        assert after.where(state) == 5 / 6
        assert after.where_at(after.updates - 1) < 1

    @pytest.mark.feature(
        "phases.extend",
        "training longer: schedules continue, are stretched, or begin a new cycle",
        "`PHASES.extend`",
    )
    @pytest.mark.parametrize(
        ("extend", "where"),
        [
            ("continue", [5 / 6, 8 / 9, 17 / 18]),
            ("stretch", [6 / 12, 8 / 12, 10 / 12]),
            ("cycle", [0.0, 1 / 3, 2 / 3]),
        ],
    )
    def test_schedules_of_an_extended_run(self, extend: Extension, where: list[float]) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=2))])
        state = RunState(phase=4, updates=6, samples=36, finished="completed")
        after = splice(before, state, [Stage(splits(), PhaseSettings(epochs=4))], extend)
        assert [after.where_at(updates) for updates in (6, 8, 10)] == pytest.approx(where)
        assert after.cycle_updates == (6 if extend == "cycle" else 12)
        assert decode_plan(encode_plan(after)) == after

    def test_second_splice_covers_each_epoch(self) -> None:
        before = interleave([Stage(splits(drop_last=False), PhaseSettings(epochs=4))])
        first = splice(
            before,
            RunState(phase=0, step=2, updates=2, samples=12),
            [Stage(splits(batch_size=3), PhaseSettings(epochs=4))],
        )
        state = RunState(phase=1, step=1, updates=3, samples=15)
        check_splice(first, state, splits(batch_size=5, drop_last=False), PhaseSettings(epochs=2))

    def test_splice_does_not_repeat_test_first(self) -> None:
        before = interleave([Stage(splits(), PhaseSettings(epochs=1, test_first=True))])
        state = RunState(phase=1)
        after = splice(before, state, [Stage(splits(), PhaseSettings(epochs=2, test_first=True))])
        assert [p.split for p in after.phases] == ["test", "train", "test", "train", "test"]

    def test_splice_rejects_a_batch_larger_than_the_split(self) -> None:
        with pytest.raises(ConfigError, match=r"DATA\.TRAIN\.batch_size = 30 "):
            splice(self.BEFORE, RunState(), [Stage(splits(batch_size=30), PhaseSettings(epochs=1))])

    @given(
        length=st.integers(1, 30),
        sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
        epochs=st.tuples(st.integers(1, 4), st.integers(1, 5)),
        every=st.tuples(st.none() | st.integers(1, 5), st.none() | st.integers(1, 5)),
        at=st.integers(0, 200),
    )
    def test_any_splice_covers_each_epoch(
        self,
        length: int,
        sizes: tuple[int, int],
        epochs: tuple[int, int],
        every: tuple[int | None, int | None],
        at: int,
    ) -> None:
        old = splits(length=length, batch_size=sizes[0], drop_last=False)
        before = interleave(
            [Stage(old, PhaseSettings(epochs=epochs[0], test_every_updates=every[0]))]
        )
        states = list(positions(before))
        state = states[at % len(states)]
        new = splits(length=length, batch_size=sizes[1], drop_last=False)
        check_splice(
            before, state, new, PhaseSettings(epochs=epochs[1], test_every_updates=every[1])
        )


@pytest.mark.feature(
    "16",
    "phases are known before the first batch; their number does not enlarge files",
    "`plan.json`",
)
@given(
    length=st.integers(1, 50),
    batch_size=st.integers(1, 20),
    epochs=st.integers(0, 4),
    by_epochs=st.none() | st.integers(1, 3),
    by_updates=st.none() | st.integers(1, 7),
)
def test_any_plan_covers_every_epoch_once_and_ends_with_a_test(
    length: int, batch_size: int, epochs: int, by_epochs: int | None, by_updates: int | None
) -> None:
    settings = PhaseSettings(
        epochs=epochs, test_every_epochs=by_epochs, test_every_updates=by_updates
    )
    plan = interleave(
        [Stage(splits(length=length, batch_size=batch_size, drop_last=False), settings)]
    )
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for split, epoch, first, end in rest(plan, RunState()):
        if split == "train":
            seen[epoch] += range(first, end)
    assert seen == {epoch: list(range(length)) for epoch in range(epochs)}
    assert [phase.is_train for phase in plan.phases[-1:]] == [False] * bool(epochs)
    pairs = zip(plan.phases, plan.phases[1:], strict=False)
    assert not any(not one.is_train and not other.is_train for one, other in pairs)
