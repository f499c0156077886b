"""Samples that cannot be read: what stands for one, and how many of a split a run has put up
with."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.errors import PhasetrainError

log = logging.getLogger(__name__)

OnBadSample = Literal["raise", "substitute", "drop"]
"""What is done with a sample that cannot be read."""

BadPairs = tuple[tuple[int, str], ...]
"""Index and reason of each."""

DONE = {"substitute": "another one takes its place", "drop": "it is left out"}
LONGEST_REASON = 300  # characters; some libraries put a whole file into the message
SHOWN = 3  # samples named in an error

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


class SampleError(PhasetrainError):
    """A sample could not be read; the message names the split, the sample and the cause (exit code
    1)."""


class MissingValueError(PhasetrainError, ValueError):
    """A sample has no value of a name in the config, such as `target_key`, which begins the message
    (exit code 1)."""


@dataclass(frozen=True)
class Unreadable:
    """Stands for a sample that cannot be read.

    Attributes:
        reason: why, in one line.
    """

    reason: str

    @classmethod
    def by(cls, error: Exception) -> "Unreadable":
        """Return it with an error's type and words; addresses in memory, which no two processes
        share, are left out."""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(_ADDRESS.sub("0x...", words)[:LONGEST_REASON])


class BadSamples:
    """The different bad samples of one split that a run has met in the batches it has used.

    Args:
        policy: what is done with them, for the warnings.
        budget: how many different ones are put up with.
    """

    # A run may be the first to tolerate bad samples when it resumes.
    is_optional = True

    def __init__(self, policy: OnBadSample, budget: int) -> None:
        self.policy = policy
        self.budget = budget
        self._reasons: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, split: str, met: Iterable[tuple[int, str]]) -> None:
        """Count what was met in a batch that is about to be used, and warn of each index that is
        new.

        Raises:
            SampleError: they are more than the budget; nothing of the batch is counted then.
        """
        reasons = dict(met)
        if not reasons:
            return
        together = {**reasons, **self._reasons}
        if len(together) > self.budget:
            latest = {**self._reasons, **reasons}
            raise SampleError(
                f"DATA.{split.upper()}.bad_sample_budget = {self.budget}: {len(together)} different samples cannot be "
                f"read, the last of them {named(list(latest.items())[-SHOWN:])}; mend the data, or raise the budget"
            )
        for index, reason in reasons.items():
            if index not in self._reasons:
                self._reasons[index] = reason
                log.warning(
                    "DATA.%s: sample %d cannot be read (%s); %s",
                    split.upper(),
                    index,
                    reason,
                    DONE[self.policy],
                )

    def state_dict(self) -> dict[str, Any]:
        """Return index and reason of each, in the order of the indices."""
        return {"samples": [[index, reason] for index, reason in sorted(self._reasons.items())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from what `state_dict` returned."""
        self._reasons = {int(index): str(reason) for index, reason in state["samples"]}

    def rank_state(self) -> dict[str, Any]:
        """Return the bad samples that this rank has met."""
        return self.state_dict()

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `rank_state`."""
        self.load_state_dict(dict(state))

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Load the bad samples of all ranks of a run with another world size."""
        if states:
            met = dict(pair for state in states for pair in state["samples"])
            self.load_state_dict({"samples": sorted(met.items())})


def named(samples: Iterable[tuple[int, str]]) -> str:
    """Return `7 (OSError: unreadable), 8 (...)`."""
    return ", ".join(f"{index} ({reason})" for index, reason in samples)
