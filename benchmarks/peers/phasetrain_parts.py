"""The training in problem.py for phasetrain: dataset, model and recorder, for `RUN.imports`."""

from problem import Net, Samples, record

from phasetrain.data import DATASETS
from phasetrain.models import MODELS

DATASETS.register("points")(Samples)
MODELS.register("net")(Net)
record()
