"""VISSL's section DATA as splits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.draft import ExperimentDraft
from phasetrain.addons.vissl.losses import SELF_SUPERVISED
from phasetrain.addons.vissl.transforms import TransformConverter, group_views, image_size
from phasetrain.errors import ConfigError

VIEW_COLLATORS = (
    "simclr_collator",
    "moco_collator",
    "multicrop_collator",
    "default_collate",
    "targets_one_hot_default_collator",
)
"""Collators that need no counterpart: transforms make the views."""

TORCHVISION_DATASETS = ("CIFAR10", "CIFAR100", "STL10", "MNIST", "SVHN")
"""Datasets of torchvision that VISSL has."""

SPLIT_BY_NAME = ("torchvision.STL10", "torchvision.SVHN")
"""Datasets of torchvision with a parameter `split` instead of `train`."""


def read_catalog(path: str | None) -> Mapping[str, Any]:
    """Return a dataset catalog of VISSL: name -> split -> paths of images and of labels.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return {}
    try:
        catalog: Mapping[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"migrate vissl --catalog {path}: cannot be read: {error}; expected VISSL's "
            "dataset_catalog.json",
            code="file.unreadable",
        ) from error
    return catalog


def convert_data(source: VisslConfig, draft: ExperimentDraft, catalog: Mapping[str, Any]) -> None:
    """Write the splits TRAIN and TEST."""
    if source.get("TEST_ONLY"):
        draft.deactivate("DATA.TRAIN.", "TEST_ONLY reads no training data")
    else:
        _convert_split(source, draft, "TRAIN", catalog)
    tests = bool(source.get("TEST_MODEL")) and bool(source.get("DATA.TEST.DATA_SOURCES"))
    # With TEST_ONLY there is nothing but the test.
    tests = tests or bool(source.get("TEST_ONLY"))
    if tests and source.get("DATA.TEST.DATA_SOURCES"):
        _convert_split(source, draft, "TEST", catalog)
        draft.translate("DATA.TEST", "TEST_MODEL")
        every = source.get("TEST_EVERY_NUM_EPOCH")
        if every != 1:
            draft.put("PHASES.test_every.epochs", every, "TEST_EVERY_NUM_EPOCH")
            draft.note(
                f"Tests follow epochs {every}, {2 * every}, ... and the last; those of VISSL "
                f"follow epochs 1, {every + 1}, ... and the last."
            )
    else:
        reason = "TEST_MODEL is false, or DATA.TEST has no DATA_SOURCES"
        draft.deactivate("DATA.TEST.", reason)
        draft.skip(f"{reason}: there is no split TEST", "TEST_MODEL", "TEST_EVERY_NUM_EPOCH")


def count_processes(source: VisslConfig) -> int:
    """Return the number of processes of all nodes."""
    nodes = int(source.get("DISTRIBUTED.NUM_NODES", 1))
    return nodes * int(source.get("DISTRIBUTED.NUM_PROC_PER_NODE", 1))


def _convert_split(
    source: VisslConfig, draft: ExperimentDraft, split: str, catalog: Mapping[str, Any]
) -> None:
    key = f"DATA.{split}"
    _convert_source(source, draft, key, catalog)
    # VISSL counts samples per process, phasetrain those of an update.
    processes = count_processes(source)
    draft.put(
        f"{key}.batch_size",
        int(source.get(f"{key}.BATCHSIZE_PER_REPLICA")) * processes,
        f"{key}.BATCHSIZE_PER_REPLICA",
        "DISTRIBUTED.NUM_NODES",
        "DISTRIBUTED.NUM_PROC_PER_NODE",
    )
    drop_last = bool(source.get(f"{key}.DROP_LAST"))
    draft.put(f"{key}.drop_last", drop_last, f"{key}.DROP_LAST")
    _convert_loading(source, draft, key)
    _convert_limit(source, draft, key)
    _convert_sampler(source, draft, key)
    _convert_transforms(source, draft, key)
    _convert_collator(source, draft, key)
    for name, usual in (("INPUT_KEY_NAMES", ["data"]), ("TARGET_KEY_NAMES", ["label"])):
        entries = source.get(f"{key}.{name}")
        if entries == usual:
            draft.skip("inputs and targets are the two entries of a sample", f"{key}.{name}")
        else:
            draft.miss(f"samples with the entries {', '.join(entries)}", f"{key}.{name}")


def _convert_source(
    source: VisslConfig, draft: ExperimentDraft, key: str, catalog: Mapping[str, Any]
) -> None:
    sources = list(source.get(f"{key}.DATA_SOURCES", []))
    if len(sources) > 1:
        draft.miss("several sources of one sample", f"{key}.DATA_SOURCES")
    source_type = str((sources or [""])[0])
    names = [f"{key}.{name}" for name in ("DATA_SOURCES", "DATASET_NAMES", "DATA_PATHS")]
    images, labels = _find_paths(source, draft, key, catalog)
    if source_type == "disk_folder":
        draft.put(f"{key}.dataset", "image_folder", *names)
        draft.put(f"{key}.path", images)
    elif source_type == "synthetic":
        draft.put(f"{key}.dataset", "synthetic", *names)
        draft.put(f"{key}.input_shape", [3, 224, 224])
        # Of TRAIN for both splits: their labels must have the same classes.
        classes = int(source.get("DATA.TRAIN.RANDOM_SYNTHETIC_LABELS") or 2)
        draft.put(f"{key}.classes", max(2, classes), f"{key}.RANDOM_SYNTHETIC_LABELS")
    elif source_type == "torchvision_dataset":
        name = str((source.get(f"{key}.DATASET_NAMES") or ["CIFAR10"])[0])
        draft.put(f"{key}.dataset", f"torchvision.{name}", *names)
        if name not in TORCHVISION_DATASETS:
            reason = f"VISSL has no dataset {name} of torchvision, and no label for each image"
            draft.miss(reason, f"{key}.DATASET_NAMES")
        draft.put(f"{key}.root", images)
        _put_torchvision_split(draft, key)
    else:
        draft.put(f"{key}.dataset", "file_list", *names)
        draft.put(f"{key}.images", images)
        if source.get(f"{key}.LABEL_SOURCES"):
            draft.put(f"{key}.labels", labels, f"{key}.LABEL_PATHS")
        _convert_list_source(source, draft, key, source_type)
    _convert_local_copy(source, draft, key)
    _convert_label_type(source, draft, key)


def _convert_local_copy(source: VisslConfig, draft: ExperimentDraft, key: str) -> None:
    wanted = f"{key}.COPY_TO_LOCAL_DISK"
    folder = f"{key}.COPY_DESTINATION_DIR"
    if not source.get(wanted):
        draft.skip("COPY_TO_LOCAL_DISK is false", folder)
    elif draft.experiment["DATA"][key.split(".")[1]]["dataset"] == "file_list":
        path = str(source.get(folder) or "/tmp/phasetrain")
        draft.put(f"{key}.local_copy", path, wanted, folder)
    else:
        draft.miss("only lists of files are copied to a local disk", wanted)


def _put_torchvision_split(draft: ExperimentDraft, key: str) -> None:
    trains = key.endswith("TRAIN")
    if draft.experiment["DATA"][key.split(".")[1]]["dataset"] in SPLIT_BY_NAME:
        draft.put(f"{key}.split", "train" if trains else "test")
    else:
        draft.put(f"{key}.train", trains)


def _convert_list_source(
    source: VisslConfig, draft: ExperimentDraft, key: str, source_type: str
) -> None:
    """Write the prefix of a list of files, and say if VISSL has no list."""
    if not source_type:
        draft.miss("the config names no data; complete it", f"{key}.DATA_SOURCES")
        draft.note(f"{key} names no data: set {key}.images and {key}.labels.")
    # everstore and airstore are converted as lists, which anyone outside of Meta has instead.
    elif source_type != "disk_filelist":
        draft.note(
            f"{key}: the source {source_type} is internal to Meta; list its images in a file."
        )
    prefix_keys = [f"{key}.REMOVE_IMG_PATH_PREFIX", f"{key}.NEW_IMG_PATH_PREFIX"]
    prefixes = [source.get(prefix_key, "") for prefix_key in prefix_keys]
    if any(prefixes):
        draft.put(f"{key}.replace_prefix", prefixes, *prefix_keys)


def _convert_label_type(source: VisslConfig, draft: ExperimentDraft, key: str) -> None:
    label_type = str(source.get(f"{key}.LABEL_TYPE"))
    label_keys = (f"{key}.LABEL_TYPE", f"{key}.LABEL_SOURCES")
    if label_type == "zero":
        draft.put(f"{key}.label_type", "zero", *label_keys)
    # Losses without labels ignore targets, and every sample has an index.
    elif not source.get(f"{key}.LABEL_SOURCES") or label_type == "sample_index":
        draft.put(f"{key}.label_type", "sample_index", *label_keys)
    else:
        draft.translate(f"{key}.dataset", *label_keys)


def _find_paths(
    source: VisslConfig, draft: ExperimentDraft, key: str, catalog: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the paths of images and labels: of the config, of the catalog, or placeholders."""
    images = list(source.get(f"{key}.DATA_PATHS", []))
    labels = list(source.get(f"{key}.LABEL_PATHS", []))
    if images:
        return str(images[0]), str((labels or [""])[0])
    name = str((source.get(f"{key}.DATASET_NAMES") or ["data"])[0])
    part = "train" if key.endswith("TRAIN") else "val"
    if name in catalog:
        paths = list(catalog[name].get(part, ["", ""]))
        return str(paths[0]), str(paths[-1])
    draft.note(
        f"{key}: the paths are placeholders, since {name!r} is a name in VISSL's catalog; give "
        "--catalog dataset_catalog.json, or set them."
    )
    if str((source.get(f"{key}.DATA_SOURCES") or [""])[0]) in ("disk_folder",):
        return f"{name}/{part}", ""
    if str((source.get(f"{key}.DATA_SOURCES") or [""])[0]) == "torchvision_dataset":
        return name, ""
    return f"{name}/{part}_images.npy", f"{name}/{part}_labels.npy"


def _convert_loading(source: VisslConfig, draft: ExperimentDraft, key: str) -> None:
    draft.put(f"{key}.workers", source.get("DATA.NUM_DATALOADER_WORKERS"))
    draft.translate("DATA.*.workers", "DATA.NUM_DATALOADER_WORKERS")
    # Without workers there is no process to start.
    if source.get("DATA.NUM_DATALOADER_WORKERS"):
        draft.put(f"{key}.start_method", source.get("MULTI_PROCESSING_METHOD"))
    draft.translate("DATA.*.start_method", "MULTI_PROCESSING_METHOD")
    if source.get("MACHINE.DEVICE") == "gpu":
        draft.put(f"{key}.pin_memory", bool(source.get("DATA.PIN_MEMORY")), "DATA.PIN_MEMORY")
        copies = bool(source.get("DATA.ENABLE_ASYNC_GPU_COPY"))
        draft.put(f"{key}.prefetch_to_device", copies, "DATA.ENABLE_ASYNC_GPU_COPY")
    else:
        reason = "MACHINE.DEVICE is cpu"
        draft.skip(reason, "DATA.PIN_MEMORY", "DATA.ENABLE_ASYNC_GPU_COPY")
    if source.get(f"{key}.ENABLE_QUEUE_DATASET"):
        draft.put(f"{key}.on_bad_sample", "substitute", f"{key}.ENABLE_QUEUE_DATASET")


def _convert_limit(source: VisslConfig, draft: ExperimentDraft, key: str) -> None:
    limit = int(source.get(f"{key}.DATA_LIMIT", -1))
    sampling = f"{key}.DATA_LIMIT_SAMPLING"
    synthetic = draft.experiment["DATA"][key.split(".")[1]]["dataset"] == "synthetic"
    if synthetic:
        # VISSL's synthetic dataset has 50,000 samples.
        draft.put(f"{key}.samples", limit if limit > 0 else 50000, f"{key}.DATA_LIMIT")
        draft.deactivate(f"{sampling}.", "synthetic samples are all alike")
        return
    if limit <= 0:
        draft.deactivate(f"{sampling}.", "there is no DATA_LIMIT")
        return
    subset = {"samples": limit, "seed": int(source.get(f"{sampling}.SEED", 0))}
    if source.get(f"{sampling}.IS_BALANCED"):
        subset["balanced"] = True
    if skip := source.get(f"{sampling}.SKIP_NUM_SAMPLES", 0):
        subset["skip"] = skip
    below = [name for name in source.given if name.startswith(sampling)]
    draft.put(f"{key}.subset", subset, f"{key}.DATA_LIMIT", *below)


def _convert_sampler(source: VisslConfig, draft: ExperimentDraft, key: str) -> None:
    stratified = f"{key}.STRATIFIED_SAMPLER"
    power_law = f"{key}.POWER_LAW_SAMPLER"
    if source.get(f"{stratified}.ENABLED"):
        sampler = {
            "name": "stratified",
            "classes_per_batch": source.get(f"{stratified}.CLASSES_PER_BATCH"),
        }
        keys = [name for name in source.given if name.startswith(stratified)]
        draft.put(f"{key}.sampler", sampler, *keys)
    elif source.get(f"{power_law}.ENABLED"):
        sampler = {"name": "power_law", "power": source.get(f"{power_law}.POWER")}
        draft.put(
            f"{key}.sampler",
            sampler,
            *[name for name in source.given if name.startswith(power_law)],
        )
    elif source.get(f"{key}.USE_DEBUGGING_SAMPLER"):
        draft.put(f"{key}.sampler", "sequential", f"{key}.USE_DEBUGGING_SAMPLER")
    if not source.get(f"{stratified}.ENABLED"):
        draft.deactivate(f"{stratified}.", "the sampler is not enabled")
    if not source.get(f"{power_law}.ENABLED"):
        draft.deactivate(f"{power_law}.", "the sampler is not enabled")


def _convert_transforms(source: VisslConfig, draft: ExperimentDraft, key: str) -> None:
    items = list(source.get(f"{key}.TRANSFORMS", []))
    converter = TransformConverter(draft, f"{key}.TRANSFORMS")
    common, views = converter.convert(items)
    if not views and source.get("LOSS.name") == "nce_loss_with_memory":
        # Its one view is compared with the memory.
        common, views = [], [common]
    transforms = [*common]
    if views:
        transforms.append(group_views(views))
    draft.put(f"{key}.transforms", transforms, f"{key}.TRANSFORMS")
    names = [item.get("name") for item in items]
    if "RandAugment" in names or "AutoAugment" in names:
        draft.note(f"{key}: RandAugment and AutoAugment are torchvision's, with other operations.")
    if "ImgPilGaussianBlur" in str(items):
        draft.note(f"{key}: the blur is torchvision's, close to Pillow's but not equal.")


def find_image_size(draft: ExperimentDraft, split: str = "TRAIN") -> int:
    """Return the side of the images that the model gets, in pixels."""
    items: Sequence[Any] = draft.experiment["DATA"][split]["transforms"]
    # The first views are the large ones, which decide the shape of the model.
    if items and items[-1]["name"] == "multi_crop":
        items = [*items[:-1], *items[-1]["groups"][0]["transforms"]]
    return image_size(list(items)) or 224


def _convert_collator(source: VisslConfig, draft: ExperimentDraft, key: str) -> None:
    name = str(source.get(f"{key}.COLLATE_FUNCTION"))
    collator_key = f"{key}.COLLATE_FUNCTION"
    below = [
        params_key
        for params_key in source.given
        if params_key.startswith(f"{key}.COLLATE_FUNCTION_PARAMS")
    ]
    if name in VIEW_COLLATORS:
        draft.skip("transforms make the views, and samples are stacked", collator_key, *below)
        return
    if name not in ("cutmixup_collator", "mixup_collator"):
        draft.miss(f"the collator {name}", collator_key)
        draft.deactivate(f"{key}.COLLATE_FUNCTION_PARAMS", f"belongs to the collator {name}")
        return
    params: Mapping[str, Any] = source.get(f"{key}.COLLATE_FUNCTION_PARAMS", {})
    if key.endswith("TEST"):
        draft.skip("tests are not mixed", collator_key, *below)
        return
    views = source.get("LOSS.name") in SELF_SUPERVISED
    if views and name == "mixup_collator":
        draft.miss("mixup of neighbours in a batch", collator_key, *below)
        return
    draft.put(
        "DATA.TRAIN.batch_transforms", _make_mixers(params, views=views), collator_key, *below
    )
    # VISSL's losses of views ignore targets, and with them label smoothing.
    smoothing = 0.0 if views else float(params.get("label_smoothing", 0.0))
    if smoothing:
        draft.put(
            "LOSS.label_smoothing", smoothing, f"{key}.COLLATE_FUNCTION_PARAMS.label_smoothing"
        )


def _make_mixers(params: Mapping[str, Any], *, views: bool) -> list[dict[str, Any]]:
    """Return mixup and cutmix, or one of them, as batch transforms."""
    mixers: list[dict[str, Any]] = []
    for mixer_name, usual in (("mixup", 1.0), ("cutmix", 0.0)):
        # An alpha of 0 switches a transform off, as in timm, where the collator is from.
        alpha = float(params.get(f"{mixer_name}_alpha", usual))
        if alpha > 0:
            mixers.append({"name": mixer_name, "alpha": alpha})
    chance = float(params.get("prob", 1.0))
    for mixer in mixers:
        if params.get("mode", "batch") != "batch":
            mixer["per"] = "sample"
        if chance < 1:
            mixer["probability"] = chance
    if len(mixers) < 2 and not views:
        return mixers
    choice: dict[str, Any] = {"name": "each_view" if views else "one_of", "transforms": mixers}
    if len(mixers) == 2:
        switch = float(params.get("switch_prob", 0.5))
        choice["weights"] = [1 - switch, switch]
    return [choice]
