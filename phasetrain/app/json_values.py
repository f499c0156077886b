"""Values as JSON can hold them."""

import math
from collections.abc import Mapping
from typing import Any


def to_json_value(value: Any) -> Any:
    """Return a value as JSON can hold it: infinite and NaN numbers become null, objects a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return str(value)
