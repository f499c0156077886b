"""Sources of initial weights (`MODEL.weights`)."""

from phasetrain.models.sources.base import FORMATS, SourceContent, WeightSource, parse_sources
from phasetrain.models.sources.layouts import read_source

__all__ = ["FORMATS", "SourceContent", "WeightSource", "parse_sources", "read_source"]
