"""Parts of runs of sequence-to-sequence models."""

import random

from torch import nn

from phasetrain.addons.text.models import Seq2SeqGRU, Seq2SeqTransformer
from phasetrain.addons.text.sequence_to_sequence import SequenceToSequence
from phasetrain.addons.text.sequences import TokenPairs
from phasetrain.data import DATASETS
from phasetrain.engine.batch import Batch
from phasetrain.models import MODELS
from phasetrain.tasks import TASKS


@DATASETS.register("reversed_tokens")
def reversed_tokens(split: str = "train", samples: int = 45) -> TokenPairs:
    """Sources of 1 to 9 tokens, whose target is the source backwards; in tests every third one may
    also be written forwards."""
    generator = random.Random(7 if split == "train" else 8)
    sources = [
        [generator.randrange(1, 6) for _ in range(generator.randint(1, 9))] for _ in range(samples)
    ]
    targets = [[*reversed(source), 0] for source in sources]
    if split != "train":
        targets = [
            target if at % 3 else [*target, *source, 0]
            for at, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
    return TokenPairs(sources, targets, source_vocabulary=6, target_vocabulary=6)


@MODELS.register("double_gru")
def double_gru(source_vocabulary: int, target_vocabulary: int) -> nn.Module:
    return Seq2SeqGRU(source_vocabulary, target_vocabulary, width=8).double()


@MODELS.register("double_seq2seq")
def double_seq2seq(source_vocabulary: int, target_vocabulary: int) -> nn.Module:
    return Seq2SeqTransformer(
        source_vocabulary, target_vocabulary, width=8, depth=1, heads=2, dropout=0.0
    ).double()


@TASKS.register("pairs_by_samples")
class PairsBySamples(SequenceToSequence):
    """Weights micro-batches by samples instead of target tokens."""

    def weight_of(self, batch: Batch) -> int:
        return batch.size
