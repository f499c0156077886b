"""Datasets of sequences: pairs of token sequences, and series of measurements."""

from phasetrain.data.datasets.sequences.cmudict import Pronunciations, load_cmudict
from phasetrain.data.datasets.sequences.token_pairs import TokenPairs
from phasetrain.data.datasets.sequences.ucr import Series, load_ucr

__all__ = ["Pronunciations", "Series", "TokenPairs", "load_cmudict", "load_ucr"]
