"""Checks of the numbers that parts get as parameters."""

import pytest

from phasetrain.config.checks import check_at_least, check_below_one, check_fraction, check_positive


def test_numbers_on_the_bounds_pass():
    check_at_least(1, times=1, samples=None)
    check_positive(temperature=1e-9)
    check_fraction(share=0.0, warmup=1.0)
    check_below_one(dropout=0.0)


def test_first_number_out_of_bounds_is_named():
    with pytest.raises(ValueError, match=r"^times = 1:"):
        check_at_least(2, classes=2, times=1, batches=0)
    with pytest.raises(ValueError, match=r"^temperature = 0:"):
        check_positive(scale=1, temperature=0)
    with pytest.raises(ValueError, match=r"^share = nan:"):
        check_fraction(share=float("nan"))
    with pytest.raises(ValueError, match=r"^dropout = 1.0:"):
        check_below_one(dropout=1.0)
