"""From overrides to what is settled before data is opened: the config, checked and derived, and the
machine."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from phasetrain.config.attrdict import ConfigDict
from phasetrain.config.compose.composed import Composed, compose
from phasetrain.config.plugins import load_plugins, run_imports
from phasetrain.config.problems import collect_problems, raise_all
from phasetrain.config.rules.derive import Derived, derive
from phasetrain.config.schema import STEERING, Schema, default_schema, is_split
from phasetrain.config.stages import staged
from phasetrain.config.validation import Slot, check
from phasetrain.data import COLLATES, DATASETS, LOADERS, SAMPLERS, TRANSFORMS
from phasetrain.data.batch_transforms import BATCH_TRANSFORMS
from phasetrain.distributed import STRATEGIES, Placement, World
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.hooks import HOOKS
from phasetrain.hooks.monitor import first_metric
from phasetrain.losses import LOSSES
from phasetrain.meters import METERS, Meter
from phasetrain.models import HEADS, MODELS
from phasetrain.models.sources import sources_of
from phasetrain.optim import OPTIMIZERS, SCALERS, SCHEDULES
from phasetrain.runtime.machine import Machine, check_threads, resolve_device
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import TASKS, Builder

log = logging.getLogger(__name__)

ORDER_FACTS = frozenset({"batch_size", "shard_lengths", "source", "data_source", "dataset"})
"""What the program passes to samplers."""

LOSS_FACTS = frozenset({"input", "output", "target", "world", "make_loss"})
"""Parameters of losses that no config sets."""

LOADER_FACTS = frozenset({"dataset", "batch_size", "rank", "processes", "seed"})
"""What the program passes to a user's own loader."""

SLOTS = (
    Slot("TASK", TASKS, provided=frozenset({"parts", "make_model"})),
    Slot("TASK.teacher", MODELS, only=("TASK.name", "distillation")),
    Slot("MODEL", MODELS, provided=frozenset({"make_model"})),
    Slot("MODEL.trunk", MODELS, only=("MODEL.name", "trunk_heads")),
    Slot("MODEL.heads.*", MODELS, only=("MODEL.name", "trunk_heads")),
    Slot("MODEL.trunk", MODELS, only=("MODEL.name", "trunk_head")),
    Slot("MODEL.head", HEADS, provided=frozenset({"features"}), only=("MODEL.name", "trunk_head")),
    Slot(
        "MODEL.predictor",
        HEADS,
        provided=frozenset({"features"}),
        only=("MODEL.name", "trunk_head"),
    ),
    Slot("LOSS", LOSSES, provided=LOSS_FACTS),
    Slot(
        "LOSS.losses.*",
        LOSSES,
        label_is_name=True,
        provided=LOSS_FACTS,
        only=("LOSS.name", "weighted_sum"),
    ),
    Slot("METERS.*", METERS, label_is_name=True),
    Slot("OPTIMIZER", OPTIMIZERS, provided=frozenset({"params", "lr"})),
    Slot("OPTIMIZER.SCHEDULES.*", SCHEDULES, provided=frozenset({"base_value"})),
    Slot("OPTIMIZER.others.*", OPTIMIZERS, provided=frozenset({"params"})),
    Slot("OPTIMIZER.others.*.SCHEDULES.*", SCHEDULES, provided=frozenset({"base_value"})),
    Slot("OPTIMIZER.scaler", SCALERS),
    Slot("DATA.*", DATASETS, key="dataset"),
    Slot("DATA.*.transforms[]", TRANSFORMS),
    Slot("DATA.TRAIN.batch_transforms[]", BATCH_TRANSFORMS),
    Slot("DATA.*.sampler", SAMPLERS, provided=ORDER_FACTS),
    Slot("DATA.*.collate", COLLATES),
    Slot("DATA.*.loader", LOADERS, provided=LOADER_FACTS),
    Slot(
        "DISTRIBUTED",
        STRATEGIES,
        key="strategy",
        provided=frozenset({"world", "communication", "precision"}),
    ),
    Slot(
        "HOOKS.*",
        HOOKS,
        label_is_name=True,
        provided=frozenset({"terminal", "hparams"}),
    ),
)
"""Every place in the config where a name chooses a part."""


CONSENTS = ("data", "no_valid")
"""What RUN.allow may name beside keys: that data has changed, and that no checkpoint can be
read."""


@dataclass(frozen=True)
class Setup:
    """What is settled before data is opened.

    Attributes:
        config: checked, derived and frozen.
        composed: where each value came from.
        schema: the keys.
        machine: where the run computes; the CPU where it is submitted to a cluster, and computes
            elsewhere.
        terminal: where it prints.
        world: its processes, once they are joined.
        place: of this process among them.
        config_dir: the user's folder of configs.
        dropped: lines about parameters that a change of name dropped.
        derived: lines about values that follow from others.
        stages: the config as it is in each stage of PHASES.stages; empty where there are none.
    """

    config: ConfigDict
    composed: Composed
    schema: Schema
    machine: Machine
    terminal: Terminal
    world: World = field(default_factory=World)
    place: Placement = field(default_factory=Placement)
    config_dir: str | None = None
    dropped: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    stages: tuple[ConfigDict, ...] = ()

    def builder(self) -> Builder:
        """Return what makes the parts of this run."""
        return Builder(self.config, self.machine, self.world, self.stages)

    @property
    def asked(self) -> dict[str, Any]:
        """The config as far as it was asked for: what was left open and follows from other values
        is null again."""
        found = as_asked(self.config.plain(), self.composed.config)
        # Whoever takes weights from a checkpoint has to know by what they are the best.
        found["CHECKPOINT"]["best"]["monitor"] = self.config.CHECKPOINT.best.monitor
        return found


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
    place = place or Placement()
    checked(composed, schema, place)
    away = submitted(composed.config)
    size = size_of(composed.config, place)
    derived = derived_of(composed, schema, place)
    stages = staged(composed, derived.config.plain(), schema)
    config = derived.config
    raise_all(
        collect_problems(
            *(partial(check, stage, SLOTS, schema) for stage in stages),
            lambda: check_consent(config.RUN.allow, schema),
            lambda: sources_of(config.MODEL.weights),
            lambda: check_threads(config.MACHINE.threads),
        )
    )
    machine = Machine(
        resolve_device(
            "cpu" if away else config.MACHINE.device, place.local_rank if place.size > 1 else None
        ),
        config.MACHINE.precision,
        config.MACHINE.threads,
        config.MACHINE.deterministic,
        config.MACHINE.test_precision,
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
        stages=tuple(
            derive(stage, schema, device=derived.config.MACHINE.device, processes=size).config
            for stage in stages
        ),
    )


def checked(composed: Composed, schema: Schema, place: Placement) -> None:
    """Refuse a config with mistakes; where keys or values are wrong, what can be told of the others
    is told as well.

    Raises:
        ConfigError: see `check` and `derive`.
    """
    problems = collect_problems(lambda: check(composed, SLOTS, schema))
    if problems:
        try:
            problems += collect_problems(lambda: derived_of(composed, schema, place))
        except Exception as error:  # noqa: BLE001 - rules that rest on wrong values may fail in any way
            log.debug(
                "what follows from wrong values is not looked at: %s: %s",
                type(error).__name__,
                error,
            )
    raise_all(problems)


def derived_of(composed: Composed, schema: Schema, place: Placement) -> Derived:
    """Return the config with all that follows from others, see `derive`."""
    first = partial(first_monitor, composed.config)
    size = size_of(composed.config, place)
    return derive(
        composed, schema, device=str(resolve_device("auto")), processes=size, monitor=first
    )


def size_of(config: Mapping[str, Any], place: Placement) -> int:
    """Return the number of processes of the run: those that it was started with, or those of its
    job."""
    launch = config["LAUNCH"]
    size: int = launch["nodes"] * launch["processes"] if submitted(config) else place.size
    return size


def first_monitor(config: Mapping[str, Any]) -> str:
    """Return the first metric of the first test split, with a minus sign where smaller is better.

    Raises:
        ConfigError: there is none, or its meter does not say which of its values are better.
    """
    split = next(
        (name.lower() for name in config["DATA"] if is_split(name) and name != "TRAIN"), ""
    )
    label = next(iter(config["METERS"]), "")
    if label:
        kind = METERS.find(config["METERS"][label].get("name", label), f"METERS.{label}.name")
    else:
        kind = None
    known = (
        kind if isinstance(kind, type) and issubclass(kind, Meter) else Meter
    )  # one of a library says nothing
    return first_metric(split, {label: known} if label else {})


def submitted(config: Mapping[str, Any]) -> bool:
    """Tell whether the run is handed over to a cluster; what is only looked at is done here."""
    return config["LAUNCH"]["cluster"] in ("slurm", "local") and config["RUN"]["engine"] in (
        "train",
        "test",
        "extract",
    )


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
        ConfigError: it is neither a word such as `data` nor an adjustable key, nor what such keys
            stand below.
    """
    adjustable = [
        *(path for path, key in schema.keys.items() if key.resume == "adjustable"),
        *STEERING,
    ]
    for word in allow:
        known = any(
            p == word or p.startswith(f"{word}.") or word.startswith(f"{p}.") for p in adjustable
        )
        if word not in CONSENTS and not known:
            near = did_you_mean(word, [*CONSENTS, *adjustable])
            raise ConfigError(
                f"RUN.allow = [{word}]: no adjustable key has this name{near} Adjustable are: {', '.join(adjustable)}; "
                "and `data`, `no_valid`"
            )


def with_imports(composed: Composed) -> Composed:
    """Import what RUN.imports names, so that its parts are registered; what fails joins the
    problems."""
    run = composed.config.get("RUN")
    names = run.get("imports") if isinstance(run, dict) else None
    if isinstance(names, list) and all(isinstance(n, str) for n in names):
        problems = run_imports(names)
    else:
        problems = []
    return replace(composed, problems=(*composed.problems, *problems))
