"""Datasets of sequences: pairs of token sequences, and series of measurements."""

from phasetrain.addons.text.sequences.cmudict import Pronunciations, load_cmudict
from phasetrain.addons.text.sequences.token_pairs import TokenPairs
from phasetrain.addons.text.sequences.ucr import Series, load_ucr

__all__ = ["Pronunciations", "Series", "TokenPairs", "load_cmudict", "load_ucr"]
