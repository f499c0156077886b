"""Find all mistakes of a run before its first step, and the values of its config without effect."""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from phasetrain.app.build_hooks import build_hook
from phasetrain.app.setup import Setup
from phasetrain.config.addons import find_service
from phasetrain.config.compose.composed import COMMAND_LINE
from phasetrain.config.compose.merge import lookup, origin_of
from phasetrain.config.problems import collect_problems, combine_problems, format_value, raise_all
from phasetrain.config.registry import MISSING_PARAMETER
from phasetrain.data import CustomLoader
from phasetrain.data.loading.seed_check import check_seeded, read_first_targets
from phasetrain.data.loading.sources_reader import list_sample_readers
from phasetrain.distributed import World
from phasetrain.engine.plan import TRAIN, Plan
from phasetrain.errors import ConfigError, Problem
from phasetrain.hooks.checkpoint import has_rule
from phasetrain.hooks.monitors.monitor import AUTO, Monitor
from phasetrain.meters import Meter
from phasetrain.meters.base import is_metric_of
from phasetrain.optim.groups import list_weights
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Parts, SplitData, Task
from phasetrain.tasks.build.builder import build_loss, build_meter, build_model, load_weights
from phasetrain.tasks.build.data_builder import SHARED_FACTS, build_split
from phasetrain.tasks.build.optimizer_builder import build_updaters
from phasetrain.tasks.build.optimizer_factory import list_optimizer_specs
from phasetrain.tasks.build.weights_builder import freeze_parameters
from phasetrain.tasks.inspection import checkpoint_bytes

log = logging.getLogger(__name__)

_SPLIT_OF_DATASET = re.compile(r"(DATA\.\w+)(?= \(dataset )")

T = TypeVar("T")


@contextmanager
def report_all_problems(setup: Setup) -> Iterator[None]:
    """Add to a ConfigError, raised while parts are built, all other mistakes that can be found
    without the part that failed."""
    try:
        yield
    except ConfigError as error:
        reported = {problem.message for problem in error.problems}
        others = [problem for problem in find_problems(setup) if problem.message not in reported]
        explained = [_explain_origin(problem, setup) for problem in (*error.problems, *others)]
        if explained == list(error.problems):
            raise
        complete = combine_problems(_merge_splits(explained))
        # notes name the step of a rehearsal, and a new error starts without any
        complete.__notes__ = vars(error).get("__notes__", [])
        raise complete from error


def _explain_origin(problem: Problem, setup: Setup) -> Problem:
    """Return the mistake that a parameter has no value, with the layer that set it for another
    part; or that a meter does not fit, with the layer that has added the meter."""
    meter = re.match(r"METERS\.\w+", problem.key)
    if meter and problem.code == "config.misfit":
        layer = origin_of(setup.composed.origins, meter[0])
        message = f"{problem.message}; {meter[0]} ({layer}) is removed by {meter[0]}=null"
        return replace(problem, message=message)
    if problem.code == MISSING_PARAMETER:
        for note in setup.dropped:
            if note.startswith(f"{problem.key} = "):
                message = f"{problem.message}; it was set for another part: {note}"
                return replace(problem, message=message)
    return problem


def _merge_splits(problems: Sequence[Problem]) -> list[Problem]:
    """Return problems with one for all splits whose datasets report the same, as they do about
    files that they share."""
    kept: dict[str, Problem] = {}
    splits: dict[str, list[str]] = {}
    for problem in problems:
        match = _SPLIT_OF_DATASET.match(problem.message)
        if match is None or problem.code != "config.rejected_by_part":
            kept[problem.message] = problem
            continue
        said = problem.message[match.end() :]
        splits.setdefault(said, []).append(match[1])
        names = ", ".join(dict.fromkeys(splits[said]))
        kept[said] = replace(kept.get(said, problem), message=f"{names}{said}")
    return list(kept.values())


def find_problems(setup: Setup) -> list[Problem]:
    """Build the parts of a run one by one, without other ranks, and return the mistakes.

    Parts that need another part that cannot be built are skipped.
    """
    survey = _Survey(setup)
    survey.run()
    return list(dict.fromkeys(survey.found))


def check_monitors(
    setup: Setup, plan: Plan, meters: Mapping[str, Meter], failed: Collection[str] = ()
) -> None:
    """Reject monitored metrics that no phase measures.

    Args:
        setup: names the metrics.
        plan: its phases measure them.
        meters: meters by label.
        failed: labels of meters that could not be built; their metrics are not checked.

    Raises:
        ConfigError: lists all of these metrics.
    """
    measure = setup.config.PHASES.train_meters
    raise_all(
        collect_problems(
            *(
                partial(monitor.resolve_in, plan, meters, train_meters=measure)
                for monitor in list_monitors(setup)
                if not any(is_metric_of(label, monitor.objective.name) for label in failed)
            )
        )
    )


def list_monitors(setup: Setup) -> list[Monitor]:
    """Return the metrics that sections CHECKPOINT and HOOKS name to be monitored."""
    best = setup.config.CHECKPOINT.best.monitor
    names: dict[str, str] = {}
    if best is not None:
        names["CHECKPOINT.best.monitor"] = best
    for label, section in setup.config.HOOKS.items():
        if isinstance(section.get("monitor"), str):
            names[f"HOOKS.{label}.monitor"] = section.monitor
    return [Monitor(name, where) for where, name in names.items() if name != AUTO]


def check_data(data: Mapping[str, SplitData], task: Task) -> None:
    """Check that each split has the targets that the task needs, and that a sample is a function
    of its index.

    Samples of a split with `exact: false` need not be.

    Raises:
        ConfigError: names the split or the dataset.
    """
    ours = {name: split for name, split in data.items() if split.loader is None}
    for name, split in ours.items():
        targets = read_first_targets(split.reader)
        task.check_targets(name, targets)
        # A target without dimensions has no pixels, and most runs need not import the check.
        check_pixels = getattr(targets, "ndim", 1) and find_service("check_spatial_targets")
        if check_pixels:
            check_pixels(name, split)
        if not split.section.exact:
            continue
        for reader in dict.fromkeys(part.reader for part in (split, *split.stages)):
            for sample_reader in list_sample_readers(reader):
                check_seeded(sample_reader, split.section.dataset)


def list_inexact_splits(setup: Setup) -> list[str]:
    """Return a sentence for each split whose samples need not be functions of their index."""
    return [
        f"DATA.{key}.exact = false: its samples need not be a function of config and seed, so a "
        "resumed or repeated run may have other samples, metrics and weights"
        for key, section in setup.config.DATA.items()
        if section.dataset is not None and not section.exact
    ]


def check_orders(task: Task, plan: Plan) -> None:
    """Check that the sampler of each split returns valid indices, with the first epoch of each
    stage.

    Args:
        task: its loaders draw the indices.
        plan: of a fresh run.

    Raises:
        ConfigError: names the sampler.
    """
    seen = set[tuple[str, int]]()
    for phase, _ in plan.phases.kinds:
        loader = task.parts.loaders[phase.data]
        if (phase.data, phase.stage) not in seen and not isinstance(loader, CustomLoader):
            next(loader.sampler.steps(phase), None)
        seen.add((phase.data, phase.stage))


def _list_unused_launch(setup: Setup) -> list[str]:
    """Return a sentence for each key of LAUNCH that is set without a cluster to launch on."""
    launch = setup.composed.config["LAUNCH"]
    origin = setup.composed.origins.get("LAUNCH.cluster")
    # A job that LAUNCH has submitted is started with `LAUNCH.cluster=null`.
    if launch["cluster"] in ("slurm", "local") or origin == COMMAND_LINE:
        return []
    unused = []
    for name, value in launch.items():
        is_used = name in ("cluster", "processes")
        if not is_used and value != setup.schema.keys[f"LAUNCH.{name}"].default:
            setting = f"LAUNCH.{name} = {format_value(value)}"
            unused.append(f"{setting}: without LAUNCH.cluster it never takes effect")
    size = setup.place.size
    if launch["processes"] not in (1, size) and size > 1:
        unused.append(
            f"LAUNCH.processes = {launch['processes']}: the world size is {size}, as the launcher "
            "has started it"
        )
    return unused


def check_room(setup: Setup, folder: RunFolder, parts: Parts) -> None:
    """Check that the disk has room for checkpoints; without a rule to save, only warn.

    Raises:
        ConfigError: there is no room for two checkpoints.
    """
    each = checkpoint_bytes(parts)
    if is_saving(setup):
        folder.space.require(2 * each, each * (max(2, setup.config.CHECKPOINT.keep_last) + 1))
    else:
        folder.space.require(0, each)


def is_saving(setup: Setup) -> bool:
    """Return whether section CHECKPOINT has a rule by which the run saves."""
    return has_rule(setup.config.CHECKPOINT)


def list_unused(setup: Setup, plan: Plan) -> list[str]:
    """Return a sentence for each duration that is never reached, and for each split, stage and
    meter that is never used."""
    config = setup.config
    unused = list[str]()
    limit = config.PHASES.limit

    def beyond(path: str, reached: float, unit: str) -> None:
        every = lookup(config, path)
        # A default may have no effect: nobody has asked for it.
        is_asked_for = setup.composed.origins.get(path) not in setup.composed.assumed
        if every is not None and every > reached and is_asked_for:
            unused.append(
                f"{path} = {every}: the run ends after {reached} {unit}, so it never takes effect"
            )

    for path in ("RUN.checkpoint", "RUN.step"):
        value = lookup(config, path)
        if path in setup.schema.keys and value != setup.schema.keys[path].default:
            unused.append(f"{path} = {value}: training does not read it")
    kinds = plan.phases.kinds
    complete = sum(count for phase, count in kinds if phase.is_train and phase.ends_epoch)
    unused += _list_unused_launch(setup)
    if not plan.updates:
        return unused
    beyond("RUN.pause_at", plan.updates, "updates")
    beyond("CHECKPOINT.every_updates", plan.updates, "updates")
    beyond("CHECKPOINT.every_epochs", complete, "complete epochs")
    beyond("CHECKPOINT.keep_every.updates", plan.updates, "updates")
    beyond("CHECKPOINT.keep_every.epochs", complete, "complete epochs")
    has_tests = any(not phase.is_train for phase, _ in kinds)
    if has_tests and not setup.stages:
        beyond("PHASES.test_every.updates", plan.updates, "updates")
        beyond("PHASES.test_every.epochs", plan.epochs, "epochs")
    for name in config.DATA:
        beyond(f"DATA.{name}.every.updates", plan.updates, "updates")
        beyond(f"DATA.{name}.every.epochs", plan.epochs, "epochs")
    ends = plan.phases.column("first") + plan.phases.column("steps")
    if limit.train is not None and ends.max() < limit.train:
        longest = ends[plan.phases.is_train].max()
        unused.append(
            f"PHASES.limit.train = {limit.train}: no epoch has more than {longest} updates"
        )
    if not is_saving(setup):
        unused.append("CHECKPOINT: no rule saves a checkpoint, so nothing of this run will be kept")
    unused += _unreachable(setup, plan)
    return unused


def check_same_data(world: World, data: Mapping[str, SplitData]) -> None:
    """Reject data that differs between ranks, which would not even run the same number of steps."""
    for name in data:
        fingerprints = world.all_gather((data[name].length, data[name].fingerprint()))
        for rank, other in enumerate(fingerprints):
            if other != fingerprints[0]:
                raise ConfigError(
                    f"DATA.{name.upper()}: rank 0 has {fingerprints[0][0]} samples (fingerprint "
                    f"{fingerprints[0][1]}), rank {rank} has {other[0]} ({other[1]}); expected the "
                    "same on all ranks; copy the same files to all machines",
                    code="data.differs_between_ranks",
                )


def _unreachable(setup: Setup, plan: Plan) -> Iterator[str]:
    """Yield a sentence for each part of the config that no phase of the plan uses."""
    kinds = plan.phases.kinds
    run = {phase.data for phase, _ in kinds}
    for key in setup.config.DATA:
        if key != "TRAIN" and key.lower() not in run:
            yield f"DATA.{key}: no phase of the plan tests it"
    reached = {phase.stage for phase, _ in kinds if phase.is_train}
    for number, stage in enumerate(setup.config.PHASES.stages):
        if number not in reached:
            name = stage.get("name") or number + 1
            yield f"PHASES.stages[{number}] ({name}): it has no update, so it is never run"
    if run == {TRAIN} and not setup.config.PHASES.train_meters and setup.config.METERS:
        yield "METERS: PHASES.train_meters = false and there is no test, so nothing measures them"


def _may_be_given(problem: Problem, provided: Collection[str] | None) -> bool:
    """Return whether a parameter has no value that other parts may provide, see `_Survey._try`."""
    if problem.code != MISSING_PARAMETER:
        return False
    return provided is None or problem.key.rpartition(".")[2] in provided


class _Survey:
    """Tries to build everything that a config describes, and collects the mistakes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.found: list[Problem] = []
        # A World of one rank: the other ranks may not be here, and would never answer.
        self.builder = replace(setup, world=World()).builder()

    def run(self) -> None:
        """Collect the mistakes."""
        data = self._build_data()
        plan: Plan | None = None
        facts: dict[str, Any] = {}
        if data is not None:
            plan = self._try(partial(self.builder.plan, data))
            if plan is not None:
                facts = self._try(partial(self.builder.facts, data, plan)) or {}
        context = self.builder.context
        meters = self._build_meters(facts)
        if plan is not None:
            # The meter's own mistake is reported; what it would measure is unknown until then.
            failed = self.setup.config.METERS.keys() - meters.keys()
            self._try(partial(check_monitors, self.setup, plan, meters, failed))
        loss = self._try(lambda: build_loss(context, facts))
        model = self._try(lambda: build_model(context, facts))
        if model is not None:
            self._try(lambda: load_weights(context, model))
        if model is not None and loss is not None:
            self._try(lambda: freeze_parameters(context, model, loss))
            if trained := list_weights(model, loss):
                frozen = list_weights(model, loss, trained=False)
                section = self.setup.config.OPTIMIZER
                self._try(lambda: list_optimizer_specs(section, trained, frozen))
                self._try(lambda: build_updaters(context, model, loss, facts))
        self._build_hooks()
        if data is None or plan is None or self.found:
            return
        # last, mistakes that show only when the parts are put together
        self._try(lambda: self.builder.task(self.builder.parts(data, plan)))

    def _build_data(self) -> dict[str, SplitData] | None:
        """Return the data, or None if a split cannot be built."""
        # TRAIN first, because the other splits take over its classes.
        shared: dict[str, Any] = {}
        for key in ("TRAIN", *(key for key in self.setup.config.DATA if key != "TRAIN")):
            make = partial(
                build_split, self.builder.context, key.lower(), self.setup.config.DATA[key], shared
            )
            split = self._try(make, provided=SHARED_FACTS)
            if key == "TRAIN" and split is not None:
                shared = split.shared_facts
        if self.found:
            return None
        return self._try(self.builder.data)

    def _build_meters(self, facts: Mapping[str, Any]) -> dict[str, Meter]:
        meters: dict[str, Meter] = {}
        for label, section in self.setup.config.METERS.items():
            meter = self._try(partial(build_meter, label, section, facts))
            if meter is not None:
                meters[label] = meter
        return meters

    def _build_hooks(self) -> None:
        for label, section in self.setup.config.HOOKS.items():
            self._try(partial(build_hook, self.setup, label, section))

    def _try(self, make: Callable[[], T], provided: Collection[str] | None = None) -> T | None:
        """Return the result of `make`; None if it fails.

        Args:
            make: builds a part.
            provided: parameters that other parts may provide; None: any.
        """
        try:
            return make()
        except ConfigError as error:
            # Parts are built without the facts that a failed part would have provided: a parameter
            # that is missing here need not be missing in the run.
            self.found += [
                problem for problem in error.problems if not _may_be_given(problem, provided)
            ]
        except Exception as error:  # noqa: BLE001 - raised again when the part is built for the run
            log.debug("while mistakes were collected: %s: %s", type(error).__name__, error)
        return None
