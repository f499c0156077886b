"""From overrides to what is settled before data is opened: the config, checked and derived, and the machine."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.check import Slot, check, load_plugins, run_imports
from phasetrain.config.compose import Composed, compose
from phasetrain.config.derive import derive
from phasetrain.config.schema import Schema, default_schema
from phasetrain.data import COLLATES, DATASETS, SAMPLERS, TRANSFORMS
from phasetrain.distributed import STRATEGIES, Placement, World
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.hooks import HOOKS
from phasetrain.losses import LOSSES
from phasetrain.machine import Machine, check_threads, resolve_device
from phasetrain.meters import METERS
from phasetrain.models import MODELS
from phasetrain.models.sources import sources_of
from phasetrain.optim import OPTIMIZERS, SCALERS, SCHEDULES
from phasetrain.plan import PhaseSettings
from phasetrain.tasks import TASKS
from phasetrain.terminal import Terminal

log = logging.getLogger(__name__)

SLOTS = (
    Slot("TASK", TASKS, provided=frozenset({"parts"})),
    Slot("MODEL", MODELS),
    Slot("LOSS", LOSSES, provided=frozenset({"input", "output", "target"})),
    Slot("METERS.*", METERS, label_is_name=True),
    Slot("OPTIMIZER", OPTIMIZERS, provided=frozenset({"params", "lr"})),
    Slot("OPTIMIZER.SCHEDULES.*", SCHEDULES),
    Slot("OPTIMIZER.scaler", SCALERS),
    Slot("DATA.*", DATASETS, key="dataset"),
    Slot("DATA.*.transforms[]", TRANSFORMS),
    Slot("DATA.*.sampler", SAMPLERS, provided=frozenset({"batch_size", "shard_lengths"})),
    Slot("DATA.*.collate", COLLATES),
    Slot("DISTRIBUTED", STRATEGIES, key="strategy", provided=frozenset({"world", "communication", "precision"})),
    Slot("HOOKS.*", HOOKS, label_is_name=True, provided=frozenset({"terminal"})),
)
"""Every place in the config where a name chooses a part."""


CONSENTS = ("data", "no_valid")
"""What RUN.allow may name beside keys: that data has changed, and that no checkpoint can be read."""


@dataclass(frozen=True)
class Setup:
    """What is settled before data is opened.

    Attributes:
        config: checked, derived and frozen.
        composed: where each value came from.
        schema: the keys.
        machine: where the run computes; the CPU where it is submitted to a cluster, and computes elsewhere.
        terminal: where it prints.
        world: its processes, once they are joined.
        place: of this process among them.
        config_dir: the user's folder of configs.
        dropped: lines about parameters that a change of name dropped.
        derived: lines about values that follow from others.
    """

    config: AttrDict
    composed: Composed
    schema: Schema
    machine: Machine
    terminal: Terminal
    world: World = field(default_factory=World)
    place: Placement = field(default_factory=Placement)
    config_dir: str | None = None
    dropped: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    @property
    def asked(self) -> dict[str, Any]:
        """The config as far as it was asked for: what was left open and follows from other values is null again."""
        return as_asked(self.config.plain(), self.composed.config)

    @property
    def phases(self) -> PhaseSettings:
        """Section PHASES as the plan takes it."""
        section = self.config.PHASES
        return PhaseSettings(
            epochs=section.epochs,
            updates=section.updates,
            samples=section.samples,
            test_every_epochs=section.test_every.epochs,
            test_every_updates=section.test_every.updates,
            test_first=section.test_first,
            limit_train=section.limit.train,
            limit_test=section.limit.test,
        )


def settle(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    terminal: Terminal | None = None,
    place: Placement | None = None,
) -> Setup:
    """Compose, check and derive the config.

    Args:
        overrides: as on the command line.
        config_dir: a folder with configs of the user's own.
        terminal: where to print.
        place: of this process among those of the run; by default it is the only one.

    Raises:
        ConfigError: everything that is wrong with it, at once; nothing has been built.
    """
    schema = default_schema()
    composed = compose(overrides, config_dir=config_dir, schema=schema)
    for warning in load_plugins():
        log.warning(warning)
    composed = with_imports(composed)
    check(composed, SLOTS, schema)
    place = place or Placement()
    launch, away = composed.config["LAUNCH"], submitted(composed.config)
    size = launch["nodes"] * launch["processes"] if away else place.size
    derived = derive(composed, schema, device=str(resolve_device("auto")), processes=size)
    config = derived.config
    check_consent(config.RUN.allow, schema)
    sources_of(config.MODEL.weights)
    check_threads(config.MACHINE.threads)
    machine = Machine(
        resolve_device("cpu" if away else config.MACHINE.device, place.local_rank if place.size > 1 else None),
        config.MACHINE.precision,
        config.MACHINE.threads,
        config.MACHINE.deterministic,
    )
    return Setup(
        config=config,
        composed=composed,
        schema=schema,
        machine=machine,
        terminal=terminal or Terminal(),
        place=place,
        config_dir=config_dir,
        dropped=composed.notes,
        derived=derived.lines,
    )


def submitted(config: Mapping[str, Any]) -> bool:
    """Tell whether the run is handed over to a cluster; what is only looked at is done here."""
    return config["LAUNCH"]["cluster"] in ("slurm", "local") and config["RUN"]["engine"] in ("train", "test")


def as_asked(derived: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a derived config with null again for what is null in `given`."""
    return {
        key: as_asked(value, given[key])
        if isinstance(value, dict) and isinstance(given.get(key), Mapping)
        else (None if given.get(key, value) is None else value)
        for key, value in derived.items()
    }


def check_consent(allow: Sequence[str], schema: Schema) -> None:
    """Refuse a word in RUN.allow that consents to nothing.

    Raises:
        ConfigError: it is neither a word such as `data` nor an adjustable key, nor what such keys stand below.
    """
    adjustable = [path for path, key in schema.keys.items() if key.resume == "adjustable"]
    for word in allow:
        known = any(p == word or p.startswith(f"{word}.") or word.startswith(f"{p}.") for p in adjustable)
        if word not in CONSENTS and not known:
            near = did_you_mean(word, [*CONSENTS, *adjustable])
            raise ConfigError(
                f"RUN.allow = [{word}]: no adjustable key has this name{near} Adjustable are: {', '.join(adjustable)}; "
                "and `data`, `no_valid`"
            )


def with_imports(composed: Composed) -> Composed:
    """Import what RUN.imports names, so that its parts are registered; what fails joins the problems."""
    run = composed.config.get("RUN")
    names = run.get("imports") if isinstance(run, dict) else None
    problems = run_imports(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else []
    return replace(composed, problems=(*composed.problems, *problems))
