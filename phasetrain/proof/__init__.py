"""Recording what the steps of a run do, and comparing the bits of two runs."""

from phasetrain.proof.causes import CAUSES, explain, name_section
from phasetrain.proof.compare import Difference, differences, find_difference, is_equal
from phasetrain.proof.digest import digest_leaves, hash_tensors
from phasetrain.proof.trace import Trace

__all__ = [
    "CAUSES",
    "Difference",
    "Trace",
    "differences",
    "digest_leaves",
    "explain",
    "find_difference",
    "hash_tensors",
    "is_equal",
    "name_section",
]
