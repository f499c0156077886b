"""Checks of numbers that parts get as parameters, by name: `check_at_least(1, size=size)`."""


def check_at_least(least: int, **values: float | None) -> None:
    """Raise ValueError for the first of the named values below `least`; None is skipped."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} = {value}: expected at least {least}")


def check_positive(**values: float) -> None:
    """Raise ValueError for the first of the named values that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} = {value}: expected a number above 0")


def check_fraction(**values: float) -> None:
    """Raise ValueError for the first of the named values outside [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} = {value}: expected a number in [0, 1]")


def check_below_one(**values: float) -> None:
    """Raise ValueError for the first of the named values outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} = {value}: expected a number in [0, 1)")
