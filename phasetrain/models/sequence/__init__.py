"""Models of sequences: encoders with a decoder, and convolutions over time."""

from phasetrain.models.sequence.gru import Seq2SeqGRU
from phasetrain.models.sequence.search import Decodes, decode_beam, decode_greedy
from phasetrain.models.sequence.time_series import SeriesFCN, SeriesResNet
from phasetrain.models.sequence.transformer import Seq2SeqTransformer

__all__ = [
    "Decodes",
    "Seq2SeqGRU",
    "Seq2SeqTransformer",
    "SeriesFCN",
    "SeriesResNet",
    "decode_beam",
    "decode_greedy",
]
