"""Share of planted bit flips that the hook `recheck` finds, and its cost.

    python benchmarks/recheck.py [--trials 60] [--updates 60] [--every 6] [--repetitions 5]
                                 [--seconds 30] [--json FILE]

Flips: in each trial one bit of one random entry is flipped in one random update of a short training
of digits, in a weight at rest, in an activation of the forward pass, in a gradient, or in the
optimizer's momentum. The same flip is planted twice: once with a recheck of just that update, which
says whether the flip changes anything (rounding absorbs some), and once with rechecks at random
moments, one per interval of `--every` updates. For these the clock is simulated, an update takes a
second, so that the load of the machine does not matter. A flip should be found as often as the
interval predicts, and runs without flips never fail.

Cost: trainings with the default interval and without the hook take turns, of about `--seconds`
each; the median of the ratios of CPU time per update is printed.
"""

import argparse
import gc
import json
import logging
import math
import platform
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from phasetrain.addons.observe.recheck import moments
from phasetrain.addons.observe.recheck.recheck import Recheck
from phasetrain.addons.observe.recheck.state_copy import StateCopy
from phasetrain.app.setup import resolve_config
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.phases import Phase
from phasetrain.engine.position import RunState
from phasetrain.errors import CorruptionError
from phasetrain.hooks import Hook, Hooks, Run
from phasetrain.tasks import Builder

WORDS = (
    "DATA.TEST=null",
    "METERS=null",
    "MACHINE.threads=1",
    "OPTIMIZER.SCHEDULES=null",
    "DATA.TRAIN.batch_size=64",
    "PHASES.epochs=null",
    # A flip of an exponent may make the loss infinite, and the run would end for that reason.
    "OPTIMIZER.on_nonfinite=ignore",
)
DIGITS = (*WORDS, "MODEL.name=mlp")
IMAGES = (*WORDS, "MODEL={name: resnet_cifar, depth: 20}")
PLACES = ("weight", "activation", "gradient", "momentum")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SimulatedClock:
    """A clock on which each update takes one second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Simulated(Recheck):
    """Checks one update per interval of simulated seconds."""

    def __init__(self, every: float, clock: SimulatedClock) -> None:
        super().__init__(every / 60)
        self.clock = clock

    def on_step(self, run: Run, phase: Phase, out: Any) -> None:
        self.clock.now += 1
        super().on_step(run, phase, out)


class Checked(Recheck):
    """Checks one given update only."""

    def __init__(self, update: int) -> None:
        super().__init__(1e9)
        self.update = update

    def on_step(self, run: Run, phase: Phase, out: Any) -> None:
        super().on_step(run, phase, out)
        self._is_armed = run.state.updates == self.update - 1


class Flip(Hook):
    """Flips one random bit in one update.

    Args:
        place: one of PLACES.
        update: number of the update.
        seed: chooses the tensor, the entry and the bit.
    """

    observe_only = True

    def __init__(self, place: str, update: int, seed: int) -> None:
        self.place = place
        self.update = update
        self.random = random.Random(seed)
        self.handle: Any = None

    def on_step_start(self, run: Run, phase: Phase) -> None:
        if run.state.updates != self.update - 1:
            return
        weights = list(run.task.parts.model.parameters())
        weight = self.random.choice(weights)
        if self.place == "weight":
            self.flip(weight)
        elif self.place == "momentum":
            self.flip(run.task.updater.optimizer.state[weight]["momentum_buffer"])
        elif self.place == "activation":
            layers = [one for one in run.task.parts.model.modules() if not list(one.children())]
            layer = self.random.choice(layers)
            self.handle = layer.register_forward_hook(self.change_output)

    def on_backward(self, run: Run, phase: Phase, out: Any) -> None:
        if self.place == "gradient" and run.state.updates == self.update - 1:
            weight = self.random.choice(list(run.task.parts.model.parameters()))
            if weight.grad is not None:
                self.flip(weight.grad)

    def on_update(self, run: Run, phase: Phase) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def change_output(self, module: Any, given: Any, output: Tensor) -> Tensor:
        changed = output.clone()
        self.flip(changed)
        return changed

    def flip(self, tensor: Tensor) -> None:
        flat = tensor.detach().view(-1).view(BITS[tensor.itemsize])
        entry = self.random.randrange(len(flat))
        flat[entry] ^= 1 << self.random.randrange(8 * tensor.itemsize - 1)


class Training:
    """A training that can be repeated from the same weights."""

    def __init__(self, overrides: tuple[str, ...], updates: int) -> None:
        setup = resolve_config([*overrides, f"PHASES.updates={updates}", "RUN.dir=unused"])
        builder = Builder(setup.config, setup.machine, setup.world)
        data = builder.data()
        self.plan = builder.plan(data)
        self.task = builder.task(builder.parts(data, self.plan))
        self.setup = setup
        self.updates = updates
        self.fresh = StateCopy()
        self.fresh.copy(self.task)

    def run(self, hooks: dict[str, Hook]) -> tuple[int, float, float]:
        """Train once; return the number of updates, and the CPU and wall time in seconds.

        Raises:
            CorruptionError: a recheck has failed.
        """
        self.fresh.restore(self.task)
        engine = PhaseEngine(self.task, self.plan, RunState(), Hooks(hooks), world=self.setup.world)
        gc.collect()
        with self.setup.machine.apply_settings():
            processor, wall = time.process_time(), time.perf_counter()
            engine.run()
        return (
            engine.state.updates,
            time.process_time() - processor,
            time.perf_counter() - wall,
        )

    def fails(self, hooks: dict[str, Hook]) -> bool:
        """Train once, and return whether a recheck has failed."""
        try:
            self.run(hooks)
        except CorruptionError:
            return True
        return False


def measure_flips(trials: int, updates: int, every: float) -> dict[str, Any]:
    """Return the share of flips that are found, for each place, and the predicted share."""
    training = Training(DIGITS, updates)
    clock = SimulatedClock()
    with patch.object(moments, "time", clock):
        return _count_flips(training, clock, trials, updates, every)


def _count_flips(
    training: Training, clock: SimulatedClock, trials: int, updates: int, every: float
) -> dict[str, Any]:
    checked = 0
    done = 0
    false_alarms = 0
    for _ in range(max(10, trials // 4)):
        hook = Simulated(every, clock)
        try:
            done += training.run({"recheck": hook})[0]
        except CorruptionError:
            false_alarms += 1
            continue
        checked += hook.count
    found: dict[str, Any] = {
        "share_of_updates_checked": checked / done,
        "share_by_interval": 1 / every,
        "false_alarms": false_alarms,
        "runs_without_flips": max(10, trials // 4),
        "places": {},
    }
    choose = random.Random(0)
    for place in PLACES:
        effective = caught = unexplained = 0
        for _ in range(trials):
            # Momentum exists from the first update on, and the first one is never checked.
            update = choose.randrange(3, updates + 1)
            seed = choose.randrange(2**32)
            has_effect = training.fails(
                {"recheck": Checked(update), "flip": Flip(place, update, seed)}
            )
            is_caught = training.fails(
                {"recheck": Simulated(every, clock), "flip": Flip(place, update, seed)}
            )
            effective += has_effect
            caught += is_caught and has_effect
            unexplained += is_caught and not has_effect
        found["places"][place] = {
            "trials": trials,
            "effective": effective,
            "caught": caught,
            "caught_without_effect": unexplained,
        }
    return found


def print_flips(found: dict[str, Any]) -> None:
    """Print the table of flips."""
    share = found["share_by_interval"]
    checked = found["share_of_updates_checked"]
    print(
        f"updates computed twice: {checked:.1%} (by the interval: {share:.1%});"
        f" false alarms in {found['runs_without_flips']} runs without flips: "
        f"{found['false_alarms']}"
    )
    print(f"{'flip in':<12}{'planted':>9}{'effective':>11}{'found':>7}{'share':>8}   predicted")
    total, hits = 0, 0
    for place, row in found["places"].items():
        total += row["effective"]
        hits += row["caught"]
        _print_row(place, row["trials"], row["effective"], row["caught"], share)
    _print_row("all", sum(row["trials"] for row in found["places"].values()), total, hits, share)


def _print_row(name: str, trials: int, effective: int, caught: int, share: float) -> None:
    rate = caught / effective if effective else math.nan
    # Two standard deviations of the share that chance allows.
    margin = 2 * math.sqrt(share * (1 - share) / effective) if effective else math.nan
    print(
        f"{name:<12}{trials:>9}{effective:>11}{caught:>7}{rate:>8.1%}   {share:.1%} +- {margin:.1%}"
    )


def measure_cost(overrides: tuple[str, ...], seconds: float, repetitions: int) -> dict[str, float]:
    """Return the cost of the hook at its default interval, as shares of the time without it."""
    short = Training(overrides, 20)
    short.run({})
    updates = max(40, int(seconds / (short.run({})[2] / 20)))
    training = Training(overrides, updates)
    processor, wall, checked = [], [], 0
    for _ in range(repetitions):
        plain = training.run({})
        hook = Recheck()
        with_hook = training.run({"recheck": hook})
        processor.append(with_hook[1] / plain[1] - 1)
        wall.append(with_hook[2] / plain[2] - 1)
        checked += hook.count
    return {
        "updates": updates,
        "share_of_updates_checked": checked / updates / repetitions,
        "cpu": median(processor),
        "wall": median(wall),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=60, help="per place")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--every", type=float, default=6, help="updates per interval, about")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("phasetrain").setLevel(logging.ERROR)
    content: dict[str, Any] = {"torch": torch.__version__, "machine": platform.processor()}
    if flags.trials:
        content["flips"] = measure_flips(flags.trials, flags.updates, flags.every)
        print_flips(content["flips"])
        sys.stdout.flush()
    for name, overrides in {"mlp": DIGITS, "resnet20": IMAGES}.items():
        if not flags.repetitions:
            break
        row = measure_cost(overrides, flags.seconds, flags.repetitions)
        content[name] = row
        print(
            f"cost of the default interval, {name} ({row['updates']} updates, "
            f"{row['share_of_updates_checked']:.2%} checked): {row['cpu']:+.2%} of the CPU time, "
            f"{row['wall']:+.2%} of the wall time"
        )
    if flags.json:
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
