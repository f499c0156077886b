"""Compares two runs with one seed bit by bit: every update, every measured value, the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phasetrain.addons.experiments.compare.diff import MEASUREMENTS, diff
from phasetrain.addons.experiments.judge.trained_runs import TrainedRun
from phasetrain.checkpoint import Checkpointer
from phasetrain.proof.digest import hash_tensors
from phasetrain.runtime.storage import open_storage

WEIGHTS = "weights"
"""Component that differs if updates and measured values are equal, and the final weights are
not."""


@dataclass(frozen=True)
class BitComparison:
    """The outcome of comparing two runs.

    Attributes:
        updates: number of updates that both runs have made.
        update: first update at which they differ; 0 if they are identical.
        component: first component that differs there; empty if they are identical.
        is_renamed: whether equal weights have other names.
        unshared: metrics that only one run measures, such as `test/loss`; they are not compared.
    """

    updates: int
    update: int = 0
    component: str = ""
    is_renamed: bool = False
    unshared: tuple[str, ...] = ()

    @property
    def is_identical(self) -> bool:
        """Whether no bit differs."""
        return not self.component

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        if not self.is_identical:
            return f"different from update {self.update} on, first in: {self.component}"
        noun = "update" if self.updates == 1 else "updates"
        return f"identical for {self.updates} {noun}"


def compare_bits(one: TrainedRun, other: TrainedRun) -> BitComparison:
    """Compare the ledgers, the measured values and the weights of two runs of equal length.

    Raises:
        ConfigError: a file cannot be read.
    """
    # Ledgers come first: they name the update, which the weights at the end cannot.
    compared = diff(one.folder, other.folder)
    updates = min(run.view.status.updates for run in (one, other))
    unshared: tuple[str, ...] = ()
    if compared.components == (MEASUREMENTS,):
        unshared = _find_unshared_metrics(one, other)
    if not compared.equal and not unshared:
        return BitComparison(updates, compared.updates, compared.components[0])
    # The names of modules do not count, since a refactoring may change them.
    weights = [hash_weights(run) for run in (one, other)]
    digests = [sorted(each.values()) for each in weights]
    if digests[0] != digests[1]:
        return BitComparison(updates, updates, WEIGHTS)
    return BitComparison(updates, is_renamed=weights[0] != weights[1], unshared=unshared)


def have_equal_results(one: TrainedRun, other: TrainedRun) -> bool:
    """Return whether two runs have equal weights at the end and equal measured values.

    The records of the updates are compared only if no weights were saved: a record may have a
    gradient norm, or not, although nothing else differs.

    Raises:
        ConfigError: a file cannot be read.
    """
    weights = [sorted(hash_weights(run).values()) for run in (one, other)]
    if not any(weights):
        return compare_bits(one, other).is_identical
    return weights[0] == weights[1] and _list_measured(one) == _list_measured(other)


def _list_measured(run: TrainedRun) -> list[str]:
    # As text, in which NaN is equal to NaN.
    return [
        repr((line.split, line.epoch, line.updates, line.metrics))
        for line in run.view.lines
        if line.kind == "phase"
    ]


def _find_unshared_metrics(one: TrainedRun, other: TrainedRun) -> tuple[str, ...]:
    """Return the metrics that only one run measures; none if the others, or the phases, differ."""
    by_phase = [
        {
            (line.split, line.epoch, line.updates): line.metrics
            for line in run.view.lines
            if line.kind == "phase"
        }
        for run in (one, other)
    ]
    if by_phase[0].keys() != by_phase[1].keys():
        return ()
    names: set[str] = set()
    for key, metrics in by_phase[0].items():
        others = by_phase[1][key]
        common = metrics.keys() & others.keys()
        # As text, in which NaN is equal to NaN.
        if any(repr(metrics[name]) != repr(others[name]) for name in common):
            return ()
        names |= {f"{key[0]}/{name}" for name in metrics.keys() ^ others.keys()}
    return tuple(sorted(names))


def hash_weights(run: TrainedRun) -> Mapping[str, str]:
    """Return name -> digest of each tensor of model and loss in the newest checkpoint."""
    loaded = Checkpointer(f"{run.folder}/checkpoints", open_storage(run.folder)).load_newest()
    # CHECKPOINT may save nothing at the end; then the ledger has samples of the weights only.
    if loaded is None:
        return {}
    task = loaded.state["task"]
    return {
        f"{part}.{name}": hash_tensors(tensor)
        for part in ("model", "loss")
        for name, tensor in _list_tensors(task.get(part)).items()
    }


def _list_tensors(state: Any) -> Mapping[str, Tensor]:
    # A loss without parameters has no state.
    if not isinstance(state, Mapping):
        return {}
    return {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
