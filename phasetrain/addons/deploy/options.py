"""Options of the commands that write packs and clusters; no module here imports torch."""

from dataclasses import MISSING, dataclass
from typing import Literal

from phasetrain.cli.options import option
from phasetrain.cli.parsing import TRUST
from phasetrain.config.sections.model import WhichWeights

DEFAULT_WEIGHTS = (
    "trained weights (model), or an average of them (default: schedule_free for a run with "
    "MODEL.schedule_free, else model)"
)
"""Help of flags that choose weights."""


@dataclass(frozen=True)
class PackOptions:
    """The selection for a pack, see the arguments of `pack`."""

    checkpoint: str = option("latest", "latest, best or name", metavar="NAME")
    weights: WhichWeights | None = option(None, DEFAULT_WEIGHTS)
    example: tuple[str, ...] = option(
        (), "samples of the example (default: the first two of the test split)", metavar="FILE"
    )
    license_name: str | None = option(
        None, "license of the model, for its card", flag="--license", metavar="NAME"
    )
    certificate: str | None = option(
        None, "certificate.json of phasetrain certify, for the card", metavar="FILE"
    )
    trust: bool = option(False, TRUST)


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a clustering of extracted features."""

    layer: str = option(MISSING, "name of the layer, or scores")
    clusters: int = option(MISSING, "number of clusters")
    iterations: int = option(50, "iterations of k-means")
    samples: int | None = option(None, "samples that k-means uses; default: all")
    seed: int = option(0, "selects samples and first centroids")
    device: Literal["auto", "cpu", "cuda"] = option("auto", None)
