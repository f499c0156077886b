"""Parts of runs of language models, in float64."""

from typing import Any

import torch
from torch import nn

from phasetrain.addons.text.blocks import IGNORED
from phasetrain.addons.text.language_model import LanguageModel
from phasetrain.addons.text.transformer import Transformer
from phasetrain.data import DATASETS
from phasetrain.data.datasets import TensorSamples
from phasetrain.engine.batch import Batch
from phasetrain.models import MODELS
from phasetrain.tasks import TASKS


@DATASETS.register("uneven_tokens")
class UnevenTokens(TensorSamples):
    """Sequences of eight tokens, of which one to eight count; most of the long ones come last."""

    def __init__(self, samples: int = 31) -> None:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(9, (samples, 9), generator=generator)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        for row in range(samples):
            self.targets[row, 1 + row * row % 8 :] = IGNORED

    def facts(self) -> dict[str, Any]:
        return {"vocabulary": 9, "context": 8}


@MODELS.register("double_transformer")
def double_transformer(vocabulary: int, context: int) -> nn.Module:
    return Transformer(vocabulary, context, width=8, depth=1, heads=2).double()


@TASKS.register("by_samples")
class BySamples(LanguageModel):
    """Weights micro-batches by samples instead of tokens, which gives a mean of means."""

    def weight_of(self, batch: Batch) -> int:
        return batch.size
