"""Metrics of classification and regression: areas under curves, F1, confusion matrices, errors."""

from phasetrain.config.addons import AddOn

PACKAGE = "phasetrain.addons.metrics"


def register(addon: AddOn) -> None:
    """Declare the parts of this add-on."""
    addon.add_parts(
        "meter",
        {
            "auroc": f"{PACKAGE}.auroc",
            "average_precision": f"{PACKAGE}.average_precision",
            "confusion_matrix": f"{PACKAGE}.confusion_matrix",
            "f1": f"{PACKAGE}.f1",
            "grouped_auroc": f"{PACKAGE}.auroc",
            "multilabel_accuracy": f"{PACKAGE}.multilabel_accuracy",
            "per_class_accuracy": f"{PACKAGE}.per_class_accuracy",
            "precision_at_k": f"{PACKAGE}.at_k",
            "present_accuracy": f"{PACKAGE}.present_accuracy",
            "recall_at_k": f"{PACKAGE}.at_k",
            "regression": f"{PACKAGE}.regression",
        },
    )
    addon.add_service("adapt_metric_function", f"{PACKAGE}.function_meter:adapt_metric_function")
    addon.add_service("compute_average_precision", f"{PACKAGE}.ranking:compute_average_precision")
