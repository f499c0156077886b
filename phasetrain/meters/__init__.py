"""Meters by name (section METERS)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.classification.accuracy import Accuracy
from phasetrain.meters.classification.at_k import PrecisionAtK, RecallAtK
from phasetrain.meters.classification.auroc import AUROC, GroupedAUROC
from phasetrain.meters.classification.average_precision import AveragePrecision
from phasetrain.meters.classification.confusion_matrix import ConfusionMatrix
from phasetrain.meters.classification.f1 import F1
from phasetrain.meters.classification.multilabel_accuracy import MultilabelAccuracy
from phasetrain.meters.classification.per_class_accuracy import PerClassAccuracy
from phasetrain.meters.classification.present_accuracy import PresentAccuracy
from phasetrain.meters.loss import MeanLoss, MeanOfLogged
from phasetrain.meters.regression import Regression

__all__ = [
    "AUROC",
    "F1",
    "METERS",
    "Accuracy",
    "AveragePrecision",
    "ConfusionMatrix",
    "GroupedAUROC",
    "MeanLoss",
    "MeanOfLogged",
    "Meter",
    "MultilabelAccuracy",
    "PerClassAccuracy",
    "PrecisionAtK",
    "PresentAccuracy",
    "RecallAtK",
    "Regression",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
