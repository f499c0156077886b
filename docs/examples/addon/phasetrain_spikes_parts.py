"""A command, an engine, a hook and a loss."""

import argparse
from itertools import pairwise

import torch

from phasetrain.app.engines import Extras
from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.losses import LOSSES
from phasetrain.runs.history import read_history


def add_spikes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run folder and the factor."""
    parser.add_argument("folder", metavar="RUN_FOLDER")
    parser.add_argument("--factor", type=float, default=2.0)


def run_spikes(call: Call) -> Outcome:
    """List the last updates of epochs whose loss exceeds a multiple of the previous loss."""
    losses = read_history(call.flags.folder).scalar("train/loss")
    spikes = [
        int(update)
        for (_, before), (update, loss) in pairwise(losses)
        if loss > call.flags.factor * before
    ]
    return Outcome(text="\n".join(map(str, spikes)) or "no spikes", content={"updates": spikes})


def count_updates(setup: Setup, extras: Extras) -> RunResult:
    """Count the updates of the plan, without training."""
    builder = setup.builder()
    return RunResult("counted", details={"updates": builder.plan(builder.data()).updates})


@HOOKS.register("spike_alarm")
class SpikeAlarm(Hook):
    """Stops the run when the loss of every n-th update exceeds a limit."""

    def __init__(self, limit: float = 100.0, every_updates: int = 10) -> None:
        self.limit = limit
        self.every_updates = every_updates

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Compare the loss with the limit; `float` waits for the device."""
        is_due = phase.is_train and run.state.updates % self.every_updates == 0
        if is_due and float(out.loss) > self.limit:
            run.stop(f"loss above {self.limit:g}")


@LOSSES.register("clipped_cross_entropy")
def clipped_cross_entropy(
    output: torch.Tensor, target: torch.Tensor, limit: float = 10.0
) -> torch.Tensor:
    """Cross-entropy in which no sample counts more than `limit`."""
    losses = torch.nn.functional.cross_entropy(output, target, reduction="none")
    return losses.clamp(max=limit).mean()
