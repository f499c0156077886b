"""Hydra's parser of overrides, which also knows `seeds(n)`."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override

MOST_SEEDS = 10_000
"""Largest number of seeds in one override; a larger one is a typing error."""

SEEDS = "seeds"


def make_override_parser() -> OverridesParser:
    """Return a parser of overrides with Hydra's functions and `seeds`."""
    parser = OverridesParser.create()
    parser.functions.register(SEEDS, list_seeds)
    return parser


def list_seeds(n: int, start: int = 0) -> ChoiceSweep:
    """Return `n` consecutive seeds: `seeds(5)` is `choice(0,1,2,3,4)`.

    Raises:
        ValueError: not 1 to MOST_SEEDS seeds, or a negative one; the parser reports it as an
            override that cannot be read.
    """
    if not 1 <= n <= MOST_SEEDS:
        raise ValueError(f"n = {n}: expected 1 to {MOST_SEEDS} seeds")
    if start < 0:
        raise ValueError(f"start = {start}: expected 0 or more")
    return ChoiceSweep(list=list(range(start, start + n)))


def is_seeds(override: Override) -> bool:
    """Return whether the values of an override are given by `seeds(n)`."""
    # The parsed value is a plain choice of numbers; only the text tells.
    return override.is_sweep_override() and override.get_value_string().startswith(f"{SEEDS}(")
