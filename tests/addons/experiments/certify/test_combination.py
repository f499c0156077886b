"""Moments of the kills of a certificate."""

import pytest

from phasetrain.addons.experiments.certify.combination import choose_kills


@pytest.mark.parametrize(
    ("steps", "quick", "moments"),
    [
        (10, False, ["step", "step", "saved", "saving"]),
        (6, False, ["step", "saving", "saved"]),
        (2, False, ["step"]),
        (10, True, ["step"]),
        (1, False, []),
    ],
)
def test_short_runs_are_killed_less_often(steps: int, quick: bool, moments: list[str]) -> None:
    assert [kill.moment for kill in choose_kills(steps, is_quick=quick)] == moments
