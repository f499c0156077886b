"""Meters by name (section METERS)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.meters.base import METERS, Meter
    from phasetrain.meters.classification.accuracy import Accuracy
    from phasetrain.meters.classification.at_k import PrecisionAtK, RecallAtK
    from phasetrain.meters.classification.auroc import AUROC, GroupedAUROC
    from phasetrain.meters.classification.average_precision import AveragePrecision
    from phasetrain.meters.classification.confusion_matrix import ConfusionMatrix
    from phasetrain.meters.classification.f1 import F1
    from phasetrain.meters.classification.multilabel_accuracy import MultilabelAccuracy
    from phasetrain.meters.classification.per_class_accuracy import PerClassAccuracy
    from phasetrain.meters.loss import MeanLoss, MeanOfLogged
    from phasetrain.meters.regression import Regression
else:
    __getattr__, __dir__ = export_lazily(__name__)

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
    "RecallAtK",
    "Regression",
]
