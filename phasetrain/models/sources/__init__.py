"""Where weights to start from may come from (`MODEL.weights`)."""

from phasetrain.models.sources.base import FORMATS, Content, Source, sources_of
from phasetrain.models.sources.layouts import read

__all__ = ["FORMATS", "Content", "Source", "read", "sources_of"]
