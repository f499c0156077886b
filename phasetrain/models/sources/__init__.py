"""Sources of initial weights (`MODEL.weights`)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.models.sources.base import FORMATS, SourceContent, WeightSource, parse_sources
    from phasetrain.models.sources.layouts import read_source
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = ["FORMATS", "SourceContent", "WeightSource", "parse_sources", "read_source"]
