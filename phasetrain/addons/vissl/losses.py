"""VISSL's sections LOSS and METERS."""

from collections.abc import Sequence
from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.draft import ExperimentDraft

CLASSIFIERS = (
    "CrossEntropyLoss",
    "cross_entropy_multiple_output_single_target",
    "bce_logits_multiple_output_single_target",
)
SELF_SUPERVISED = {
    "simclr_info_nce_loss": "simclr",
    "multicrop_simclr_info_nce_loss": "simclr",
    "moco_loss": "moco",
    "swav_loss": "swav",
    "dino_loss": "dino",
    "barlow_twins_loss": "barlow_twins",
    "nce_loss_with_memory": "npid",
    "deepclusterv2_loss": "deepcluster_v2",
    "dino_distillation_loss": "view_distillation",
}
"""Loss of VISSL -> loss here."""

METERS = {
    "accuracy_list_meter": "accuracy",
    "precision_at_k_list_meter": "precision_at_k",
    "recall_at_k_list_meter": "recall_at_k",
    "mean_ap_list_meter": "average_precision",
}
"""Meter of VISSL -> meter here."""


def convert_self_supervised(
    source: VisslConfig, draft: ExperimentDraft, loss: str, prototypes: Sequence[int]
) -> None:
    """Write a loss of views, and the task."""
    own = f"LOSS.{loss}"
    draft.put("TASK.name", "self_supervised")
    draft.put("LOSS.name", SELF_SUPERVISED[loss], "LOSS.name")
    if "simclr" in loss:
        draft.put("LOSS.temperature", source.get(f"{own}.temperature"), f"{own}.temperature")
    elif loss == "moco_loss":
        draft.put("LOSS.queue", source.get(f"{own}.queue_size"), f"{own}.queue_size")
        draft.put("LOSS.temperature", source.get(f"{own}.temperature"), f"{own}.temperature")
        # VISSL's queries are of the first view, and its keys of the second one.
        draft.put("LOSS.symmetric", value=False)
        momentum = source.get(f"{own}.momentum")
        draft.put("TASK.momentum", momentum, f"{own}.momentum")
        # The momentum of VISSL's MoCo is constant.
        draft.put("TASK.momentum_end", momentum, f"{own}.momentum")
    elif loss == "barlow_twins_loss":
        draft.put("LOSS.off_diagonal", source.get(f"{own}.lambda_"), f"{own}.lambda_")
        draft.put("LOSS.scale", source.get(f"{own}.scale_loss"), f"{own}.scale_loss")
        # VISSL standardizes both views as one batch.
        draft.put("LOSS.joint", value=True)
    elif loss == "nce_loss_with_memory":
        _convert_npid(source, draft, own)
    elif loss == "dino_loss":
        _convert_dino(source, draft, own)
    elif loss == "dino_distillation_loss":
        for key, target in (
            ("student_temperature", "LOSS.student_temperature"),
            ("teacher_temperature", "LOSS.teacher_temperature"),
            ("swapped_assignment", "LOSS.swapped"),
            ("teacher_num_crops", "TASK.teacher_views"),
        ):
            draft.put(target, source.get(f"{own}.{key}"), f"{own}.{key}")
    elif loss == "deepclusterv2_loss":
        _convert_deepcluster(source, draft, own)
    else:
        _convert_swav(source, draft, own, prototypes)


def _convert_npid(source: VisslConfig, draft: ExperimentDraft, own: str) -> None:
    for key, target in (
        ("negative_sampling_params.num_negatives", "LOSS.negatives"),
        ("temperature", "LOSS.temperature"),
        ("memory_params.momentum", "LOSS.momentum"),
        ("loss_type", "LOSS.contrast"),
    ):
        draft.put(target, source.get(f"{own}.{key}"), f"{own}.{key}")
    weights = list(source.get(f"{own}.loss_weights"))
    if weights == [1 / len(weights)] * len(weights):
        draft.skip("the loss is the mean over views", f"{own}.loss_weights")
    if float(source.get(f"{own}.norm_constant")) > 0:
        draft.miss("a constant that is not estimated from the first batch", f"{own}.norm_constant")


def _convert_dino(source: VisslConfig, draft: ExperimentDraft, own: str) -> None:
    for key, target in (
        ("student_temp", "LOSS.student_temperature"),
        ("teacher_temp_min", "LOSS.warmup_temperature"),
        ("teacher_temp_max", "LOSS.teacher_temperature"),
        ("ema_center", "LOSS.center_momentum"),
        ("momentum", "TASK.momentum"),
    ):
        draft.put(target, source.get(f"{own}.{key}"), f"{own}.{key}")
    updates = int(source.get(f"{own}.teacher_temp_warmup_iters"))
    if updates > 1:
        draft.put("LOSS.warmup_updates", updates, f"{own}.teacher_temp_warmup_iters")
    else:
        # The first update, if it is one, has the first temperature.
        draft.put("LOSS.warmup", 0.0, f"{own}.teacher_temp_warmup_iters")
    trunk = str(source.get("MODEL.TRUNK.NAME"))
    drop_path = "MODEL.TRUNK.VISION_TRANSFORMERS.DROP_PATH_RATE"
    # VISSL takes this rate from the teacher, and not the one of other trunks.
    if trunk.startswith(("vision_transformer", "convit")) and source.get(drop_path):
        draft.put("TASK.teacher_drop_path", value=False)
        draft.translate("TASK.teacher_drop_path", drop_path)
    taught = list(source.get(f"{own}.crops_for_teacher"))
    draft.put("TASK.teacher_views", len(taught), f"{own}.crops_for_teacher")
    if taught != list(range(len(taught))):
        draft.miss("teacher views other than the first ones", f"{own}.crops_for_teacher")


def _convert_deepcluster(source: VisslConfig, draft: ExperimentDraft, own: str) -> None:
    draft.put("LOSS.clusters", source.get(f"{own}.num_clusters"), f"{own}.num_clusters")
    draft.put("LOSS.iterations", source.get(f"{own}.kmeans_iters"), f"{own}.kmeans_iters")
    draft.put("LOSS.temperature", source.get(f"{own}.temperature"), f"{own}.temperature")
    key = f"{own}.memory_params.crops_for_mb"
    views = list(source.get(key))
    draft.put("LOSS.memory_views", len(views), key)
    if views != list(range(len(views))):
        draft.miss("a memory of other views than the first ones", key)


def _convert_swav(
    source: VisslConfig, draft: ExperimentDraft, own: str, prototypes: Sequence[int]
) -> None:
    for key, target in (
        ("temperature", "LOSS.temperature"),
        ("epsilon", "LOSS.epsilon"),
        ("num_iters", "LOSS.iterations"),
    ):
        draft.put(target, source.get(f"{own}.{key}"), f"{own}.{key}")
    views = list(source.get(f"{own}.crops_for_assign"))
    draft.put("LOSS.code_views", len(views), f"{own}.crops_for_assign")
    if views != list(range(len(views))):
        draft.miss("codes of other views than the first ones", f"{own}.crops_for_assign")
    prototype_sets = list(prototypes) or [3000]
    # Of the head: VISSL overwrites the number of the loss with it.
    draft.put("LOSS.prototypes", prototype_sets[0], f"{own}.num_prototypes")
    if len(prototype_sets) > 1:
        draft.miss("several sets of prototypes", "MODEL.HEAD.PARAMS")
    length = int(source.get(f"{own}.queue.queue_length"))
    # VISSL takes a multiple of the batch size.
    queue = length - length % int(draft.experiment["DATA"]["TRAIN"]["batch_size"])
    if queue:
        draft.put("LOSS.queue", queue, f"{own}.queue.queue_length")
        updates = int(source.get(f"{own}.queue.start_iter"))
        draft.put("LOSS.queue_updates", updates, f"{own}.queue.start_iter")
    else:
        draft.deactivate(f"{own}.queue.", "there is no queue")
    if source.get(f"{own}.normalize_last_layer"):
        draft.put("LOSS.projected", value=True)
        draft.translate("LOSS.projected", f"{own}.normalize_last_layer")
    else:
        draft.miss("prototypes that are not normalized", f"{own}.normalize_last_layer")
    if exponent := float(source.get(f"{own}.shk_powerlaw", 0.0)):
        draft.put("LOSS.power_law", exponent, f"{own}.shk_powerlaw")


def convert_classification(
    source: VisslConfig, draft: ExperimentDraft, labels: Sequence[str]
) -> None:
    """Write a loss of scores, one for each head."""
    loss = str(source.get("LOSS.name"))
    own = f"LOSS.{loss}"
    base: dict[str, Any] = {"name": "cross_entropy"}
    if loss.startswith("bce"):
        base = {"name": "BCEWithLogitsLoss"}
    if source.get(f"{own}.weight"):
        weight = source.get(f"{own}.weight")
        base = {"name": "CrossEntropyLoss", "weight": weight}
        draft.translate("LOSS.weight", f"{own}.weight")
    if loss == "distillation_loss":
        draft.put("TASK.temperature", float(source.get(f"{own}.temperature", 1.0)))
        draft.put("TASK.soft_share", float(source.get(f"{own}.soft_target_alpha", 1.0)))
        keys = [key for key in source.given if key.startswith(own)]
        draft.translate("TASK.temperature, TASK.soft_share", *keys)
        if "mse" in str(source.get(f"{own}.loss_type", "")):
            draft.miss("a distillation by the squared error", f"{own}.loss_type")
    ignored = f"{own}.ignore_index"
    if ignored in source.given and base["name"] == "cross_entropy":
        # A sum of losses cannot ignore targets on several ranks, and mixed targets are no classes.
        if labels or "batch_transforms" in draft.experiment["DATA"]["TRAIN"]:
            draft.note(f"A target of {source.get(ignored)} is an error here; VISSL ignores it.")
        else:
            base["ignore_index"] = int(source.get(ignored))
            draft.translate("LOSS.ignore_index", ignored)
    # The collator of mixup has been converted before, and may have put label smoothing here.
    smoothing = draft.experiment.get("LOSS", {})
    draft.experiment["LOSS"] = {**base, **smoothing}
    if labels:
        losses = {label: {**base, **smoothing, "output": label} for label in labels}
        draft.experiment["LOSS"] = {"name": "weighted_sum", "losses": losses}
    draft.translate(f"LOSS.name = {draft.experiment['LOSS']['name']}", "LOSS.name")


def convert_meters(source: VisslConfig, draft: ExperimentDraft, labels: Sequence[str]) -> None:
    """Write the meters, one for each head and k."""
    names = list(source.get("METERS.names", [])) or [source.get("METERS.name", "")]
    masked = bool(source.get("METERS.model_output_mask"))
    # VISSL reports the loss of tests without a meter.
    draft.put("METERS.loss", {})
    for vissl_meter in names:
        if not vissl_meter:
            continue
        meter = METERS.get(str(vissl_meter))
        if meter is None:
            draft.miss(f"the meter {vissl_meter}", "METERS.name", "METERS.names")
            continue
        if meter == "accuracy" and masked:
            meter = "present_accuracy"
            draft.translate("METERS.LABEL.name", "METERS.model_output_mask")
        _put_meters(source, draft, str(vissl_meter), meter, labels)
    for key in source.given:
        if key.startswith("METERS.") and key.count(".") > 1 and key.split(".")[1] not in names:
            draft.deactivate(key, f"the meter {key.split('.')[1]} is not used")


def _put_meters(
    source: VisslConfig, draft: ExperimentDraft, vissl_meter: str, meter: str, labels: Sequence[str]
) -> None:
    keys = ["METERS.name", "METERS.names"]
    topk = [1]
    if meter != "average_precision":
        topk = [int(k) for k in source.get(f"METERS.{vissl_meter}.topk_values", [1])]
        keys.append(f"METERS.{vissl_meter}.topk_values")
    for label in labels or [""]:
        for k in topk:
            name = "_".join(filter(None, (label, meter, f"top{k}" if k > 1 else "")))
            section: dict[str, Any] = {"name": meter}
            if k > 1:
                section["topk"] = k
            if label:
                section["output"] = label
            draft.put(f"METERS.{name}", section)
    draft.translate("METERS", *keys)
