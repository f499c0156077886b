"""Meters by name (section METERS)."""

from phasetrain.meters.accuracy import Accuracy
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.loss import MeanLoss

__all__ = ["METERS", "Accuracy", "MeanLoss", "Meter"]
