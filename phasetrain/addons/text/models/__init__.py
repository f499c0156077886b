"""Models of sequences: encoders with a decoder, and convolutions over time."""

from phasetrain.addons.text.models.gru import Seq2SeqGRU
from phasetrain.addons.text.models.search import Decodes, decode_beam, decode_greedy
from phasetrain.addons.text.models.time_series import SeriesFCN, SeriesResNet
from phasetrain.addons.text.models.transformer import Seq2SeqTransformer

__all__ = [
    "Decodes",
    "Seq2SeqGRU",
    "Seq2SeqTransformer",
    "SeriesFCN",
    "SeriesResNet",
    "decode_beam",
    "decode_greedy",
]
