"""Samples that cannot be read: their placeholder, and the count of them per split."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.errors import PhasetrainError

log = logging.getLogger(__name__)

OnBadSample = Literal["raise", "substitute", "drop"]
"""Policy for a sample that cannot be read."""

BadPairs = tuple[tuple[int, str], ...]
"""Index and reason of each."""

DONE = {"substitute": "it is replaced by another one", "drop": "it is skipped"}
LONGEST_REASON = 300  # characters; some libraries put a whole file into the message
MAX_LISTED = 3  # maximum number of samples in an error

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


class SampleError(PhasetrainError):
    """A sample could not be read; the message names the split, the sample and the cause (exit code
    1)."""


class BatchError(SampleError):
    """The samples do not form a batch: dataset, transforms and collate function do not fit (exit
    code 2)."""

    exit_code = 2
    default_code = "data.collate"


class MissingValueError(PhasetrainError, ValueError):
    """A sample lacks a value named in the config, such as `target_key`, which begins the message
    (exit code 1)."""


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for a sample that cannot be read.

    Attributes:
        reason: why, in one line.
    """

    reason: str

    @classmethod
    def from_error(cls, error: Exception) -> "Unreadable":
        """Return a placeholder with the type and message of an error."""
        # Memory addresses differ between processes, and the reason is part of the run state.
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(_ADDRESS.sub("0x...", words)[:LONGEST_REASON])


class BadSamples:
    """The distinct bad samples of one split in the batches that a run has used.

    Args:
        policy: how they are handled, for the warnings.
        budget: maximum number of distinct bad samples before the run fails.
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
        """Count the bad samples of a batch that is about to be used, and log a warning for each new
        index.

        Raises:
            SampleError: the budget is exceeded; then nothing of the batch is counted.
        """
        reasons = dict(met)
        if not reasons:
            return
        together = {**reasons, **self._reasons}
        if len(together) > self.budget:
            latest = {**self._reasons, **reasons}
            raise SampleError(
                f"DATA.{split.upper()}.bad_sample_budget = {self.budget}: {len(together)} distinct "
                "samples cannot be read, the last ones "
                f"{format_samples(list(latest.items())[-MAX_LISTED:])}; fix the data, or raise the "
                "budget",
                code="data.bad_sample_budget",
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
        """Return index and reason of each, ordered by index."""
        # Sorted, so that a checkpoint does not depend on the order in which the samples were met.
        return {"samples": [[index, reason] for index, reason in sorted(self._reasons.items())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from the result of `state_dict`."""
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


def format_samples(samples: Iterable[tuple[int, str]]) -> str:
    """Return `7 (OSError: unreadable), 8 (...)`."""
    return ", ".join(f"{index} ({reason})" for index, reason in samples)
