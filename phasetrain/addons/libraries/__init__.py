"""Parts of other libraries by their own names: timm, torchvision, transformers, and others."""

from phasetrain.config.addons import AddOn

PACKAGE = "phasetrain.addons.libraries"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_parts(
        "dataset",
        {
            "huggingface": f"{PACKAGE}.huggingface",
            "sklearn": f"{PACKAGE}.scikit_learn",
            "webdataset": f"{PACKAGE}.webdataset",
        },
    )
    addon.add_parts(
        "format of weights", dict.fromkeys(("huggingface", "timm"), f"{PACKAGE}.weight_formats")
    )
    addon.add_parts("task", {"lightning": f"{PACKAGE}.lightning_module"})
    addon.add_bridges(
        "transform",
        {
            "albumentations": f"{PACKAGE}.albumentations",
            "torchvision": f"{PACKAGE}.torchvision_transforms",
        },
    )
    addon.add_bridges(
        "model",
        {
            "timm": f"{PACKAGE}.models.timm",
            "torchvision": f"{PACKAGE}.models.torchvision",
            "transformers": f"{PACKAGE}.models.transformers",
        },
    )
    addon.add_bridges(
        "optimizer",
        {
            "timm": f"{PACKAGE}.optimizers",
            "schedulefree": f"{PACKAGE}.optimizers",
            "pytorch_optimizer": f"{PACKAGE}.optimizers",
            "bitsandbytes": f"{PACKAGE}.optimizers",
        },
    )
    addon.add_bridges(
        "schedule",
        {
            "torch": f"{PACKAGE}.optimizers",
            "timm": f"{PACKAGE}.optimizers",
        },
    )
    addon.add_bridges(
        "meter",
        {
            "torchmetrics": f"{PACKAGE}.torchmetrics",
        },
    )
    addon.add_bridges(
        "dataset",
        {
            "torchvision": f"{PACKAGE}.torchvision",
        },
    )
    addon.add_service(
        "describe_lightning_module", f"{PACKAGE}.lightning_module:describe_lightning_module"
    )
    addon.add_service(
        "transform_with_torchvision", f"{PACKAGE}.torchvision_fields:transform_with_torchvision"
    )
    addon.add_service("wrap_metric", f"{PACKAGE}.torchmetrics:TorchMetric")
