"""The position counts completed phases, steps, updates and samples."""

import json

from phasetrain.engine.plan import Phase
from phasetrain.engine.position import RunState

TRAIN = Phase(0, "train", 0, 0, 3, 0, 20, 8)
TEST = Phase(1, "test", 0, 0, 2, 0, 10, 8)


def test_new_position_is_zero() -> None:
    assert RunState().state_dict() == {
        "phase": 0,
        "step": 0,
        "updates": 0,
        "samples": 0,
        "finished": "",
    }


def test_train_steps_count_as_updates_and_samples() -> None:
    state, seen = RunState(), []
    for _ in range(3):
        state.finish_step(TRAIN)
        seen.append((state.step, state.updates, state.samples))
    assert seen == [(1, 1, 8), (2, 2, 16), (3, 3, 20)]


def test_test_steps_do_not_count_as_updates() -> None:
    state = RunState(phase=1, updates=3, samples=20)
    state.finish_step(TEST)
    assert state == RunState(phase=1, step=1, updates=3, samples=20)


def test_finishing_a_phase_resets_the_step() -> None:
    state = RunState(step=3, updates=3, samples=20)
    state.finish_phase()
    assert state == RunState(phase=1, step=0, updates=3, samples=20)


def test_position_survives_json() -> None:
    state, other = RunState(2, 1, 7, 50, "completed"), RunState()
    other.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert other == state


def test_request_to_stop_is_stored_only_if_there_is_one() -> None:
    state, other = RunState(2, 0, 7, 50, "", "enough", 1), RunState(stopping="another")
    assert state.state_dict().items() >= {"stopping": "enough", "stops_after": 1}.items()
    other.load_state_dict(state.state_dict())
    assert other == state
    other.load_state_dict(RunState().state_dict())
    assert other == RunState()
