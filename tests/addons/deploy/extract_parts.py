"""A slow model, for extractions that are killed halfway."""

import time

from torch import Tensor

from phasetrain.models import MODELS, SmallCNN


@MODELS.register("slow_cnn")
class SlowCNN(SmallCNN):
    """`small_cnn` that sleeps in each forward pass."""

    def forward(self, batch: Tensor) -> Tensor:
        """Return scores `(N, classes)`."""
        time.sleep(0.02)
        return super().forward(batch)
