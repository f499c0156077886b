"""The ways to start a run, and to start it again after a kill, that the kill suite tries.

Each route starts a run by the same command until it ends, and says which checkpoint the next attempt
has to resume from, and how its end is compared with the end of an uninterrupted run.
"""

import json
import os
import random
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import REPORT, REPORT_FILES, SMALL, differences_of_runs, leftovers, status
from kill_findings import Attempt, describe_loss, newest_intact, untrue_status
from split_parts import WORDS as SPLITS

from phasetrain.cli import main
from phasetrain.runs.view import RunView
from phasetrain.runtime.storage import Storage

HERE = Path(__file__).parent
# Two epochs of four updates with a test of six batches after each. If a key is given twice, the
# last one counts.
RUN = (
    *SMALL,
    *REPORT,
    "PHASES.epochs=2",
    "PHASES.limit.train=4",
    "PHASES.limit.test=6",
    "CHECKPOINT.keep_last=2",
    "MACHINE.threads=1",
    "RUN.give_up_after=null",
)
# After each update, after every second update, or in almost every step, also in tests.
SAVES = (
    "CHECKPOINT.every_updates=1",
    "CHECKPOINT.every_updates=2",
    "CHECKPOINT.every_minutes=0.0002",
)
LOCKS = ("run.lock", "owner.json")

RunTemplate = Callable[..., None]
"""Runs a command line in a folder to its end, or until it is killed after `update`."""


class Route:
    """The command line with overrides.

    Args:
        template: folder of a run that the attempts begin with, if the route has one.

    Attributes:
        base: overrides of every attempt.
        saves, workers: values for CHECKPOINT and DATA.TRAIN.workers.
        is_counted: whether half of the kills are before a random change of a file.
        waits_for_ranks: whether attempts start ranks in new processes: kills wait until they have
            opened the folder, and an attempt whose main process was killed ends when they have.
    """

    base: tuple[str, ...] = RUN
    saves: tuple[str, ...] = SAVES
    workers: tuple[int, ...] = (0, 0, 0, 1, 2)
    is_counted = True
    waits_for_ranks = False

    def __init__(self, template: Path) -> None:
        self.template = template

    def make_template(self, run: RunTemplate) -> None:
        """Train the template."""

    def prepare(self, folder: Path) -> None:
        """Make the state before the first attempt."""
        if self.template.exists():
            shutil.copytree(self.template, folder, symlinks=True)

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        """Return the command line of an attempt."""
        return [*self.base, f"RUN.dir={folder}", "HOOKS.stage={}", *overrides]

    def enter(self, words: list[str]) -> int:
        """Run a command line in this process, and return the exit code."""
        return main(words)

    def newest(self, folder: Path) -> str:
        """Return the name of the checkpoint that the first attempt resumes from, or ""."""
        return newest_intact(folder) or ""

    def describe_loss(self, folder: Path, attempt: Attempt, newest: str) -> tuple[str, str]:
        """Return what an attempt has lost, or "", and the newest checkpoint after it."""
        return describe_loss(folder, attempt, newest)

    def compare(self, unbroken: Path, folder: Path) -> list[str]:
        """Return the differences of a finished run from one without interruptions."""
        return differences_of_runs(unbroken, folder)

    def list_leftovers(self, folder: Path) -> list[str]:
        """Return what a finished run has left behind, and a wrong state in status.json."""
        return [*leftovers(folder), *untrue_status(folder)]

    def remove(self, folder: Path) -> None:
        """Remove the folders of a run."""
        shutil.rmtree(folder)


class PlainRoute(Route):
    """As described, killed by time only."""

    is_counted = False


class FitRoute(Route):
    """A program that calls `phasetrain.fit` with objects."""

    kind = "objects"
    rehearses = True

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        given = dict(word.split("=", 1) for word in overrides)
        own = {"HOOKS.stage": {}, "HOOKS.metrics.every_updates": 1, "MACHINE.threads": 1}
        own["RUN.rehearse"] = self.rehearses
        values = {key: json.loads(value.lower()) for key, value in given.items()}
        return [self.kind, str(folder), json.dumps({**own, **values})]

    def enter(self, words: list[str]) -> int:
        sys.argv[1:] = words
        runpy.run_path(str(HERE / "fit_program.py"), run_name="__main__")
        raise AssertionError("the program ends with an exit code")


class ClassesRoute(FitRoute):
    """A program that calls `phasetrain.fit` with classes."""

    kind = "classes"
    rehearses = False


class FileRoute(Route):
    """`phasetrain my.yaml`."""

    TEXT = """
defaults: [digits, _self_]
PHASES: {epochs: 2, limit: {train: 4, test: 6}}
DATA:
  TRAIN: {batch_size: 24, transforms: [{name: random_shift, pixels: 1}, {name: noise, std: 0.1}]}
  TEST: {batch_size: 32}
MODEL: {name: small_cnn, width: 4, dropout: 0.3}
HOOKS: {metrics: {every_updates: 1}, stage: {}}
CHECKPOINT: {keep_last: 2}
MACHINE: {threads: 1}
RUN: {give_up_after: null}
"""

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        (folder.parent / "my.yaml").write_text(self.TEXT)
        return ["my.yaml", f"RUN.dir={folder.name}", *overrides]

    def enter(self, words: list[str]) -> int:
        os.chdir(self.template.parent)
        return main(words)


class SplitsRoute(Route):
    """Splits with a loss and meters of their own, a test at the end, and parts with dotted paths."""

    base = (*SPLITS, "CHECKPOINT.keep_last=2", "MACHINE.threads=1", "RUN.give_up_after=null")


class InexactRoute(Route):
    """`DATA.TRAIN.exact=false`: the run ends, and never says that it is exact."""

    base = (
        *RUN,
        "DATA.TRAIN.dataset=reading_parts.OwnGenerator",
        "MODEL.classes=10",
        "MODEL.channels=1",
        "DATA.TRAIN.exact=false",
    )
    SENTENCE = "from the start: DATA.TRAIN.exact = false"

    def compare(self, unbroken: Path, folder: Path) -> list[str]:
        found = [
            f"{name} does not say that the run is not exact"
            for name in ("RUN.md", "reproduce.sh", *REPORT_FILES - {"predictions.json"})
            if self.SENTENCE not in (folder / name).read_text()
        ]
        deviations = RunView(folder, Storage()).environment.content["departures"]
        lines = [one for one in deviations if "DATA.TRAIN.exact" in one["what"][0]]
        if [one["updates"] for one in lines] != [0]:
            found.append(f"departures: {deviations}")
        if "WARNING DATA.TRAIN.exact = false" not in (folder / "log.txt").read_text():
            found.append("log.txt has no warning")
        return found


class ResumeRoute(Route):
    """`phasetrain resume FOLDER` after a kill, with and without changes that are free."""

    base = SplitsRoute.base

    def make_template(self, run: RunTemplate) -> None:
        run(self.template, Route.words(self, self.template, random.Random(0), [SAVES[0]]), update=4)

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        return ["resume", str(folder), *(overrides if dice.random() < 0.5 else ())]


class ChangedRoute(ResumeRoute):
    """`phasetrain resume FOLDER` with another length and learning rate; without words once the
    change is on record."""

    base = RUN
    changes = (
        "PHASES.epochs=3",
        "OPTIMIZER.lr=0.02",
        "RUN.allow=[PHASES.epochs,OPTIMIZER.lr]",
    )

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        is_recorded = "lr: 0.02" in (folder / "config.yaml").read_text()
        if is_recorded and dice.random() < 0.3:
            return ["resume", str(folder)]
        return ["resume", str(folder), *self.changes, *overrides]


class RestartRoute(Route):
    """`phasetrain --restart` in the folder of a finished run: it is kept, whole, next to the new
    one."""

    old = ("RUN.seed=1",)

    def make_template(self, run: RunTemplate) -> None:
        run(self.template, Route.words(self, self.template, random.Random(0), self.old))

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        return ["--restart", *super().words(folder, dice, overrides)]

    def newest(self, folder: Path) -> str:
        return ""

    def describe_loss(self, folder: Path, attempt: Attempt, newest: str) -> tuple[str, str]:
        kept = self._kept(folder)
        # A run that was killed after its end, when it had released its lock, is started over.
        if any(status(path)["state"] != "finished" for path in kept[1:]):
            return f"there are {[path.name for path in kept]}", newest
        if len(kept) > 1 and attempt.resumed == "":
            newest = ""
        if not kept and attempt.code == 0:
            return "the old folder is gone", newest
        if changed := _changed_files(self.template, kept[0] if kept else folder):
            return f"{changed} of the old run have changed", newest
        if not kept and attempt.code is None:
            return "", newest
        return describe_loss(folder, attempt, newest)

    def list_leftovers(self, folder: Path) -> list[str]:
        # The old folder is kept as it is, with what a kill has left in it.
        before = leftovers(self.template)
        old = [name for path in self._kept(folder) for name in leftovers(path)]
        return [*super().list_leftovers(folder), *(name for name in old if name not in before)]

    def remove(self, folder: Path) -> None:
        for path in (folder, *self._kept(folder)):
            shutil.rmtree(path)

    def _kept(self, folder: Path) -> list[Path]:
        found = folder.parent.glob(f"{folder.name}.[0-9]")
        return sorted(path for path in found if path.is_dir())


class RestartOfKilledRoute(RestartRoute):
    """`phasetrain --restart` in the folder of a run that was killed."""

    def make_template(self, run: RunTemplate) -> None:
        words = Route.words(self, self.template, random.Random(0), [*self.old, SAVES[0]])
        run(self.template, words, update=3)


class ExtendRoute(Route):
    """A finished run that is trained on, `PHASES.extend=continue`."""

    extend = "continue"
    warmup = "OPTIMIZER.SCHEDULES.lr.warmup=1 epochs"

    def make_template(self, run: RunTemplate) -> None:
        run(self.template, Route.words(self, self.template, random.Random(0), [self.warmup]))

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        length = ("PHASES.epochs=4", f"PHASES.extend={self.extend}", "RUN.allow=[PHASES]")
        return super().words(folder, dice, [self.warmup, *length, *overrides])


class StretchRoute(ExtendRoute):
    """A finished run that is trained on, `PHASES.extend=stretch`."""

    extend = "stretch"


class CycleRoute(ExtendRoute):
    """A finished run that is trained on, `PHASES.extend=cycle`."""

    extend = "cycle"


class AutoRoute(Route):
    """`CHECKPOINT.every_minutes: auto`, with an interval that fits a run of a second."""

    saves = ("CHECKPOINT.every_minutes=auto",)

    def enter(self, words: list[str]) -> int:
        from phasetrain.hooks import checkpoint

        # The interval of a real run is at least 30 s.
        checkpoint.SHORTEST_INTERVAL = 0.02
        checkpoint.LONGEST_INTERVAL = 0.1
        return main(words)


class StateFromRoute(Route):
    """`OPTIMIZER.state_from` another run."""

    def make_template(self, run: RunTemplate) -> None:
        run(self.template, Route.words(self, self.template, random.Random(0), ["RUN.seed=1"]))

    def prepare(self, folder: Path) -> None:
        """The first attempt begins without a folder."""

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        return super().words(folder, dice, [f"OPTIMIZER.state_from={self.template}", *overrides])


class RanksRoute(Route):
    """`LAUNCH.processes=2`: each attempt starts two new processes."""

    base = (*RUN, "LAUNCH.processes=2")
    workers = (0, 0, 1)
    is_counted = False
    waits_for_ranks = True

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        # The hook of the suite is in its own processes only.
        return [*self.base, f"RUN.dir={folder}", *overrides]

    def enter(self, words: list[str]) -> int:
        line = [sys.executable, "-m", "phasetrain", *words]
        os.execv(sys.executable, line)


class ExportRoute(Route):
    """`phasetrain export FOLDER FILE`: there is no file, or the whole one."""

    def make_template(self, run: RunTemplate) -> None:
        run(self.template, Route.words(self, self.template, random.Random(0), []))

    def prepare(self, folder: Path) -> None:
        folder.mkdir()

    def words(self, folder: Path, dice: random.Random, overrides: Sequence[str]) -> list[str]:
        return ["export", str(self.template), str(folder / "weights.safetensors")]

    def describe_loss(self, folder: Path, attempt: Attempt, newest: str) -> tuple[str, str]:
        file = folder / "weights.safetensors"
        whole = self.template.parent / "measured" / file.name
        # A file that was written before the kill is not written again: exit code 2.
        if attempt.code not in (None, 0) and not (attempt.code == 2 and file.exists()):
            return describe_loss(folder, attempt, newest)
        if file.exists() and whole.exists() and file.read_bytes() != whole.read_bytes():
            return "the file is not whole", newest
        return "", newest

    def compare(self, unbroken: Path, folder: Path) -> list[str]:
        files = [(one / "weights.safetensors").read_bytes() for one in (unbroken, folder)]
        return [] if files[0] == files[1] else ["the files differ"]

    def list_leftovers(self, folder: Path) -> list[str]:
        return [name for name in os.listdir(folder) if name != "weights.safetensors"]


def _changed_files(one: Path, other: Path) -> list[str]:
    """Return the names of the files that differ, without locks and temporary files of an attempt."""
    first, second = _read_files(one), _read_files(other)
    names = first.keys() | second.keys()
    return sorted(name for name in names if first.get(name) != second.get(name))


def _read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in LOCKS and ".tmp-" not in path.name
    }


ROUTES: dict[str, type[Route]] = {
    "plain": PlainRoute,
    "files": Route,
    "fit": FitRoute,
    "classes": ClassesRoute,
    "yaml": FileRoute,
    "splits": SplitsRoute,
    "inexact": InexactRoute,
    "resume": ResumeRoute,
    "changed": ChangedRoute,
    "restart": RestartRoute,
    "restart_of_killed": RestartOfKilledRoute,
    "continue": ExtendRoute,
    "stretch": StretchRoute,
    "cycle": CycleRoute,
    "auto": AutoRoute,
    "state_from": StateFromRoute,
    "ranks": RanksRoute,
    "export": ExportRoute,
}
