"""A run before it starts, as it is compared with another one: its plan, and the values of its
schedules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from fvcore.common.param_scheduler import ParamScheduler
from numpy.typing import NDArray

from phasetrain.addons.experiments.fork.sample_updates import PassFinder
from phasetrain.app.setup import Setup
from phasetrain.app.slots import list_slots
from phasetrain.config.registry import parameters
from phasetrain.config.validation import find_part_names
from phasetrain.engine.plan import AVERAGED, TRAIN, Plan
from phasetrain.engine.position import Position, RunState
from phasetrain.optim import SCHEDULES
from phasetrain.optim.schedules.param_schedules import HeldSchedule
from phasetrain.tasks import Builder, SplitData
from phasetrain.tasks.build.builder import collect_stage_facts
from phasetrain.tasks.build.data_builder import build_loader
from phasetrain.tasks.build.optimizer_builder import build_schedules, build_stage_options

PLAN_FACTS = (
    *("epochs", "updates", "updates_per_epoch"),
    *("train_batches", "test_batches", "test_samples"),
)
"""Facts about the plan and the tests that parts may ask for by name."""

LONGEST_SHARED = 200_000
"""Updates of which schedules are compared one by one: two runs share at most these."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class ComparedRun:
    """A run that is compared with others.

    Attributes:
        setup: its config.
        builder: builds its parts.
        data: split -> data.
    """

    setup: Setup
    builder: Builder
    data: Mapping[str, SplitData]

    @classmethod
    def open(cls, setup: Setup, earlier: Sequence["ComparedRun"] = ()) -> "ComparedRun":
        """Open the data of a run, or take the data of an earlier one with the same; no sample is
        read."""
        builder = setup.builder()
        same = [run.data for run in earlier if run.data_config == _select_data(setup)]
        return cls(setup, builder, same[0] if same else builder.data())

    @cached_property
    def data_config(self) -> dict[str, Any]:
        """The part of the config that decides about the data."""
        return _select_data(self.setup)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config with derived values."""
        config: dict[str, Any] = self.setup.config.plain()
        return config

    @cached_property
    def plan(self) -> Plan:
        """All phases from the beginning."""
        return self.builder.plan(self.data)

    @cached_property
    def build_values(self) -> Mapping[str, Any]:
        """Values that parts may ask for by name."""
        return self.builder.facts(self.data, self.plan)

    @cached_property
    def used_build_values(self) -> frozenset[str]:
        """The PLAN_FACTS that parts other than schedules may ask for."""
        names = find_part_names(self.setup.composed, list_slots(), self.setup.schema)
        return frozenset(
            fact
            for slot in list_slots()
            if ".SCHEDULES." not in slot.path
            for name in names[slot.path]
            for fact in parameters(slot.registry.find(name, slot.path))
            if fact in PLAN_FACTS
        )

    @cached_property
    def has_own_schedules(self) -> bool:
        """Whether phasetrain defines all schedules."""
        sections = [self.config, *self.config["PHASES"]["stages"]]
        return all(
            name in SCHEDULES and SCHEDULES[name].__module__.startswith("phasetrain.")
            for optimizer in sections
            for _, section in _list_scheduled(optimizer.get("OPTIMIZER", {}))
            for item in (section.get("SCHEDULES") or {}).values()
            for name in _list_names(item)
        )

    @cached_property
    def schedules(self) -> dict[str, Values]:
        """Option, as a path of the config -> its factor at each update, `(updates,)`; at most
        LONGEST_SHARED of them."""
        context = self.builder.context
        build_values = {**self.build_values, "updates": self.plan.cycle_updates}
        whole: dict[str, ParamScheduler] = {}
        for key_path, section in _list_scheduled(context.config.OPTIMIZER):
            made = build_schedules(
                context, section.get("SCHEDULES") or {}, key_path, build_values, section
            )
            whole |= {
                f"{key_path}.SCHEDULES.{option}": schedule for option, schedule in made.items()
            }
        stage_values = collect_stage_facts(context, self.plan)
        stages = [
            build_stage_options(
                context, config, {**build_values, **stage_values[number]}, number
            ).schedules
            for number, config in enumerate(context.stages)
        ]
        options = dict.fromkeys(whole)
        for stage in stages:
            options |= dict.fromkeys(f"OPTIMIZER.SCHEDULES.{option}" for option in stage)
        length = min(self.plan.updates, LONGEST_SHARED)
        factors = {path: np.ones(length) for path in options}
        for update, at in enumerate(self._list_positions(length)):
            for path, values in factors.items():
                own = stages[at.stage].get(path.rpartition(".")[2]) if stages else None
                schedule = own or whole.get(path)
                if schedule is None:
                    continue
                # A schedule of a stage runs over its stage, and one of the run over the whole run.
                progress = (at.where, at.within)
                # It keeps the value of the beginning of the epoch.
                if isinstance(schedule, HeldSchedule) and at.epoch_start is not None:
                    progress = at.epoch_start
                values[update] = schedule(progress[own is not None])
        return factors

    def _list_positions(self, length: int) -> list[Position]:
        """Return the positions of the first updates."""
        positions: list[Position] = []
        phases = self.plan.phases
        for index in np.flatnonzero(phases.is_train).tolist():
            steps = min(phases[index].steps, length - len(positions))
            before = len(positions)
            positions += [
                self.plan.position(RunState(index, step, before + step)) for step in range(steps)
            ]
            if len(positions) == length:
                break
        return positions

    @cached_property
    def train_sampler(self) -> PassFinder:
        """The draws of the training data, as one process would make them."""
        return build_loader(self.builder.context, self.data[TRAIN], self.plan).sampler

    def find_first_averaged_test(self) -> int:
        """Return the number of updates before the first test of averaged weights; more than the run
        has if there is none."""
        phases = self.plan.phases
        names = {index for index, name in enumerate(phases.splits) if AVERAGED in name}
        tests = np.flatnonzero(np.isin(phases.column("split"), list(names)))
        if not len(tests):
            return self.plan.updates + 1
        return self.plan.updates_before(int(tests[0]))

    def find_first_test(self, split: str) -> int:
        """Return the number of updates before the first test of a split; all if it has none."""
        phases = self.plan.phases
        names = {
            index for index, name in enumerate(phases.splits) if name.partition("@")[0] == split
        }
        tests = np.flatnonzero(np.isin(phases.column("split"), list(names)))
        if not len(tests):
            return self.plan.updates
        return self.plan.updates_before(int(tests[0]))


def _select_data(setup: Setup) -> dict[str, Any]:
    config = setup.config.plain()
    phases = config["PHASES"]
    return {
        "sections": [config["DATA"], config["TASK"], phases["stages"], phases["overfit"]],
        "run": [config["RUN"]["seed"], config["RUN"]["imports"]],
    }


def _list_scheduled(optimizer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and the config of every optimizer and of every rule of its groups."""
    sections = {"OPTIMIZER": optimizer}
    for label, other in (optimizer.get("others") or {}).items():
        sections[f"OPTIMIZER.others.{label}"] = other
    for path, section in sections.items():
        yield path, section
        for number, rule in enumerate(section.get("groups") or ()):
            yield f"{path}.groups[{number}]", rule


def _list_names(item: Any) -> Iterator[str]:
    """Yield the names of a schedule and of its parts."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, Mapping):
        yield str(item.get("name"))
        for part in item.get("parts") or ():
            yield from _list_names(part)
