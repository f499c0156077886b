"""Parts for runs of several processes: faults of a single rank."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phasetrain.data import DATASETS
from phasetrain.data.datasets.digits import load_digits
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.losses import LOSSES
from phasetrain.meters import METERS, Meter

SENT = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "usr1": signal.SIGUSR1,
}


@HOOKS.register("strike")
class Strike(Hook):
    """Causes a fault on one rank after an update, once per run folder.

    Args:
        rank: rank that is struck; -1 for all.
        update: number of updates after which it happens.
        how: kill, stop, term, int, usr1, twice (SIGTERM), raise, refuse (ConfigError), sleep, or
            add (an all-reduce).
        seconds: duration of `sleep`.
        times: number of attempts in which it happens.
        event: hook event at which it happens.
        split: split in whose phases it happens.
        after: number of steps of the phase before it happens.
    """

    main_only = False
    observe_only = True

    def __init__(
        self,
        rank: int,
        update: int,
        how: str = "kill",
        seconds: float = 0.0,
        times: int = 1,
        event: str = "step",
        split: str = "train",
        after: int = 0,
    ) -> None:
        self.rank = rank
        self.update = update
        self.how = how
        self.seconds = seconds
        self.times = times
        self.event = event
        self.split = split
        self.after = after

    def on_start(self, run: Run) -> None:
        self._at("start", run, self.split)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        self._at("batch", run, phase.split)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        self._at("step", run, phase.split)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Any) -> None:
        self._at("phase_end", run, phase.split)

    def on_save(self, run: Run) -> None:
        self._at("save", run, self.split)

    def _at(self, event: str, run: Run, split: str) -> None:
        if (event, split) != (self.event, self.split) or self.rank not in (-1, run.world.rank):
            return
        if run.state.updates != self.update or run.state.step < self.after:
            return
        assert run.folder is not None
        marker = Path(f"{run.folder.path}.struck-{run.world.rank}-{self.update}")
        struck = len(marker.read_text()) if marker.exists() else 0
        if struck < self.times:
            marker.write_text("x" * (struck + 1))
            self._strike()

    def _strike(self) -> None:
        if self.how == "raise":
            raise ArithmeticError(f"struck at update {self.update}")
        if self.how == "refuse":
            raise ConfigError(f"struck at update {self.update}")
        if self.how == "sleep":
            time.sleep(self.seconds)
        elif self.how == "add":
            dist.all_reduce(torch.ones(1))
        elif self.how == "twice":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # sooner it would be the same request
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            os.kill(os.getpid(), SENT[self.how])


def trouble() -> tuple[str, float]:
    """Return the fault of this rank and its number, from the file `trouble-RANK` in the current
    folder."""
    try:
        what, number = Path(f"trouble-{os.environ['RANK']}").read_text().split()
    except FileNotFoundError:
        return "", 0.0
    return what, float(number)


class Uneven:
    """Digits that differ or cannot be read on one rank, as its file `trouble-RANK` says.

    Faults: `refuse 0` (construction fails), `shorter 10`, `other 1` (another fingerprint), `raise 7`
    (at multiples of 7), `wait 0.2` (seconds per sample), `marked 0.05` (the same, and creates the
    file `reading`).
    """

    def __init__(self, split: str) -> None:
        self.inner, (self.what, self.number) = load_digits(split=split), trouble()
        if self.what == "refuse":
            raise ConfigError("DATA.TRAIN: the files are not here")

    def __len__(self) -> int:
        return len(self.inner) - (int(self.number) if self.what == "shorter" else 0)

    def __getitem__(self, index: int) -> Any:
        if self.what == "raise" and index % int(self.number) == 0:
            raise OSError("a bad sector")
        if self.what in ("wait", "marked"):
            if self.what == "marked":
                Path("reading").touch()
            time.sleep(self.number)
        return self.inner[index]

    def facts(self) -> Any:
        return self.inner.facts()

    def fingerprint(self) -> str:
        return self.inner.fingerprint() + ("*" if self.what == "other" else "")


DATASETS.register("uneven")(Uneven)


@LOSSES.register("struck_loss")
class StruckLoss(nn.Module):
    """Cross entropy that on one rank raises or is NaN at its n-th call, or is always slow.

    Args:
        rank: rank that is struck.
        call: n, from 1.
        how: raise or spoil.
        seconds: additional time per call.
    """

    recomputed = ("calls",)

    def __init__(self, rank: int, call: int = 0, how: str = "raise", seconds: float = 0.0) -> None:
        super().__init__()
        self.rank, self.call, self.how, self.seconds, self.calls = rank, call, how, seconds, 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(output, target)
        if os.environ["RANK"] != str(self.rank):
            return loss
        time.sleep(self.seconds)
        if self.calls == self.call:
            if self.how == "raise":
                raise ArithmeticError(f"struck at call {self.call}")
            return loss * float("nan")
        return loss


@METERS.register("struck_meter")
class StruckMeter(Meter):
    """Counts steps, and raises at the n-th step of one rank."""

    recomputed = ("calls",)

    def __init__(self, rank: int, call: int) -> None:
        super().__init__()
        self.rank, self.call, self.calls = rank, call, 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def update(self, out: StepOutput) -> None:
        self.calls += 1
        if self.calls == self.call and os.environ["RANK"] == str(self.rank):
            raise ArithmeticError(f"struck at call {self.call}")
        self.steps += 1

    def reset(self) -> None:
        self.steps.zero_()

    def compute(self) -> float:
        return float(self.steps)
