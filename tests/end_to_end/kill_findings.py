"""Checks killed runs from outside: the files and processes that they leave."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from phasetrain.checkpoint import Checkpointer
from phasetrain.errors import NoValidCheckpointError
from phasetrain.runtime.storage import Storage


@dataclass
class Report:
    """The results of the runs.

    Attributes:
        kills, runs: counts.
        alone: kills of the main process only, with running loader workers; all other kills hit the
            whole group.
        places: stage of the run -> number of kills in it.
        lost: runs that could not resume, or not from the newest committed checkpoint.
        wrong: runs whose bits differ from those of an uninterrupted run.
        left: temporary files, locks and processes that runs left behind, and a status.json without
            the state finished.
        segments: shared memory segments left behind: torch unlinks a name right after it has
            created it, and a kill between the two leaves it.
        seconds: wall time.
    """

    kills: int = 0
    runs: int = 0
    alone: int = 0
    places: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        """Whether there is any problem."""
        return bool(self.lost or self.wrong or self.left)

    def add(self, other: "Report") -> None:
        """Merge another report of a suite that ran in parallel."""
        self.kills, self.runs, self.alone = (
            self.kills + other.kills,
            self.runs + other.runs,
            self.alone + other.alone,
        )
        self.places.update(other.places)
        self.lost += other.lost
        self.wrong += other.wrong
        self.left += other.left
        self.segments += other.segments
        self.seconds = max(self.seconds, other.seconds)

    def summary(self) -> str:
        """Return one line."""
        places = ", ".join(f"{count} in {place}" for place, count in self.places.most_common())
        return (
            f"kill suite: {self.kills} kills ({places}; {self.alone} of the main process alone, beside its workers) of "
            f"{self.runs} runs in {self.seconds:.0f} s: {len(self.lost)} runs lost, {len(self.wrong)} silently wrong, "
            f"{len(self.left)} things and {len(self.segments)} segments of shared memory left behind"
        )


@dataclass
class Attempt:
    """The result of one child.

    Attributes:
        code: exit code; None if it was killed.
        seconds: wall time.
        place: stage of the run at the end.
        resumed: name of the checkpoint that it resumed from, empty for a fresh start; None if it
            ended before.
        operations: number of its changes of files, if they were counted.
    """

    code: int | None
    seconds: float
    place: str
    resumed: str | None
    operations: int = 0


def session(leader: int) -> list[int]:
    """Return the live processes of a session."""
    alive = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(number) == leader and state not in "ZX":
                    alive.append(int(folder.name))
    return alive


def list_paths(folder: Path) -> set[str]:
    """Return the paths of all files and folders of a run, relative to its folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def newest_intact(folder: Path) -> str | None:
    """Return the name of the newest intact checkpoint; empty without any checkpoint, None if all
    are damaged."""
    try:
        loaded = Checkpointer(f"{folder}/checkpoints", Storage()).load_newest()
    except NoValidCheckpointError:
        return None
    return Path(loaded.path).name if loaded else ""


def name_place(attempt: Attempt, newest: str | None, left: Iterable[str]) -> str:
    """Return the place of a kill, derived from the files that it left and from the stage."""
    inside = [name for name in left if name.startswith("checkpoints/")]
    if any(".trash-" in name for name in inside):
        return "a prune"
    if any(".tmp-" in name for name in inside):
        return "a save"
    return "a resume" if attempt.place == "start-up" and newest else attempt.place


def describe_loss(folder: Path, attempt: Attempt, newest: str) -> tuple[str, str]:
    """Return a description of the loss in an attempt, or "", and the newest checkpoint after it.

    Args:
        newest: the newest checkpoint before it, or "".
    """
    if attempt.code not in (None, 0):
        last = Path(f"{folder}.txt").read_text().strip().splitlines()[-1:]
        return f"the attempt ended with code {attempt.code} ({' '.join(last)})", newest
    if attempt.resumed is not None and attempt.resumed != newest:
        return (
            f"the attempt went on from {attempt.resumed!r}, and the newest checkpoint was {newest!r}",
            newest,
        )
    now = newest_intact(folder)
    if now is None:
        return "no checkpoint is whole", newest
    known = max(newest, acknowledged(folder), key=position_of)
    if position_of(known) > position_of(now):
        return f"{known!r} was committed, and the newest checkpoint is {now!r}", now
    return "", now


def acknowledged(folder: Path) -> str:
    """Return the checkpoint that status.json names, or ""."""
    status = folder / "status.json"
    return str(json.loads(status.read_text()).get("checkpoint", "")) if status.exists() else ""


def untrue_status(folder: Path) -> list[str]:
    """Return the state in status.json of a finished run, if it is not "finished"."""
    state = json.loads((folder / "status.json").read_text())["state"]
    return [] if state == "finished" else [f"status.json says {state!r}"]


def position_of(name: str) -> str:
    """Return the sort key of a checkpoint from its name, such as p0001-s00000003-c7."""
    return name[: len("p0001-s00000003")]
