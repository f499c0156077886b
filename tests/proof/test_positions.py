"""Positions of steps are named by step, phase and epoch, and counted in updates."""

from phasetrain.proof.positions import PhaseLabel, count_updates, describe_position

PHASES = [PhaseLabel("train", 0, 3, True), PhaseLabel("test", 0, 2, False)]


def test_positions_are_counted_in_steps_and_updates() -> None:
    assert (
        describe_position((0, 2), PHASES) == "step 2 of the run (step 2 of phase 0, train, epoch 0)"
    )
    assert (
        describe_position((1, 1), PHASES) == "step 4 of the run (step 1 of phase 1, test, epoch 0)"
    )
    assert describe_position((1, 0), PHASES) == "the end of phase 0 (train, epoch 0)"
    assert [count_updates(position, PHASES) for position in ((0, 2), (1, 1), (2, 0))] == [2, 3, 3]
