"""The size of an encoded plan does not grow with its phases, and decoding gives the same plan."""

import json
from typing import Any

import pytest

from phasetrain.engine.interleave import interleave, splice
from phasetrain.engine.plan import Phase, PhaseSettings, Plan, Split, Stage
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan, encode_phases, encode_plan


def make_stage(length: int = 80, **settings: Any) -> Stage:
    splits = [Split("train", length, 8, drop_last=False), Split("test", 9, 8, drop_last=False)]
    return Stage({split.name: split for split in splits}, PhaseSettings(**settings))


def encode_text(plan: Plan) -> str:
    return json.dumps(encode_plan(plan))


def test_two_epochs_are_one_repetition() -> None:
    assert encode_phases(interleave([make_stage(epochs=2)]).phases) == [
        {
            "repeat": 2,
            "phases": [
                {"split": "train", "steps": 10, "end": 80, "batch_size": 8, "stage": 0}
                | {"epoch": 0, "first": 0, "offset": 0, "add": [1, 0, 0]},
                {"split": "test", "steps": 2, "end": 9, "batch_size": 8, "stage": 0}
                | {"epoch": 0, "first": 0, "offset": 0, "add": [1, 0, 0]},
            ],
            "epoch": 0,
            "first": 0,
            "offset": 0,
        }
    ]


PLANS: dict[str, list[Stage]] = {
    "epochs": [make_stage(epochs=50)],
    "short last batch": [make_stage(83, epochs=50)],
    "every update": [make_stage(updates=600, test_every_epochs=None, test_every_updates=1)],
    "one epoch": [make_stage(8000, updates=900, test_every_epochs=None, test_every_updates=1)],
    "odd intervals": [make_stage(83, epochs=60, test_every_epochs=3, test_every_updates=7)],
    "test first": [make_stage(epochs=20, test_first=True)],
    "stages": [make_stage(epochs=20), make_stage(160, epochs=9), make_stage(epochs=20)],
    "predicate": [make_stage(epochs=20, test_when=lambda at: at.updates in (3, 4, 77))],
    "no tests": [Stage({"train": Split("train", 83, 8, drop_last=True)}, PhaseSettings(epochs=9))],
    "windows": [
        Stage(
            {"train": Split("train", 99, 8, drop_last=True, windows=(40, 0, 59))},
            PhaseSettings(epochs=9),
        )
    ],
}


@pytest.mark.parametrize("name", list(PLANS))
def test_decoded_plan_is_the_same(name: str) -> None:
    plan = interleave(PLANS[name])
    assert decode_plan(json.loads(encode_text(plan))) == plan


@pytest.mark.parametrize("updates", [1, 14, 100])
def test_spliced_plan_is_the_same(updates: int) -> None:
    plan = interleave(PLANS["epochs"])
    state = RunState()
    while state.updates < updates:
        phase = plan.phases[state.phase]
        if phase.is_train:
            state.updates += 1
            state.samples += phase.samples_in(state.step)
        state.step += 1
        if state.step == phase.steps:
            state.phase, state.step = state.phase + 1, 0
    spliced = splice(plan, state, [make_stage(160, epochs=70)])
    assert decode_plan(json.loads(encode_text(spliced))) == spliced


@pytest.mark.feature("16")
@pytest.mark.parametrize("length", [800, 8 * 10**6])
def test_size_does_not_grow_with_the_number_of_phases(length: int) -> None:
    def encode(updates: int) -> str:
        return encode_text(
            interleave(
                [make_stage(length, updates=updates, test_every_epochs=None, test_every_updates=1)]
            )
        )

    assert len(encode(20_000)) < len(encode(2_000)) + 10


def test_phases_of_older_checkpoints_have_an_index() -> None:
    fields = {"index": 0, "split": "train", "epoch": 0, "first": 0, "steps": 3, "offset": 0}
    plan = decode_plan({"anchor": [0, 0.0], "phases": [{**fields, "end": 18, "batch_size": 6}]})
    assert plan.phases == (Phase(0, "train", 0, 0, 3, 0, 18, 6),)


def test_plan_without_phases_is_the_same() -> None:
    empty = Plan()
    assert decode_plan(encode_plan(empty)) == empty
