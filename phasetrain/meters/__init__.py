"""Meters by name (section METERS)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.meters.accuracy import Accuracy
    from phasetrain.meters.base import METERS, Meter
    from phasetrain.meters.loss import MeanLoss, MeanOfLogged
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "METERS",
    "Accuracy",
    "MeanLoss",
    "MeanOfLogged",
    "Meter",
]
