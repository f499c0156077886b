"""Options of the commands that use models; nothing here imports torch."""

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
class ModelOptions:
    """How the model of a run or of a pack is loaded."""

    # None, and not "latest": a packed model rejects the options that only a run has.
    checkpoint: str | None = option(None, "latest (default), best or name", metavar="NAME")
    weights: WhichWeights | None = option(None, DEFAULT_WEIGHTS)
    device: str = option("auto", "see MACHINE.device (default: auto)")
    imports: tuple[str, ...] = option(
        (), "custom code that a packed model needs", metavar="FILE.py"
    )
    trust: bool = option(False, TRUST)


@dataclass(frozen=True)
class PredictOptions(ModelOptions):
    """How to predict."""

    top: int | None = option(None, "classes per sample (default: 3)", metavar="N")
    output: str | None = option(
        None, "entry of a mapping that the model returns (default: all of them)", metavar="NAME"
    )
    batch_size: int = option(64, "samples at once", metavar="N")
    arrays: Literal["auto", "sample", "batch"] = option(
        "auto",
        "whether a .npy or .pt file is a sample or a batch of them (default: by the number of "
        "dimensions of a sample in the run)",
    )


@dataclass(frozen=True)
class ExportedWeights:
    """Which weights are exported, as in an entry of MODEL.weights."""

    checkpoint: Literal["latest", "best"] = option(
        "latest", "checkpoint of a run folder (default: latest)"
    )
    which: WhichWeights | None = option(None, DEFAULT_WEIGHTS)
    include: tuple[str, ...] = option((), "tensors to write", metavar="PATTERN")
    exclude: tuple[str, ...] = option((), "tensors to omit", metavar="PATTERN")


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
