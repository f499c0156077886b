"""Values as JSON can hold them."""

import math
from typing import Any

from phasetrain.config.nested import to_plain


def to_json_value(value: Any) -> Any:
    """Return a value as JSON can hold it: infinite and NaN numbers become null, objects a text."""
    return to_plain(value, _to_json_scalar, text_keys=True)


def _to_json_scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
