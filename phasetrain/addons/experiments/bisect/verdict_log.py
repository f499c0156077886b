"""The verdicts of a bisection in a file, from which a command that was killed continues."""

import fcntl
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from phasetrain.errors import ConfigError

Kind = Literal["good", "bad", "other", "skip"]

FILE = "log.jsonl"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a set of changes or a commit.

    Attributes:
        kind: like GOOD, like BAD, like neither of them, or not to be run.
        by: the evidence: `bits`, `failure` or the name of the metric.
        detail: the evidence in words.
    """

    kind: Kind
    by: str
    detail: str


class VerdictLog(dict[str, Verdict]):
    """Verdicts by subject; a line of the file for each.

    Args:
        folder: folder of the file, which is made.
        question: description of the search, for readers of the file.

    Attributes:
        made: number of verdicts that this process has added.

    Raises:
        ConfigError: another process has opened it (code `bisect.in_use`).
    """

    def __init__(self, folder: Path, question: dict[str, Any]) -> None:
        super().__init__()
        self.path = folder / FILE
        self.made = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            # Until this process ends, also if it is killed.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"{self.path}: another process answers the same question; wait until it has ended",
                code="bisect.in_use",
            ) from error
        *lines, torn = self.path.read_bytes().split(b"\n")
        if torn:  # by a kill; without an end, the next line would be torn as well
            self._file.write(b"\n")
        for line in lines:
            with suppress(ValueError):  # a kill has torn it
                content = json.loads(line)
                if "subject" in content:  # else the question
                    subject = content.pop("subject")
                    self[subject] = Verdict(**content)
        if not lines:
            self._write({"question": question})

    def close(self) -> None:
        """Let other processes write."""
        self._file.close()

    def add(self, subject: str, verdict: Verdict) -> None:
        """Append a verdict."""
        self.made += 1
        self[subject] = verdict
        self._write({"subject": subject, **asdict(verdict)})

    def list_undecided(self) -> list[str]:
        """Return the subjects that could not be run, or on which the metric could not decide."""
        return [
            subject
            for subject, verdict in self.items()
            if verdict.kind == "skip" or (verdict.kind == "other" and verdict.by != "bits")
        ]

    def _write(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content).encode() + b"\n")
        self._file.flush()
