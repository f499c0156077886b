"""Stages, predicates, windows and averaged weights in the plan; for the rest see test_plan.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from phasetrain.engine.interleave import add_last_tests, interleave, splice
from phasetrain.engine.plan import (
    Anchor,
    Phase,
    PhaseSettings,
    Plan,
    Progress,
    Split,
    SplitInterval,
    Stage,
)
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError


def stage(
    batch_size: int = 5, *, length: int = 20, tests: bool = True, **settings: object
) -> Stage:
    splits = {"train": Split("train", length, batch_size, drop_last=True)}
    if tests:
        splits["test"] = Split("test", 4, 4, drop_last=False)
    return Stage(splits, PhaseSettings(**settings))  # type: ignore[arg-type]


def shown(plan: Plan) -> list[str]:
    return [
        f"{p.stage} {p.split} {p.epoch} {p.first}+{p.steps} x {p.batch_size}" for p in plan.phases
    ]


def positions(plan: Plan) -> Iterator[RunState]:
    state = RunState()
    for phase in plan.phases:
        for _ in range(phase.steps):
            yield RunState(**state.state_dict())
            state.finish_step(phase)
        state.finish_phase()


class TestStages:
    TWO = (stage(5, epochs=2, test_every_epochs=None), stage(10, epochs=1, test_every_epochs=None))

    def test_stages_follow_each_other_with_their_own_settings(self) -> None:
        assert shown(interleave(self.TWO)) == [
            "0 train 0 0+4 x 5",
            "0 train 1 0+4 x 5",
            "0 test 1 0+1 x 4",
            "1 train 2 0+2 x 10",
            "1 test 2 0+1 x 4",
        ]

    def test_stage_counts_from_its_own_start_and_starts_a_new_epoch(
        self,
    ) -> None:
        plan = interleave([stage(5, updates=3), stage(10, samples=15), stage(5, epochs=1)])
        assert [line for line in shown(plan) if "train" in line] == [
            "0 train 0 0+3 x 5",
            "1 train 1 0+2 x 10",
            "2 train 2 0+4 x 5",
        ]

    @pytest.mark.feature(
        "phases.continued_stage",
        "a stage that begins within an epoch",
        "`PHASES.stages[].continues`",
    )
    @pytest.mark.parametrize("first", [1, 3, 4, 6])
    def test_stage_that_continues_has_the_steps_of_a_run_without_stages(self, first: int) -> None:
        alone = interleave([stage(5, epochs=2)])
        parts = [stage(5, updates=first), replace(stage(5, updates=8 - first), continues=True)]
        plan = interleave(parts)
        assert [one for one in shown(plan) if "test" in one] == [
            f"{int(first < 4)} test 0 0+1 x 4",
            "1 test 1 0+1 x 4",
        ]

        def list_steps(plan: Plan) -> list[tuple[int, int]]:
            trained = [one for one in plan.phases if one.is_train]
            return [
                (one.epoch, one.offset + 5 * step) for one in trained for step in range(one.steps)
            ]

        assert list_steps(plan) == list_steps(alone)
        assert [at.begin for at in plan.stages] == [0, first]

    def test_progress_is_known_in_the_stage_and_in_the_run(self) -> None:
        plan = interleave(self.TWO)
        assert plan.stages == ((0, 8), (8, 2))
        assert [plan.where_at(n) for n in (0, 4, 8, 9)] == [0.0, 0.4, 0.8, 0.9]
        assert [plan.within(0, n) for n in (0, 4)] == [0.0, 0.5]
        assert [plan.within(1, n) for n in (8, 9)] == [0.0, 0.5]

    def test_position_of_a_step_includes_its_stage(self) -> None:
        plan = interleave(self.TWO)
        state = RunState(phase=3, step=1, updates=9, samples=50)
        assert plan.position(state) == ("train", 9, 1, 0.9, 10, 1, 0.5, (0.8, 0.0))

    def test_progress_in_a_single_stage_is_where(self) -> None:
        plan = Plan(interleave([stage(epochs=2)]).phases, anchor=Anchor(2, 0.5, 0.25))
        assert plan.within(0, 4) == plan.where_at(4)

    def test_stage_without_a_length_is_rejected(self) -> None:
        with raises(ConfigError, key="PHASES.epochs"):
            interleave([stage(epochs=1), stage()])

    @pytest.mark.parametrize("longer", [2, 5])
    def test_splice_lengthens_a_stage_and_keeps_completed_phases(self, longer: int) -> None:
        before = interleave(self.TWO)
        state = RunState(phase=1, step=2, updates=6, samples=30)
        after = splice(
            before, state, (stage(5, epochs=longer, test_every_epochs=None), self.TWO[1])
        )
        assert after.phases[0] == before.phases[0]
        assert [p.epoch for p in after.phases if p.is_train and p.stage == 0] == [
            0,
            1,
            1,
            *range(2, longer),
        ]
        assert [p.epoch for p in after.phases if p.is_train and p.stage == 1] == [longer]
        assert after.within(0, 6) == before.within(0, 6) == 0.75
        assert after.within(1, after.stages[1][0]) == 0.0
        assert after.where(state) == before.where(state)

    def test_splice_may_remove_stages(self) -> None:
        before = interleave([stage(5, updates=3), stage(5, updates=3)])
        state = RunState(phase=2, step=1, updates=4, samples=20)
        after = splice(before, state, [stage(5, updates=9)])
        assert {phase.stage for phase in after.phases} == {0}
        assert (after.updates, after.stages) == (9, ((0, 9),))

    @given(
        st.lists(
            st.tuples(st.sampled_from([1, 3, 5, 20]), st.integers(1, 3)), min_size=1, max_size=4
        ),
        st.data(),
    )
    def test_splice_without_changes_keeps_all_steps(
        self, sizes: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        stages = [stage(size, epochs=count, tests=False) for size, count in sizes]
        before = interleave(stages)
        state = data.draw(st.sampled_from(list(positions(before))))
        after = splice(before, state, stages)

        def steps(plan: Plan) -> list[tuple[int, int, int]]:
            return [(p.stage, p.epoch, p.first + n) for p in plan.phases for n in range(p.steps)]

        assert steps(after) == steps(before)


class TestLastTests:
    @pytest.fixture
    def early(self) -> Stage:
        """Return three epochs of four updates, with a validation after each and a final test."""
        splits = {
            "train": Split("train", 20, 5, drop_last=True),
            "test": Split("test", 4, 4, drop_last=False, every=SplitInterval()),
            "valid": Split("valid", 4, 2, drop_last=False),
        }
        return Stage(splits, PhaseSettings(epochs=3))

    def test_end_of_an_epoch_is_followed_by_the_splits_that_wait_for_the_end(
        self, early: Stage
    ) -> None:
        plan = interleave([early])
        for state in (RunState(1, 0, 4), RunState(1, 1, 4), RunState(2, 0, 4)):
            found = add_last_tests(plan, state, [early])
            assert shown(found)[:3] == [
                "0 train 0 0+4 x 5",
                "0 valid 0 0+2 x 2",
                "0 test 0 0+1 x 4",
            ]
            assert shown(found)[3:] == shown(plan)[2:]
            assert [phase.index for phase in found.phases] == list(range(8))
            assert found.where(state) == plan.where(state)

    def test_middle_of_an_epoch_is_followed_by_all_splits(self, early: Stage) -> None:
        plan = interleave([early])
        state = RunState(2, 3, 7)
        found = add_last_tests(plan, state, [early])
        assert shown(found)[2:6] == [
            "0 train 1 0+3 x 5",
            "0 valid 1 0+2 x 2",
            "0 test 1 0+1 x 4",
            "0 train 1 3+1 x 5",
        ]
        assert shown(found)[6:] == shown(plan)[3:]
        assert found.updates == plan.updates

    def test_tests_are_added_once(self, early: Stage) -> None:
        state = RunState(2, 3, 7)
        found = add_last_tests(interleave([early]), state, [early])
        for later in (state, RunState(3, 0, 7), RunState(4, 0, 7), RunState(5, 0, 7)):
            assert add_last_tests(found, later, [early]) is found

    def test_averaged_weights_are_tested_after_their_start(self) -> None:
        averaged = stage(epochs=3, averaged={"ema": 0.5}, test_every_epochs=None)
        plan = interleave([averaged])
        splits = [
            [p.split for p in add_last_tests(plan, RunState(0, at, at), [averaged]).phases]
            for at in (2, 3)
        ]
        assert [one[:3] for one in splits] == [["train", "test", "train"]] * 2
        started = add_last_tests(plan, RunState(1, 2, 6), [averaged]).phases
        assert [phase.split for phase in started[:4]] == ["train", "train", "test", "test@ema"]


class TestPredicate:
    @pytest.mark.feature("19", "tests where a function says so", "`PHASES.test_every.when`")
    def test_tests_are_where_the_predicate_is_true(self) -> None:
        seen: list[Progress] = []

        def when(at: Progress) -> bool:
            seen.append(at)
            return at.updates in (1, 6)

        plan = interleave([stage(epochs=2, test_every_epochs=None, test_when=when)])
        assert shown(plan) == [
            "0 train 0 0+1 x 5",
            "0 test 0 0+1 x 4",
            "0 train 0 1+3 x 5",
            "0 train 1 0+2 x 5",
            "0 test 1 0+1 x 4",
            "0 train 1 2+2 x 5",
            "0 test 1 0+1 x 4",
        ]
        assert Progress(stage=0, epoch=1, step=2, updates=6, samples=30) in seen

    @pytest.mark.parametrize(
        ("when", "message"),
        [
            (lambda at: "no", r"'no' .*Progress"),
            (lambda at: 1 / 0, r"Progress.*ZeroDivisionError"),
        ],
    )
    def test_failing_predicate_is_rejected(self, when: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            interleave([stage(epochs=1, test_when=when)])

    def test_predicate_can_select_the_end_of_an_epoch(self) -> None:
        plan = interleave(
            [
                stage(
                    epochs=3,
                    test_every_epochs=None,
                    test_when=lambda at: at.epoch == 2 and at.step == 0,
                )
            ]
        )
        assert [p.epoch for p in plan.phases if p.split == "test"] == [1, 2]


class TestWindows:
    def windowed(
        self, train: tuple[int, ...], test: tuple[int, ...] = (), **settings: object
    ) -> list[str]:
        splits = {"train": Split("train", sum(train), 5, drop_last=False, windows=train)}
        splits["test"] = Split("test", sum(test) or 4, 4, drop_last=False, windows=test)
        return shown(interleave([Stage(splits, PhaseSettings(**settings))]))  # type: ignore[arg-type]

    def test_each_window_is_a_phase_and_an_epoch_has_all_windows(self) -> None:
        assert self.windowed((10, 3), epochs=2, test_every_epochs=None) == [
            "0 train 0 0+2 x 5",
            "0 train 1 0+1 x 5",
            "0 train 2 0+2 x 5",
            "0 train 3 0+1 x 5",
            "0 test 3 0+1 x 4",
        ]

    @pytest.mark.feature("26")
    def test_train_and_test_windows_are_paired(self) -> None:
        assert self.windowed((10, 5), (4, 9), epochs=1) == [
            "0 train 0 0+2 x 5",
            "0 test 0 0+1 x 4",
            "0 train 1 0+1 x 5",
            "0 test 1 0+3 x 4",
        ]

    def test_empty_windows_are_skipped(self) -> None:
        assert self.windowed((5, 0, 5), (4, 4, 0), epochs=1) == [
            "0 train 0 0+1 x 5",
            "0 test 0 0+1 x 4",
            "0 train 2 0+1 x 5",
        ]

    def test_empty_windows_alone_are_rejected(self) -> None:
        with raises(ConfigError, key="DATA.TRAIN"):
            self.windowed((0, 0), epochs=1)


class TestAveraged:
    def plan(self, start: float, **settings: object) -> list[str]:
        made = interleave([stage(5, epochs=2, averaged={"ema": start}, **settings)])
        return [phase.split for phase in made.phases]

    def test_averaged_weights_are_tested_after_the_model(self) -> None:
        assert self.plan(0.0) == ["train", "test", "test@ema", "train", "test", "test@ema"]

    def test_averaged_weights_are_not_tested_before_their_start(self) -> None:
        assert self.plan(0.0, test_first=True)[:3] == ["test", "train", "test"]
        assert self.plan(0.75) == ["train", "test", "train", "test", "test@ema"]
        # As many updates as before the start: the average begins here.
        assert self.plan(0.5) == self.plan(0.0)
        assert self.plan(0.51) == self.plan(0.75)

    def test_phase_of_averaged_weights_reads_its_split(self) -> None:
        phase = Phase(0, "test@ema", 0, 0, 1, 0, 4, 4)
        assert (phase.data, phase.weights) == ("test", "ema")
        assert (
            Phase(0, "test", 0, 0, 1, 0, 4, 4).data,
            Phase(0, "test", 0, 0, 1, 0, 4, 4).weights,
        ) == ("test", "")


class TestMostPhases:
    def test_plan_with_too_many_phases_is_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phasetrain.engine.interleave.MOST_PHASES", 8)
        assert len(interleave([stage(epochs=4)]).phases) == 8
        with pytest.raises(
            ConfigError,
            match=r"^PHASES: .*\b8 phases .*epoch 5\b",
        ):
            interleave([stage(epochs=5)])

    def test_endless_plan_is_rejected_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phasetrain.engine.interleave.MOST_PHASES", 1000)
        with pytest.raises(ConfigError, match=r"^PHASES: .*\b1,000 phases .*epoch 1\b"):
            interleave([stage(length=10**12, epochs=1, test_every_updates=100)])
