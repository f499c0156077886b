"""The values of RUN.engine, of the core and of the installed add-ons."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from phasetrain.config.addons import Engine, load_addons, make_conflict_error

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
    own = {engine.name for engine in CORE_ENGINES}
    added = []
    for addon in load_addons():
        for engine in addon.engines:
            if engine.name in own:
                raise make_conflict_error(addon, f"the engine {engine.name!r}")
            added.append(engine)
    return MappingProxyType({engine.name: engine for engine in (*CORE_ENGINES, *added)})
