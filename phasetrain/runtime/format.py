"""Text for people: durations, sizes, counts, metrics, and the first items of long lists.

Every table, message, progress line and report page formats its values with these functions, so that
the same value looks the same everywhere. Files for programs hold the raw values.
"""

import math
import time
from collections.abc import Iterable


def format_duration(seconds: float) -> str:
    """Return a duration with its two largest units.

    Example:
        >>> [format_duration(seconds) for seconds in (1.2, 185, 7800, 273_600)]
        ['1.2 s', '3 min 05 s', '2 h 10 min', '3 d 04 h']
    """
    if seconds < 59.95:  # 59.96 would be rounded to "60.0 s"
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days >= 2:  # up to 47 h, minutes still matter to someone who waits
        return f"{days} d {hours_of_day:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s"


def format_duration_range(low: float, high: float) -> str:
    """Return an estimate of a duration between two bounds, in one unit and in round numbers.

    Example:
        >>> [format_duration_range(*bounds) for bounds in ((9, 14), (130, 290), (7000, 9000))]
        ['5 to 15 s', '2 to 5 min', '115 to 150 min']
    """
    # From three units on, whole ones are precise enough.
    unit, size = next(
        (
            (unit, size)
            for unit, size in (("d", 86_400), ("h", 3600), ("min", 60))
            if high >= 3 * size
        ),
        ("s", 1),
    )
    step = 5 if unit == "s" or high >= 20 * size else 1
    first = step * math.floor(low / size / step)
    last = step * math.ceil(high / size / step)
    if first == last:
        return f"{last} {unit}"
    return f"{first} to {last} {unit}"


def format_estimate(seconds: float) -> str:
    """Return the expected duration of a run with few timed steps, as a range."""
    return format_duration_range(0.7 * seconds, 1.5 * seconds)


def format_timestamp(at: float) -> str:
    """Return seconds since 1970 as local date and time; empty for values that are not dates."""
    if 0 < at < 1e11:  # from the year 5138 on it is a damaged file rather than a date
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return ""


def format_bytes(size: float) -> str:
    """Return a size in bytes, MiB or GiB.

    Example:
        >>> [format_bytes(size) for size in (8424, 31 * 2**20, 3 * 2**29)]
        ['8,424 bytes', '31.0 MiB', '1.5 GiB']
    """
    for unit, bytes_per_unit in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= bytes_per_unit:
            return f"{size / bytes_per_unit:,.1f} {unit}"
    return f"{size:,.0f} bytes"


def format_si(count: float) -> str:
    """Return a large count with an SI prefix, such as floating-point operations: `12.3 M`.

    Example:
        >>> [format_si(count) for count in (12, 1.5e3, 2e6, 3e12)]
        ['12', '1.5 k', '2 M', '3 T']
    """
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {prefix}"
    return f"{count:.3g}"


def format_metric(value: float) -> str:
    """Return a metric with four decimals, or four significant digits if it is very small or large.

    Example:
        >>> [format_metric(value) for value in (0.99716, 12.5, 1e-5)]
        ['0.9972', '12.5000', '1e-05']
    """
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.4g}"


def format_percent(part: float, whole: float = 1.0) -> str:
    """Return a share as a whole percentage, such as `85 %`; empty if the whole is 0 or unknown."""
    if not whole or not math.isfinite(part / whole):
        return ""
    return f"{100 * part / whole:.0f} %"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    Example:
        >>> [format_count(1, "epoch"), format_count(1442, "sample"), format_count(2, "batch")]
        ['1 epoch', '1,442 samples', '2 batches']
    """
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "batch", "box")) else "s"
    return f"{number:,} {noun}{ending}"


def shorten(text: str, length: int) -> str:
    """Return the text, cut to `length` characters with `...` at the end if it is longer."""
    if len(text) <= length:
        return text
    return f"{text[: length - 3]}..."


def join_first(items: Iterable[object], most: int, *, empty: str = "none") -> str:
    """Return the first items of a list, separated by commas, and the number of the others.

    Args:
        items: anything with a text.
        most: maximum number of items to show.
        empty: text for no items.

    Example:
        >>> join_first([5, 1, 7, 2], most=2)
        '5, 1 and 2 more'
    """
    texts = [str(item) for item in items]
    if not texts:
        return empty
    shown = ", ".join(texts[:most])
    if len(texts) > most:
        return f"{shown} and {len(texts) - most:,} more"
    return shown
