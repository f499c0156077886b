"""Vision: augmentation, segmentation, detection, self-supervised learning, distillation, GANs."""

from phasetrain.config.addons import AddOn, PartPlace

PACKAGE = "phasetrain.addons.vision"
SECTIONS = f"{PACKAGE}.sections"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_parts(
        "model",
        {
            "alexnet": f"{PACKAGE}.alexnet",
            "conditional_gan": f"{PACKAGE}.conditional_gan",
            "resnet": f"{PACKAGE}.resnet",
            "resnet_cifar": f"{PACKAGE}.resnet_cifar",
            "trunk_head": f"{PACKAGE}.trunk_head",
            "trunk_heads": f"{PACKAGE}.trunk_heads",
            "unet": f"{PACKAGE}.unet",
        },
    )
    addon.add_parts(
        "head",
        {
            "projection": f"{PACKAGE}.trunk_head",
            "prototypes": f"{PACKAGE}.trunk_head",
        },
    )
    addon.add_parts(
        "loss",
        {
            "dice": f"{PACKAGE}.dice",
            "barlow_twins": f"{PACKAGE}.self_supervised_losses.barlow_twins",
            "byol": f"{PACKAGE}.self_supervised_losses.byol",
            "deepcluster_v2": f"{PACKAGE}.self_supervised_losses.deepcluster",
            "dino": f"{PACKAGE}.self_supervised_losses.dino",
            "moco": f"{PACKAGE}.self_supervised_losses.moco",
            "npid": f"{PACKAGE}.self_supervised_losses.npid",
            "simclr": f"{PACKAGE}.self_supervised_losses.simclr",
            "soft_targets": f"{PACKAGE}.soft_targets",
            "swav": f"{PACKAGE}.self_supervised_losses.swav",
            "view_distillation": f"{PACKAGE}.self_supervised_losses.view_distillation",
        },
    )
    addon.add_parts(
        "meter",
        {
            "frechet_distance": f"{PACKAGE}.frechet_distance",
            "mean_average_precision": f"{PACKAGE}.meters.detection",
            "dice": f"{PACKAGE}.meters.pixels",
            "mean_iou": f"{PACKAGE}.meters.pixels",
            "pixel_accuracy": f"{PACKAGE}.meters.pixels",
        },
    )
    addon.add_parts(
        "task",
        {
            "distillation": f"{PACKAGE}.distillation",
            "gan": f"{PACKAGE}.gan",
            "self_supervised": f"{PACKAGE}.self_supervised",
        },
    )
    addon.add_parts(
        "dataset",
        {
            "file_list": f"{PACKAGE}.file_list",
            "image_folder": f"{PACKAGE}.image_folder",
            "image_mask_folder": f"{PACKAGE}.masks.folder",
            "stamps": f"{PACKAGE}.masks.stamps",
        },
    )
    addon.add_parts("sampler", {"stratified": f"{PACKAGE}.stratified"})
    addon.add_parts(
        "batch transform",
        {
            name: f"{PACKAGE}.batch_transforms.{name}"
            for name in ("mixup", "cutmix", "one_of", "each_view")
        },
    )
    addon.add_parts(
        "transform",
        {
            "multi_crop": f"{PACKAGE}.multi_crop",
            **{
                name: f"{PACKAGE}.transforms.{name}"
                for name in (
                    "random_erase",
                    "random_resized_crop",
                    "random_rotate",
                    "random_solarize",
                    "rotate",
                )
            },
        },
    )
    addon.add_slots(
        PartPlace(
            "TASK.judge",
            "model",
            only=("TASK", "gan"),
            section=f"{SECTIONS}:TeacherSection",
        ),
        *(
            PartPlace(
                "TASK.teacher", "model", only=("TASK", name), section=f"{SECTIONS}:TeacherSection"
            )
            for name in ("distillation", "self_supervised")
        ),
        *(
            PartPlace(
                "MODEL.trunk", "model", only=("MODEL", name), section=f"{SECTIONS}:TrunkSection"
            )
            for name in ("trunk_head", "trunk_heads")
        ),
        PartPlace(
            "MODEL.heads.*",
            "model",
            only=("MODEL", "trunk_heads"),
            section=f"{SECTIONS}:HeadSection",
        ),
        *(
            PartPlace(
                f"MODEL.{place}",
                "head",
                provided=frozenset({"features"}),
                only=("MODEL", "trunk_head"),
            )
            for place in ("head", "predictor")
        ),
        PartPlace(
            "DATA.*.transforms[].groups[].transforms[]",
            "transform",
            only=("DATA.*.transforms[]", "multi_crop"),
        ),
        PartPlace(
            "DATA.*.transforms[].groups[].transforms[].transforms[]",
            "transform",
            only=("DATA.*.transforms[].groups[].transforms[]", "apply"),
        ),
        *(
            PartPlace(
                "DATA.TRAIN.batch_transforms[].transforms[]",
                "batch transform",
                only=("DATA.TRAIN.batch_transforms[]", name),
            )
            for name in ("one_of", "each_view")
        ),
    )
    for name in ("assign_rows", "find_clusters"):
        addon.add_service(name, f"{PACKAGE}.clustering:{name}")
    addon.add_service("split_boxes", f"{PACKAGE}.meters.detection:split_boxes")
    addon.add_service("check_spatial_targets", f"{PACKAGE}.spatial_targets:check_spatial_targets")
