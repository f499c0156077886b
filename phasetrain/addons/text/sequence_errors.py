"""Error rates of decoded sequences."""

import torch
from torch import Tensor

from phasetrain.engine.batch import SequenceOutput, StepOutput
from phasetrain.meters.base import METERS, Meter

PADDING = -100


class SequenceErrors(Meter):
    """Compares decoded sequences with the nearest reference of each sample.

    The task `sequence_to_sequence` decodes in tests. In training nothing is decoded, and nothing is
    measured.

    Raises:
        ValueError: on an update: the task does not decode.
    """

    better = "smaller"

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("wrong", dtype=torch.int64)
        self.add_sum("total", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Add the errors of a micro-batch."""
        if not isinstance(out, SequenceOutput):
            raise ValueError(  # noqa: TRY004 - a mistake of the config
                "it needs decoded sequences, which the task sequence_to_sequence makes"
            )
        if out.decoded is None or out.references is None or not len(out.decoded):
            return
        distances, lengths = measure_nearest(out.decoded, out.references)
        self.add_errors(distances, lengths)

    def add_errors(self, distances: Tensor, lengths: Tensor) -> None:
        """Add the distances to the nearest references, and their lengths, int64 `(N,)`."""
        raise NotImplementedError

    def compute(self) -> float:
        """Return the error rate, NaN if nothing was decoded."""
        return float(self.get_buffer("wrong") / self.get_buffer("total"))


@METERS.register("token_error_rate")
class TokenErrorRate(SequenceErrors):
    """Insertions, deletions and substitutions per token of the nearest reference: the phoneme error
    rate of phonemes, the word error rate of words."""

    def add_errors(self, distances: Tensor, lengths: Tensor) -> None:
        """Add distances and lengths."""
        self.get_buffer("wrong").add_(distances.sum())
        self.get_buffer("total").add_(lengths.sum())


@METERS.register("sequence_error_rate")
class SequenceErrorRate(SequenceErrors):
    """Fraction of samples whose decoded sequence equals none of their references; for single words
    it is called word error rate."""

    def add_errors(self, distances: Tensor, lengths: Tensor) -> None:
        """Count the samples with a distance."""
        self.get_buffer("wrong").add_((distances > 0).sum())
        self.get_buffer("total").add_(len(distances))


def measure_nearest(decoded: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edit distance of each sequence to its nearest reference, and the length of that
    reference, int64 `(N,)`; of equally near ones the first counts.

    Args:
        decoded: tokens `(N, L)`, padded with -100 at the end.
        references: tokens `(N, R, T)`, padded with -100 at the end.
    """
    samples, several, _ = references.shape
    flat = references.flatten(0, 1)
    distances = edit_distances(decoded.repeat_interleave(several, dim=0), flat)
    nearest = distances.view(samples, several)
    lengths = (flat != PADDING).sum(dim=1).view(samples, several)
    # argmin does not promise the first of equal values on every device; the position breaks ties.
    places = torch.arange(several, device=nearest.device)
    chosen = (nearest * several + places).argmin(dim=1, keepdim=True)
    return nearest.gather(1, chosen)[:, 0], lengths.gather(1, chosen)[:, 0]


def edit_distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the Levenshtein distance of each pair of sequences, int64 `(N,)`.

    Args:
        first: tokens `(N, L)`, padded with -100 at the end.
        second: tokens `(N, T)`, padded with -100 at the end.

    Example:
        >>> edit_distances(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 3, -100]]))
        tensor([1])
    """
    first_lengths = (first != PADDING).sum(dim=1)
    second_lengths = (second != PADDING).sum(dim=1)
    places = torch.arange(second.shape[1] + 1, device=second.device)
    row = places.expand(len(second), -1)
    for at in range(first.shape[1]):
        # Without insertions: delete the token, or match it against one of the other sequence.
        matched = row[:, :-1] + (second != first[:, at : at + 1]).long()
        best = torch.cat([row[:, :1] + 1, torch.minimum(row[:, 1:] + 1, matched)], dim=1)
        # An insertion costs 1 per place, so the best start of a chain of insertions is a running
        # minimum; that replaces the loop over the second sequence.
        following = (best - places).cummin(dim=1).values + places
        row = torch.where((at < first_lengths)[:, None], following, row)
    return row.gather(1, second_lengths[:, None])[:, 0]
