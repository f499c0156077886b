"""Meters by name (section METERS)."""

from phasetrain.meters.accuracy import Accuracy
from phasetrain.meters.at_k import PrecisionAtK, RecallAtK
from phasetrain.meters.auroc import AUROC, GroupedAUROC
from phasetrain.meters.average_precision import AveragePrecision
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.bridge import TorchMetric
from phasetrain.meters.confusion_matrix import ConfusionMatrix
from phasetrain.meters.f1 import F1
from phasetrain.meters.loss import MeanLoss
from phasetrain.meters.multilabel_accuracy import MultilabelAccuracy
from phasetrain.meters.per_class_accuracy import PerClassAccuracy
from phasetrain.meters.perplexity import Perplexity
from phasetrain.meters.present_accuracy import PresentAccuracy
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
    "Meter",
    "MultilabelAccuracy",
    "PerClassAccuracy",
    "Perplexity",
    "PrecisionAtK",
    "PresentAccuracy",
    "RecallAtK",
    "Regression",
    "TorchMetric",
]
