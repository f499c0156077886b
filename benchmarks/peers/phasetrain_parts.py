"""The training of problem.py for phasetrain: a data set, a model and the record, for
`RUN.imports`."""

from problem import Net, Samples, record

from phasetrain.data import DATASETS
from phasetrain.models import MODELS

DATASETS.register("points")(Samples)
MODELS.register("net")(Net)
record()
