"""What kills have done to runs: looked at from outside, from the files and processes that are
left."""

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
    """What became of the runs.

    Attributes:
        kills, runs: how many.
        alone: kills of the main process only, with loader workers beside it; all others hit the
            whole group.
        places: where the kills hit -> how many.
        lost: runs that could not go on, or not from the newest checkpoint that was committed.
        wrong: runs that ended with other bits than one that was never interrupted.
        left: what runs have left behind: temporary files, locks, processes, and a status.json that
            does not say that the run has finished.
        segments: shared memory that was left under a name: torch unlinks a name right after it has
            made it, and a kill between the two leaves it.
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
        """Whether anything is wrong."""
        return bool(self.lost or self.wrong or self.left)

    def add(self, other: "Report") -> None:
        """Take over what another report says; they ran side by side."""
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
    """What came of one child.

    Attributes:
        code: exit code; None where it was killed.
        seconds: how long it took.
        place: where it stood.
        resumed: the checkpoint it went on from, empty for a fresh start; None if it did not come so
            far.
    """

    code: int | None
    seconds: float
    place: str
    resumed: str | None


def session(leader: int) -> list[int]:
    """Return the processes of a session that live."""
    alive = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(number) == leader and state not in "ZX":
                    alive.append(int(folder.name))
    return alive


def names(folder: Path) -> set[str]:
    """Return the paths of all files and folders of a run, the run folder being the root."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def found(folder: Path) -> str | None:
    """Return the name of the newest checkpoint that is whole, empty where there is none at all,
    None: all are torn."""
    try:
        loaded = Checkpointer(f"{folder}/checkpoints", Storage()).load_newest()
    except NoValidCheckpointError:
        return None
    return Path(loaded.path).name if loaded else ""


def where(attempt: Attempt, newest: str | None, left: Iterable[str]) -> str:
    """Return where a kill hit, from what it left behind and from the stage."""
    inside = [name for name in left if name.startswith("checkpoints/")]
    if any(".trash-" in name for name in inside):
        return "a prune"
    if any(".tmp-" in name for name in inside):
        return "a save"
    return "a resume" if attempt.place == "start-up" and newest else attempt.place


def loss(folder: Path, attempt: Attempt, newest: str) -> tuple[str, str]:
    """Return what was lost in an attempt, or nothing, and the newest checkpoint after it.

    Args:
        newest: the newest checkpoint before it, or nothing.
    """
    if attempt.code not in (None, 0):
        last = Path(f"{folder}.txt").read_text().strip().splitlines()[-1:]
        return f"the attempt ended with code {attempt.code} ({' '.join(last)})", newest
    if attempt.resumed is not None and attempt.resumed != newest:
        return (
            f"the attempt went on from {attempt.resumed!r}, and the newest checkpoint was {newest!r}",
            newest,
        )
    now = found(folder)
    if now is None:
        return "no checkpoint is whole", newest
    known = max(newest, acknowledged(folder), key=position)
    if position(known) > position(now):
        return f"{known!r} was committed, and the newest checkpoint is {now!r}", now
    return "", now


def acknowledged(folder: Path) -> str:
    """Return the checkpoint that status.json names, or nothing."""
    status = folder / "status.json"
    return str(json.loads(status.read_text()).get("checkpoint", "")) if status.exists() else ""


def untrue_status(folder: Path) -> list[str]:
    """Return what status.json says of a run that has finished, if it is anything else."""
    state = json.loads((folder / "status.json").read_text())["state"]
    return [] if state == "finished" else [f"status.json says {state!r}"]


def position(name: str) -> str:
    """Return what checkpoints are ordered by, out of a name such as p0001-s00000003-c7."""
    return name[: len("p0001-s00000003")]
