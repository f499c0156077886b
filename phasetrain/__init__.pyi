"""What `phasetrain` offers, for type checkers; the names are imported when they are used first."""

from phasetrain.api import RunResult as RunResult
from phasetrain.api import load as load
from phasetrain.api import run as run
from phasetrain.history import History as History

__version__: str
