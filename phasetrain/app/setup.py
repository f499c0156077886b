"""Resolve the config of a run: compose, validate and derive it, before data is opened.

What needs torch is imported when the config has been validated, so that a mistake in it is reported
at once.
"""

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasetrain.app.slots import list_slots
from phasetrain.config.addons import list_failures, list_parts
from phasetrain.config.attrdict import ConfigDict
from phasetrain.config.changes import ABSENT, compare_configs
from phasetrain.config.compose.composed import Composed, compose
from phasetrain.config.compose.folders import find_config_dir, list_file_folders
from phasetrain.config.compose.merge import lookup
from phasetrain.config.compose.override_text import format_literal
from phasetrain.config.compose.sources import Layer
from phasetrain.config.engines import list_engines
from phasetrain.config.objects import GivenObjects, current_objects
from phasetrain.config.plugins import load_plugins, run_imports
from phasetrain.config.problems import collect_problems, raise_all
from phasetrain.config.rules.batch import derive_batch_size, scale_learning_rate
from phasetrain.config.rules.derive import apply_rules, derive
from phasetrain.config.rules.draft import ConfigDraft
from phasetrain.config.rules.machine import derive_compile, derive_precision
from phasetrain.config.schema import Schema, default_schema, is_split
from phasetrain.config.stages import compose_stages
from phasetrain.config.trust import trust_only
from phasetrain.config.validation import check_config
from phasetrain.distributed.placement import Placement
from phasetrain.errors import ConfigError, Problem, did_you_mean
from phasetrain.runs.direction import choose_split
from phasetrain.runtime.child_processes import HEARTBEATS
from phasetrain.runtime.format import join_first
from phasetrain.runtime.redaction import REDACTED, Redaction
from phasetrain.runtime.terminal import Terminal

if TYPE_CHECKING:
    from phasetrain.app.stored.stored_config import StoredConfig
    from phasetrain.distributed import World
    from phasetrain.runtime.machine import Machine
    from phasetrain.tasks import Builder

log = logging.getLogger(__name__)

DROPPED = 6
"""Maximum number of dropped parameters that are listed."""

CONSENTS = ("data", "no_valid")
"""Entries of RUN.allow that are not keys: changed data, and unreadable checkpoints."""

_UNREAD = ("config.invalid_file", "config.missing_file", "config.unknown_file")
"""Codes of problems with files whose values are missing."""


@dataclass(frozen=True)
class Setup:
    """The resolved config of a run and its surroundings, before data is opened.

    Attributes:
        config: validated, derived and frozen.
        composed: the config before derivation, with the origin of each value.
        schema: the keys.
        machine: device and numerics; the CPU if the run is submitted as a job, which resolves the
            config again.
        terminal: output.
        world: process group, once it is joined.
        place: rank of this process.
        config_dir: the user's folder of configs.
        dropped: lines about parameters that were dropped because another part was named.
        derived: lines about derived values.
        stages: config of each stage in PHASES.stages; empty if there are none.
        stored: the folder whose config this is, with changes; None if it was composed from files.
        trusted_paths: dotted paths that parts may have outside of known libraries; None for any.
        given: objects of Python that the config names.
    """

    config: ConfigDict
    composed: Composed
    schema: Schema
    machine: "Machine"
    terminal: Terminal
    world: "World"
    place: Placement = field(default_factory=Placement)
    config_dir: str | None = None
    dropped: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    stages: tuple[ConfigDict, ...] = ()
    stored: "StoredConfig | None" = None
    trusted_paths: frozenset[str] | None = None
    given: GivenObjects = field(default_factory=GivenObjects)

    def builder(self) -> "Builder":
        """Return the builder of the parts of this run."""
        from phasetrain.tasks import Builder

        return Builder(self.config, self.machine, self.world, self.stages)

    @property
    def asked(self) -> dict[str, Any]:
        """The config as the user gave it: values that were derived from null are null again."""
        config = without_derived(self.config.plain(), self.composed.config)
        # Later commands that load the best checkpoint need the metric that it was chosen by.
        config["CHECKPOINT"]["best"]["monitor"] = self.config.CHECKPOINT.best.monitor
        # Another class of targets that do not count would be another loss.
        config["LOSS"] = self.config.plain()["LOSS"]
        return config


def resolve_config(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    terminal: Terminal | None = None,
    place: Placement | None = None,
    stored: "StoredConfig | None" = None,
) -> Setup:
    """Compose, validate and derive the config.

    Args:
        overrides: overrides as on the command line.
        config_dir: a folder with the user's configs; by default see `find_config_dir`.
        terminal: output.
        place: rank of this process; by default it is the only one.
        stored: the config of a run folder, which the overrides change.

    Raises:
        ConfigError: lists all mistakes, or the custom code that a stored config names and that is
            not trusted; nothing has been built.
    """
    schema = default_schema()
    if stored is None:
        config_dir = find_config_dir(config_dir, overrides)
        composed = compose(overrides, config_dir=config_dir, schema=schema)
        trusted = None
    else:
        composed, trusted = _compose_stored(stored, overrides, config_dir)
        config_dir = config_dir or stored.config_dir
        stored = replace(stored, changes=tuple(overrides))
    with trust_only(trusted):
        setup = _resolve_composed(composed, schema, place or Placement(), stored)
    return replace(
        setup, terminal=terminal or Terminal(), config_dir=config_dir, trusted_paths=trusted
    )


def _resolve_composed(
    composed: Composed, schema: Schema, place: Placement, stored: "StoredConfig | None"
) -> Setup:
    # Plugins register their parts, which the config may name: before anything is validated.
    for warning in (*list_failures(), *load_plugins()):
        log.warning(warning)
    for warning in composed.deprecated:
        log.warning(warning)
    # Before the validation, because the imports register the parts that the config names.
    composed = import_modules(composed, stored)
    if stored is not None:
        from phasetrain.app.stored.leftovers import ignore_leftovers

        composed = ignore_leftovers(composed, stored, schema)
    validate(composed, schema, place)
    return _derive_setup(composed, schema, place, stored)


def _derive_setup(
    composed: Composed, schema: Schema, place: Placement, stored: "StoredConfig | None"
) -> Setup:
    """Return the setup of a validated config."""
    from phasetrain.app.stored.stored_config import WITHOUT_CHECKPOINT
    from phasetrain.distributed import World
    from phasetrain.hooks.observers import classify_hooks
    from phasetrain.models.sources import parse_sources
    from phasetrain.runtime.machine import check_threads

    # After the validation, which has imported the modules of hooks that are named by a path.
    schema = classify_hooks(schema, composed.config)
    world_size = world_size_of(composed.config, place)
    derived = derive(
        composed,
        schema,
        device=_find_device,
        processes=world_size,
        monitor=partial(find_first_metric, composed.config),
    )
    config = derived.config
    overrides: Sequence[Mapping[str, Any]] = ()
    if stored is not None and config.RUN.engine not in WITHOUT_CHECKPOINT:
        # Tests and predictions have a single stage: what the user sets now is meant for it.
        overrides = composed.changes
    stages = compose_stages(composed, config.plain(), schema, overrides)
    raise_all(
        collect_problems(
            *(partial(check_config, stage, list_slots(), schema) for stage in stages),
            lambda: check_allow(config, schema),
            lambda: parse_sources(config.MODEL.weights),
            lambda: check_threads(config.MACHINE.threads),
        )
    )
    device = config.MACHINE.device
    return Setup(
        config=config,
        composed=composed,
        schema=schema,
        machine=_resolve_machine(config, place),
        terminal=Terminal(),
        world=World(),
        place=place,
        dropped=composed.notes,
        derived=derived.lines,
        given=current_objects(),
        stages=tuple(
            derive(stage, schema, device=lambda: device, processes=world_size).config
            for stage in stages
        ),
        stored=stored,
    )


def _compose_stored(
    stored: "StoredConfig", overrides: Sequence[str], config_dir: str | None
) -> tuple[Composed, frozenset[str] | None]:
    """Return the config of a folder with changes, and the dotted paths that its parts may have;
    None for any.

    Raises:
        ConfigError: it names code that is not trusted.
    """
    from phasetrain.app.stored.leftovers import remove_unknown_keys
    from phasetrain.app.stored.trust import check_code, describe_code

    composed = compose(
        overrides,
        config_dir=config_dir or stored.find_config_dir(),
        base=Layer(stored.path, remove_unknown_keys(stored.values, default_schema())),
    )
    trusted = None
    if stored.is_trusted:
        code = describe_code(stored, composed.config)
        if code:
            log.warning("%s is trusted and runs this code:\n%s", stored.path, "\n".join(code))
    else:
        # The folder of configs on record may come with the folder: its files are no word of the
        # user's, unlike the command line, which is the last layer.
        changes = composed.changes if config_dir else composed.changes[-1:]
        trusted = check_code(stored, composed, changes)
    words = stored.record_overrides(overrides)
    if lookup(composed.config, "RUN.engine") == "train":
        words = (*words, *_keep_values(words, composed, config_dir or stored.find_config_dir()))
    return replace(composed, overrides=words), trusted


def _keep_values(words: Sequence[str], composed: Composed, config_dir: str | None) -> Iterator[str]:
    """Yield overrides for the keys to which a recorded command would give another value, such as by
    an interpolation of a changed key."""
    recorded = compose(words, config_dir=config_dir)
    if recorded.problems:  # the files are elsewhere
        return
    derived = _derive_as_stored(recorded, composed.config)
    clean = Redaction({})  # the recorded command has no secrets, and no message may have one
    before, now = map(clean.redact_config, (derived, composed.config))
    for change in compare_configs(before, now, default_schema()):
        if change.resume != "free" and ABSENT not in (change.old, change.new):
            word = f"{change.path}={format_literal(change.new, change.path)}"
            if REDACTED in word:
                continue
            log.warning("%s, as before; the files of the run have another value now", word)
            yield word


def _derive_as_stored(recorded: Composed, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command, with those that rules derive from other values than null,
    which a run stores as derived.

    Args:
        recorded: config of the command.
        stored: config of the run.
    """
    draft = ConfigDraft(recorded, _find_device)
    try:
        for rule in (derive_batch_size, derive_precision, derive_compile, scale_learning_rate):
            rule(draft)
    except Exception as error:  # noqa: BLE001 - a wrong value in changed files can raise anything
        log.debug("rules not applied: %s: %s", type(error).__name__, error)
    if draft.get("OPTIMIZER.lr") != lookup(stored, "OPTIMIZER.lr"):
        # Recorded without the scaling, or the command would scale it twice.
        draft.config["OPTIMIZER"] = recorded.config["OPTIMIZER"]
    return draft.config


def validate(composed: Composed, schema: Schema, place: Placement) -> None:
    """Reject a config with mistakes in keys or values, or that violates a rule.

    Raises:
        ConfigError: see `check_config` and `derive`.
    """
    problems = collect_problems(lambda: check_config(composed, list_slots(), schema))
    # Values are missing because their file could not be read: no mistake of its own.
    if any(problem.code in _UNREAD for problem in composed.problems):
        raise_all(problem for problem in problems if problem.code != "config.missing_dataset")
    if problems:
        # The rules expect valid values. They are tried nevertheless, so that their problems are in
        # the same report.
        try:
            broken = collect_problems(
                lambda: apply_rules(
                    composed,
                    schema,
                    device=_find_device,
                    processes=world_size_of(composed.config, place),
                    monitor=lambda: _guess_first_metric(composed.config),
                )
            )
            keys = {problem.key for problem in problems if problem.key}
            problems += [problem for problem in broken if not _follows(problem, keys)]
        except Exception as error:  # noqa: BLE001 - a wrong value can make a rule fail in any way
            log.debug("rules not applied: %s: %s", type(error).__name__, error)
    raise_all(problems)


def _follows(problem: Problem, mistakes: Collection[str]) -> bool:
    """Return whether a rule is violated because of mistakes: it is about one of their keys, or a
    section in which a value is missing now."""
    return any(
        mistake in problem.message or mistake.startswith(f"{problem.key}.") for mistake in mistakes
    )


def world_size_of(config: Mapping[str, Any], place: Placement) -> int:
    """Return the world size of the run, or of its job if it is submitted."""
    launch = config["LAUNCH"]
    if is_started_here(config) and place.size == 1:
        return int(launch["processes"])
    if not is_submitted(config):
        return place.size
    size: int = launch["nodes"] * launch["processes"]
    return size


def describe_dropped(setup: Setup) -> str:
    """Return a line about parameters that were dropped because a layer named another part, without
    those that a higher layer has set again; empty if there are none."""
    paths = [note.partition(" = ")[0] for note in setup.dropped]
    gone = [path for path in paths if lookup(setup.config, path) is None]
    if not gone:
        return ""
    return f"dropped with the part they belong to: {join_first(gone, DROPPED)} (see log.txt)"


def find_first_metric(config: Mapping[str, Any]) -> str:
    """Return the first metric of the validation split, else of the first test split, with a minus
    sign if lower is better.

    Raises:
        ConfigError: there is none, or its meter does not say which values are better.
    """
    from phasetrain.hooks.monitors.monitor import first_metric
    from phasetrain.meters import METERS, Meter

    split, label = _find_first_meter(config)
    if not label:
        return first_metric(split, {})
    factory = METERS.find(config["METERS"][label].get("name", label), f"METERS.{label}.name")
    # A metric of a library does not declare its direction, like the base class.
    meter_class = factory if isinstance(factory, type) and issubclass(factory, Meter) else Meter
    return first_metric(split, {label: meter_class})


def _find_first_meter(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the validation split, else the first test split, and the label of its first meter;
    each empty if there is none."""
    tests = [name for name in config["DATA"] if is_split(name) and name != "TRAIN"]
    # As in the plan: splits that are only tested at the end come last.
    tests.sort(key=lambda name: config["DATA"][name].get("every") == "end")
    name = choose_split(tests)
    measuring = [
        label
        for label, section in config["METERS"].items()
        if section.get("splits") is None or name in section["splits"]
    ]
    return name.lower(), next(iter(measuring), "")


def _guess_first_metric(config: Mapping[str, Any]) -> str:
    """Do the same as `find_first_metric` for a config with other mistakes, without importing a
    declared meter for the sign of its metric."""
    split, label = _find_first_meter(config)
    if split and label and config["METERS"][label].get("name", label) in list_parts("meter"):
        return f"{split}/{label}"
    return find_first_metric(config)


def is_submitted(config: Mapping[str, Any]) -> bool:
    """Return whether the run is submitted as a job."""
    cluster = config["LAUNCH"]["cluster"]
    return cluster in ("slurm", "local") and list_engines()[config["RUN"]["engine"]].runs_as_job


def is_started_here(config: Mapping[str, Any]) -> bool:
    """Return whether the command starts the ranks of the run, on this machine."""
    launch = config["LAUNCH"]
    # A supervised process does the work itself.
    is_supervisor = bool(launch["supervise"]) and HEARTBEATS not in os.environ
    is_local = launch["cluster"] is None and (launch["processes"] > 1 or is_supervisor)
    return is_local and list_engines()[config["RUN"]["engine"]].runs_as_job


def without_derived(derived: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a derived config in which values are null again if they are null in `given`."""
    kept: dict[str, Any] = {}
    for key, value in derived.items():
        if isinstance(value, dict) and isinstance(given.get(key), Mapping):
            kept[key] = without_derived(value, given[key])
        elif given.get(key, value) is None:
            kept[key] = None
        else:
            kept[key] = value
    return kept


def check_allow(config: ConfigDict, schema: Schema) -> None:
    """Reject an entry of RUN.allow without effect.

    Raises:
        ConfigError: the entry is not in CONSENTS, nor an adjustable key, nor the path above or
            below one.
    """
    adjustable = [path for path, key in schema.keys.items() if key.resume == "adjustable"]
    for word in config.RUN.allow:
        # All test splits have the keys of DATA.TEST.
        of_split = schema.key(word)
        is_adjustable = (of_split is not None and of_split.resume == "adjustable") or any(
            path == word or path.startswith(f"{word}.") or word.startswith(f"{path}.")
            for path in adjustable
        )
        # A hook that has been removed from the config may be named as well.
        if word in CONSENTS or is_adjustable or word.partition(".")[0] == "HOOKS":
            continue
        if _is_forbidden(word, config, schema):
            raise ConfigError(
                f"RUN.allow = [{word}]: this key must not change on a resume; start a new run "
                "with RUN.dir=...",
                code="config.unknown_consent",
            )
        same = [path for path in adjustable if path.rpartition(".")[2] == word]
        near = did_you_mean(word, [*CONSENTS, *adjustable, "HOOKS"]) or "."
        if same:  # the key without its section
            near = f"; did you mean {same[0]!r}?"
        raise ConfigError(
            f"RUN.allow = [{word}]: no adjustable key has this name{near} Adjustable keys: "
            f"{', '.join(adjustable)}, HOOKS; also allowed: {', '.join(CONSENTS)}",
            code="config.unknown_consent",
        )


def _is_forbidden(word: str, config: Mapping[str, Any], schema: Schema) -> bool:
    """Return whether a word is a key, or a parameter of a part of the config, that must not change
    on a resume."""
    key = schema.key(word)
    if key is not None:
        return key.resume == "forbidden"
    return lookup(config, word) is not None and schema.resume(word) == "forbidden"


def _find_device() -> str:
    from phasetrain.runtime.machine import resolve_device

    return str(resolve_device("auto"))


def _resolve_machine(config: ConfigDict, place: Placement) -> "Machine":
    from phasetrain.runtime.machine import Machine, limit_cpu_capability, resolve_device

    # Before anything is computed.
    limit_cpu_capability(config.MACHINE.cpu_capability)
    device = config.MACHINE.device
    if is_submitted(config) or (is_started_here(config) and place.size == 1):
        device = "cpu"  # the machine that submits may have no GPU, and does not train
    local_rank = None
    if place.size > 1:
        local_rank = place.local_rank
    return Machine(
        resolve_device(device, local_rank),
        config.MACHINE.precision,
        config.MACHINE.threads,
        config.MACHINE.deterministic,
        config.MACHINE.test_precision,
        config.MACHINE.cpu_capability,
    )


def import_modules(composed: Composed, stored: "StoredConfig | None") -> Composed:
    """Import the modules of RUN.imports; imports that fail join the problems.

    Args:
        composed: the config as given.
        stored: the run folder that it comes from, whose modules are found too.
    """
    run = composed.config.get("RUN")
    names: Any = None
    if isinstance(run, dict):
        names = run.get("imports")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return composed  # a wrong type is reported by the validation
    folders = list_file_folders(composed.overrides)
    if stored is not None:
        folders = [*stored.code_folders, *folders]
    # The current folder is searched anyway, also if no module is named: dotted paths need it.
    folders = [folder for folder in dict.fromkeys(folders) if folder != str(Path.cwd())]
    if folders:
        from phasetrain.app.stored.trust import select_code_folders

        folders = select_code_folders(composed.config, folders)
    return replace(composed, problems=(*composed.problems, *run_imports(names, folders)))
