"""The values of RUN.engine, of the core and of the installed add-ons."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from phasetrain.config.addons import Engine, load_addons
from phasetrain.errors import ConfigError

APP = "phasetrain.app.engines"

CORE_ENGINES = (
    Engine("train", f"{APP}:run_train", runs_as_job=True),
    Engine("test", f"{APP}:run_test", needs_training_data=False, runs_as_job=True),
    Engine("plan", f"{APP}:run_plan", is_distributed=False),
)


@cache
def list_engines() -> Mapping[str, Engine]:
    """Return value of RUN.engine -> engine.

    Raises:
        ConfigError: an add-on adds an engine of the core.
    """
    added = [engine for addon in load_addons() for engine in addon.engines]
    for engine in added:
        if any(engine.name == own.name for own in CORE_ENGINES):
            raise ConfigError(
                f"the engine {engine.name!r} is added by an installed add-on, and phasetrain has "
                f"it; uninstall the package of {engine.run.partition('.')[0]!r}",
                code="addon.conflict",
            )
    return MappingProxyType({engine.name: engine for engine in (*CORE_ENGINES, *added)})
