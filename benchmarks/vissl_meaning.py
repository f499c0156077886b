"""What VISSL does with a config, for the comparison with its conversion in `vissl_configs.py`.

Written from VISSL's behaviour, and independent of the converter: transforms and their parameters, layers of
heads, options of losses, and for each parameter whether it trains, whether it is loaded from a file, its
learning rate and its weight decay at any point of the training.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    StepParamScheduler,
    StepWithFixedGammaParamScheduler,
)

from phasetrain.addons.vissl.compose import VisslConfig

Schedule = Callable[[float], float]
SETTINGS = "MODEL.FEATURE_EVAL_SETTINGS"
OPTIMIZER = "OPTIMIZER"

Op = tuple[Any, ...]
"""A transform: its name, then its parameters."""


# --- transforms


def list_ops(items: Sequence[Mapping[str, Any]]) -> list[list[Op]]:
    """Return the transforms of each view of an image, in VISSL; one list: a single view."""
    common: list[Op] = []
    views: list[list[Op]] = []
    for item in items:
        name = item["name"]
        if name == "ImgReplicatePil":
            views = [[] for _ in range(item.get("num_times", 2))]
        elif name == "ImgPilToMultiCrop":
            for count, size, scale in zip(
                item["num_crops"], item["size_crops"], item["crop_scales"], strict=True
            ):
                views += [[("crop", size, tuple(map(float, scale)), 2)] for _ in range(count)]
        elif name == "ImgPilMultiCropRandomApply":
            inner = [op for one in item["transforms"] for op in _read_op(one)]
            for view, chance in zip(views, item["prob"], strict=True):
                view += _scale_chances(inner, float(chance))
        elif views:
            for view in views:
                view += _read_op(item)
        else:
            common += _read_op(item)
    return [common + view for view in views] if views else [common]


def _read_op(item: Mapping[str, Any]) -> list[Op]:
    """Return a transform of VISSL; each one has its probability as the second entry."""
    name = item["name"]
    get = item.get
    if name in ("ToTensor", "ImgPilToTensor"):
        return []
    if name == "RandomResizedCrop":
        scale = tuple(map(float, get("scale", (0.08, 1.0))))
        return [("crop", item["size"], scale, get("interpolation", 2))]
    if name == "RandomHorizontalFlip":
        return [("flip", float(get("p", 0.5)))]
    if name == "CenterCrop":
        return [("center", item["size"])]
    if name == "Normalize":
        return [("normalize", tuple(item["mean"]), tuple(item["std"]))]
    if name == "Resize":
        return [("resize", item["size"], get("interpolation", 2))]
    if name == "ImgPilColorDistortion":
        strength = get("strength", 1.0)
        jitter = tuple(round(value * strength, 6) for value in (0.8, 0.8, 0.8, 0.2))
        return [("jitter", 0.8, jitter), ("gray", 0.2)]
    if name == "ImgPilGaussianBlur":
        return [("blur", float(get("p", 0.5)), (get("radius_min", 0.1), get("radius_max", 2.0)))]
    if name == "ImgPilRandomSolarize":
        return [("solarize", float(get("p", 0.66)), (0, 256))]
    if name == "MNISTImgPil2RGB":
        size, (left, top) = item.get("size", 28), item.get("box", [0, 0])
        return [("pad", (left, top, size - 28 - left, size - 28 - top))] if size != 28 else []
    if name == "ImgRotatePil":
        return [("rotate", get("num_angles", 4))]
    if name == "ColorJitter":
        keys = ("brightness", "contrast", "saturation", "hue")
        return [("jitter", 1.0, tuple(_as_tuple(get(key, 0)) for key in keys))]
    rest = {key: value for key, value in item.items() if key != "name"}
    return [(name, tuple(sorted(rest.items())))]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _scale_chances(ops: Sequence[Op], chance: float) -> list[Op]:
    """Return transforms that are applied with a further probability."""
    if chance == 0:
        return []
    return [(name, round(own * chance, 9), *rest) for name, own, *rest in ops]


def list_converted_ops(items: Sequence[Mapping[str, Any]]) -> list[list[Op]]:
    """Return the transforms of each view of an image, in an experiment."""
    common = [op for item in items if item["name"] != "multi_crop" for op in _read_item(item)]
    for item in items:
        if item["name"] == "multi_crop":
            views = []
            for group in item["groups"]:
                inner = [op for one in group["transforms"] for op in _read_item(one)]
                views += [common + inner for _ in range(group["views"])]
            return views
    return [common]


def _read_item(item: Mapping[str, Any]) -> list[Op]:
    name = item["name"].removeprefix("torchvision.")
    get = item.get
    if name == "apply":
        inner = [op for one in item["transforms"] for op in _read_item(one)]
        return _scale_chances(inner, item["probability"])
    if name in ("random_resized_crop", "RandomResizedCrop"):
        scale = tuple(map(float, get("scale", (0.08, 1.0))))
        return [("crop", item["size"], scale, get("interpolation", 2))]
    if name == "random_flip":
        return [("flip", float(get("probability", 0.5)))]
    if name == "center_crop":
        return [("center", item["size"])]
    if name == "normalize":
        return [("normalize", tuple(item["mean"]), tuple(item["std"]))]
    if name == "Resize":
        return [("resize", item["size"], get("interpolation", 2))]
    if name == "ColorJitter":
        keys = ("brightness", "contrast", "saturation", "hue")
        return [("jitter", 1.0, tuple(_as_tuple(get(key, 0)) for key in keys))]
    if name == "RandomGrayscale":
        return [("gray", get("p", 0.1))]
    if name == "GaussianBlur":
        return [("blur", 1.0, tuple(item["sigma"]))]
    if name == "random_solarize":
        return [("solarize", item["probability"], tuple(get("threshold", (0, 256))))]
    if name == "Pad":
        return [("pad", tuple(item["padding"]))]
    if name == "rotate":
        return [("rotate", 4)]
    rest = {key: value for key, value in item.items() if key != "name"}
    if name == "RandAugment":
        # Its operations are torchvision's, which a note says.
        return [("RandAugment", ())]
    return [(name, tuple(sorted(rest.items())))]


# --- heads


@dataclass
class HeadWeight:
    """A weight of a head in VISSL.

    Attributes:
        name: its name, such as `heads.0.clf.0.weight`.
        kind: `linear`, `norm` or `other`.
        trains: whether it has a gradient.
    """

    name: str
    kind: str
    trains: bool = True


@dataclass
class HeadShape:
    """A head in VISSL.

    Attributes:
        layers: width, batch norm, activation and dropout of each layer.
        weights: in the order of the modules.
        prototypes: number of prototypes; 0: none.
        scale: whether their norms train.
        input_norm: whether the input is normalized.
        optional: names of biases before a batch norm, which have no effect.
    """

    layers: list[tuple[int, bool, str, bool]] = field(default_factory=list)
    weights: list[HeadWeight] = field(default_factory=list)
    prototypes: int = 0
    scale: bool = False
    input_norm: bool = False
    optional: set[str] = field(default_factory=set)
    biases: list[bool] = field(default_factory=list)


def read_heads(config: VisslConfig, key: str = "MODEL.HEAD.PARAMS") -> list[HeadShape]:
    """Return the heads of a config; several `mlp` in a row, if they are on one feature, are one."""
    items = list(config.get(key, []))
    if config.is_feature_extractor:
        return [_read_head(item, number, HeadShape()) for number, item in enumerate(items)]
    head = HeadShape()
    for number, item in enumerate(items):
        _read_head(item, number, head)
    return [head]


def _read_head(item: Any, number: int, head: HeadShape) -> HeadShape:
    name, params = item[0].removesuffix("_fsdp"), dict(item[1])
    prefix = f"heads.{number}"
    if name == "eval_mlp":
        head.input_norm = True
        _add_norm(head, f"{prefix}.channel_bn")
        _add_mlp(head, params, f"{prefix}.clf.clf")
    elif name == "mlp":
        _add_mlp(head, params, f"{prefix}.clf")
    elif name == "swav_head":
        widths = params["dims"][1:]
        place = 0
        for at, width in enumerate(widths):
            last = at == len(widths) - 1 and params.get("skip_last_bn", True)
            norm = params["use_bn"] and not last
            act = "none" if last else params.get("activation_name", "ReLU").lower()
            place = _add_layer(
                head,
                f"{prefix}.projection_head",
                place,
                (width, norm, act, False),
                params.get("use_bias", True),
            )
        head.prototypes = params["num_clusters"][0]
        if params.get("use_weight_norm_prototypes"):
            head.scale = not params.get("normalize_last_layer", False)
            head.weights.append(HeadWeight(f"{prefix}.prototypes0.weight_g", "linear", head.scale))
            head.weights.append(HeadWeight(f"{prefix}.prototypes0.weight_v", "linear"))
        else:
            head.weights.append(HeadWeight(f"{prefix}.prototypes0.weight", "linear"))
    elif name == "dino_head":
        hidden = [params.get("hidden_dim", 2048)] * (params.get("num_layers", 3) - 1)
        place = 0
        for width in hidden:
            place = _add_layer(head, f"{prefix}.mlp", place, (width, False, "gelu", False), True)
        _add_layer(
            head,
            f"{prefix}.mlp",
            place,
            (params.get("bottleneck_dim", 256), False, "none", False),
            True,
        )
        head.prototypes = params["num_clusters"][0]
        head.scale = not params.get("normalize_last_layer", True)
        head.weights.append(HeadWeight(f"{prefix}.prototypes0.weight_g", "linear", head.scale))
        head.weights.append(HeadWeight(f"{prefix}.prototypes0.weight_v", "linear"))
    elif name == "vision_transformer_head":
        if params.get("hidden_dim"):
            _add_named(
                head, f"{prefix}.layers.pre_logits", (params["hidden_dim"], False, "tanh", False)
            )
        _add_named(head, f"{prefix}.layers.head", (params["num_classes"], False, "none", False))
    elif name != "identity":
        raise ValueError(name)
    return head


def _add_mlp(head: HeadShape, params: Mapping[str, Any], prefix: str) -> None:
    widths = params["dims"][1:]
    place = 0
    for at, width in enumerate(widths):
        bare = at == len(widths) - 1 and params.get("skip_last_layer_relu_bn", True)
        layer = (
            width,
            bool(params.get("use_bn")) and not bare,
            "relu" if params.get("use_relu") and not bare else "none",
            bool(params.get("use_dropout")) and not bare,
        )
        place = _add_layer(head, prefix, place, layer, params.get("use_bias", True))


def _add_layer(
    head: HeadShape, prefix: str, place: int, layer: tuple[int, bool, str, bool], bias: bool
) -> int:
    head.layers.append(layer)
    head.biases.append(bias or layer[1])
    head.weights.append(HeadWeight(f"{prefix}.{place}.weight", "linear"))
    if bias:
        head.weights.append(HeadWeight(f"{prefix}.{place}.bias", "linear"))
        if layer[1]:
            head.optional.add(f"{prefix}.{place}.bias")
    place += 1
    if layer[1]:
        _add_norm(head, f"{prefix}.{place}")
        place += 1
    return place + (layer[2] != "none") + layer[3]


def _add_named(head: HeadShape, name: str, layer: tuple[int, bool, str, bool]) -> None:
    head.layers.append(layer)
    head.biases.append(True)
    head.weights += [HeadWeight(f"{name}.{part}", "linear") for part in ("weight", "bias")]


def _add_norm(head: HeadShape, name: str) -> None:
    head.weights += [HeadWeight(f"{name}.{part}", "norm") for part in ("weight", "bias")]


def read_converted_head(section: Mapping[str, Any]) -> HeadShape:
    """Return layers and prototypes of a head of an experiment."""
    get = section.get
    norm = bool(get("batch_norm"))
    head = HeadShape(input_norm=bool(get("input_norm")))
    if section["name"] == "prototypes":
        hidden = [(width, norm, "relu" if norm else "gelu", False) for width in section["hidden"]]
        head.layers = [*hidden, (section["bottleneck"], False, "none", False)]
        head.prototypes, head.scale = section["dimensions"], bool(get("trained_scale"))
        head.biases = [True] * len(head.layers)
        return head
    act = get("activation", "relu")
    drops = bool(get("dropout"))
    hidden = [(width, norm, act, drops) for width in section["hidden"]]
    last = section.get("dimensions", section.get("classes"))
    final = (last, norm, act, drops) if get("last_hidden") else (last, False, "none", False)
    head.layers = [*hidden, final]
    head.biases = [True] * len(hidden) + [bool(get("last_bias", True)) or bool(get("last_hidden"))]
    return head


# --- losses


def list_loss_options(config: VisslConfig, batch_size: int) -> dict[str, Any]:
    """Return the options of a self-supervised loss: key of the experiment -> value."""
    loss = str(config.get("LOSS.name"))

    def read(key: str) -> Any:
        return config.get(f"LOSS.{loss}.{key}")

    if "simclr" in loss:
        return {"LOSS.temperature": read("temperature")}
    if loss == "moco_loss":
        return {
            "LOSS.temperature": read("temperature"),
            "LOSS.queue": read("queue_size"),
            "LOSS.symmetric": False,
            "TASK.momentum": read("momentum"),
            "TASK.momentum_end": read("momentum"),
        }
    if loss == "swav_loss":
        length = int(read("queue.queue_length"))
        clusters = config.get("MODEL.HEAD.PARAMS")[0][1]["num_clusters"]
        return {
            "LOSS.temperature": read("temperature"),
            "LOSS.epsilon": read("epsilon"),
            "LOSS.iterations": read("num_iters"),
            "LOSS.code_views": len(read("crops_for_assign")),
            "LOSS.prototypes": clusters[0],
            "LOSS.queue": length - length % batch_size or None,
            "LOSS.queue_updates": read("queue.start_iter") if length else None,
            "LOSS.power_law": read("shk_powerlaw") or None,
            "LOSS.projected": bool(read("normalize_last_layer")),
        }
    if loss == "dino_loss":
        trunk = str(config.get("MODEL.TRUNK.NAME"))
        dropped = config.get("MODEL.TRUNK.VISION_TRANSFORMERS.DROP_PATH_RATE")
        kept = not (trunk.startswith(("vision", "convit")) and dropped)
        return {
            "LOSS.student_temperature": read("student_temp"),
            "LOSS.teacher_temperature": read("teacher_temp_max"),
            "LOSS.warmup_temperature": read("teacher_temp_min"),
            "LOSS.warmup_updates": read("teacher_temp_warmup_iters"),
            "LOSS.center_momentum": read("ema_center"),
            "TASK.momentum": read("momentum"),
            "TASK.teacher_views": len(read("crops_for_teacher")),
            "TASK.teacher_drop_path": None if kept else False,
        }
    if loss == "barlow_twins_loss":
        return {
            "LOSS.off_diagonal": read("lambda_"),
            "LOSS.scale": read("scale_loss"),
            "LOSS.joint": True,
        }
    if loss == "nce_loss_with_memory":
        return {
            "LOSS.temperature": read("temperature"),
            "LOSS.negatives": read("negative_sampling_params.num_negatives"),
            "LOSS.momentum": read("memory_params.momentum"),
        }
    if loss == "deepclusterv2_loss":
        return {
            "LOSS.temperature": read("temperature"),
            "LOSS.clusters": read("num_clusters"),
            "LOSS.iterations": read("kmeans_iters"),
        }
    if loss == "dino_distillation_loss":
        return {
            "LOSS.student_temperature": read("student_temperature"),
            "LOSS.teacher_temperature": read("teacher_temperature"),
            "LOSS.swapped": read("swapped_assignment"),
            "TASK.teacher_views": read("teacher_num_crops"),
        }
    if loss == "distillation_loss":
        return {
            "TASK.temperature": float(read("temperature")),
            "TASK.soft_share": float(read("soft_target_alpha")),
        }
    return {}


# --- schedules


def make_schedules(config: VisslConfig, epochs: int) -> dict[str, tuple[Schedule, bool]]:
    """Return the schedules of VISSL: name -> values as a function of the progress, and whether they
    change at the start of an epoch only."""
    found = {}
    schedulers = config.get("OPTIMIZER.param_schedulers")
    for name in ("lr", "lr_head", "weight_decay", "weight_decay_head"):
        params = deepcopy(schedulers.get(name))
        own = config.get("OPTIMIZER.head_optimizer_params.use_different_lr")
        if not params or "name" not in params or (name == "lr_head" and not own):
            continue
        if name.startswith("lr"):
            _scale_rates(config, params)
        # The default of VISSL's configs; its warm restarts change in each step.
        usual = "step" if params["name"] == "cosine_warm_restart" else "epoch"
        held = params.get("update_interval", usual) == "epoch"
        found[name] = (_make_schedule(params, epochs), held)
    return found


def _scale_rates(config: VisslConfig, params: dict[str, Any]) -> None:
    scaling = params.get("auto_lr_scaling", {})
    if not scaling.get("auto_scale"):
        return
    nodes, per_node = (
        int(config.get(f"DISTRIBUTED.{key}")) for key in ("NUM_NODES", "NUM_PROC_PER_NODE")
    )
    samples = int(config.get("DATA.TRAIN.BATCHSIZE_PER_REPLICA"))
    factor = samples * nodes * per_node / scaling["base_lr_batch_size"]
    if scaling.get("scaling_type", "linear") == "sqrt":
        factor = math.sqrt(factor)
    start = scaling["base_value"] * samples * per_node / scaling["base_lr_batch_size"]
    _apply_rate(params, scaling["base_value"] * factor, start, single=nodes == 1)


def _apply_rate(params: dict[str, Any], rate: float, start: float, *, single: bool) -> None:
    name = params["name"]
    if "cosine" in name:
        params["end_value"] = rate * params["end_value"] / params["start_value"]
        params["start_value"] = rate
    elif name in ("multistep", "step"):
        values = params["values"]
        gamma = round(values[1] / values[0], 6) if len(values) > 1 else 1.0
        params["values"] = [round(rate * gamma**at, 8) for at in range(len(values))]
    elif name == "linear":
        params["end_value"] = rate
    elif name == "constant":
        params["value"] = rate
    elif name == "step_with_fixed_gamma":
        params["base_value"] = rate
    elif name == "composite":
        parts = params["schedulers"]
        for part in parts:
            _apply_rate(part, rate, start, single=single)
        kept = []
        for part in parts:
            if part["name"] == "linear":
                part["start_value"] = start
                if single and start <= part["end_value"]:
                    continue
            kept.append(part)
        params["schedulers"] = kept
        if len(kept) == 1:
            params.update(kept[0])


def _make_schedule(params: Mapping[str, Any], epochs: int) -> Schedule:
    name = params["name"]
    if name == "constant":
        return ConstantParamScheduler(params["value"])
    if name == "linear":
        return LinearParamScheduler(params["start_value"], params["end_value"])
    if name == "cosine":
        return CosineParamScheduler(params["start_value"], params["end_value"])
    if name == "multistep":
        return MultiStepParamScheduler(params["values"], epochs, params["milestones"])
    if name == "step":
        return StepParamScheduler(epochs, params["values"])
    if name == "step_with_fixed_gamma":
        return StepWithFixedGammaParamScheduler(
            params["base_value"], params["num_updates"], params["gamma"], epochs
        )
    if name == "cosine_warm_restart":
        return _Restarts(params)
    if name == "composite":
        scaling = params.get("interval_scaling") or ["scaled"] * len(params["schedulers"])
        return CompositeParamScheduler(
            [_make_schedule(part, epochs) for part in params["schedulers"]],
            list(params["lengths"]),
            ["fixed" if one == "fixed" else "rescaled" for one in scaling],
        )
    raise ValueError(name)


class _Restarts:
    """Cosines that restart after each period, which is half a wave, or after a whole wave."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.start, self.end = params["start_value"], params["end_value"]
        self.period = params["restart_interval_length"]
        self.half = params.get("wave_type", "half") == "half"
        self.decay = params.get("lr_multiplier", 1.0)
        self.adaptive = params.get("is_adaptive", False)

    def __call__(self, where: float) -> float:
        step = self.period if self.half else 2 * self.period
        starts = [0.0]
        while (following := self.period + (len(starts) - 1) * step) < 1.0:
            starts.append(following)
        number = sum(one <= where for one in starts) - 1
        peak = self.start * self.decay**number
        if self.adaptive:
            begin = starts[number] + (0 if self.half else self.period)
            peak = self._wave(self.start, begin)
        within = where % self.period if self.half else where
        return self._wave(peak, within / self.period)

    def _wave(self, peak: float, phase: float) -> float:
        return self.end + (peak - self.end) * (1 + math.cos(math.pi * phase)) / 2


# --- groups of parameters


@dataclass(frozen=True)
class Options:
    """What the optimizer of VISSL does with a parameter.

    Attributes:
        lr: schedule of its learning rate, and whether it changes at the start of an epoch only.
        factor: factor of the learning rate.
        decay: schedule of its weight decay, in the same form.
    """

    lr: tuple[Schedule, bool]
    factor: float
    decay: tuple[Schedule, bool]


class Groups:
    """The groups that VISSL's constructors make.

    Args:
        config: the config.
        epochs: number of epochs.
        depth: number of blocks of a transformer.
    """

    def __init__(self, config: VisslConfig, epochs: int, depth: int = 0) -> None:
        self.config = config
        self.schedules = make_schedules(config, epochs)
        self.constructor = str(config.get(f"{OPTIMIZER}.param_group_constructor"))
        self.depth = depth
        self.single = bool(
            config.get(f"{OPTIMIZER}.construct_single_param_group_only")
            or config.get("MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP")
        )

    def options(self, name: str, kind: str) -> Options:
        """Return the options of a parameter.

        Args:
            name: its name in VISSL.
            kind: `linear` (and convolutions), `norm` or `other`.
        """
        read = self.config.get
        decay = float(read(f"{OPTIMIZER}.weight_decay"))
        main = self.schedules.get("weight_decay", (ConstantParamScheduler(decay), False))
        lr = self.schedules["lr"]
        none = (ConstantParamScheduler(0.0), False)
        if self.constructor in ("dino", "lr_decay"):
            bare = name.endswith(".bias") or "norm" in name
            return Options(lr, self._layer_factor(name), none if bare else main)
        if self.constructor == "linear_eval_heads":
            match = re.search(r"heads\.([0-9]+)", name)
            assert match is not None, name
            entry = read(f"{OPTIMIZER}.linear_eval_heads")[int(match[1])]
            own = (ConstantParamScheduler(entry.get("weight_decay", decay)), False)
            return Options(lr, entry["lr"], own if self._decays(name, kind) else none)
        if self.single:
            return Options(lr, 1.0, main)
        if "head" in name and kind != "other":
            params = f"{OPTIMIZER}.head_optimizer_params"
            if read(f"{params}.use_different_lr"):
                lr = self.schedules["lr_head"]
            if read(f"{params}.use_different_wd"):
                decay = float(read(f"{params}.weight_decay"))
            constant = (ConstantParamScheduler(decay), False)
            main = self.schedules.get("weight_decay_head", constant)
        words = list(read(f"{OPTIMIZER}.non_regularized_parameters", []))
        keeps = self._decays(name, kind) and not any(word in name for word in words)
        return Options(lr, 1.0, main if keeps else none)

    def _decays(self, name: str, kind: str) -> bool:
        norms, biases = (
            bool(self.config.get(f"{OPTIMIZER}.{key}"))
            for key in ("regularize_bn", "regularize_bias")
        )
        is_bias = name.endswith(".bias")
        if kind == "norm":
            return norms and (biases or not is_bias)
        return kind == "other" or biases or not is_bias

    def _layer_factor(self, name: str) -> float:
        if self.constructor != "lr_decay":
            return 1.0
        base = float(self.config.get(f"{OPTIMIZER}.layer_wise_lr_decay.decay"))
        if "heads" in name:
            layer = self.depth + 1
        elif any(word in name for word in ("patch_embed", "pos_embed", "cls_token")):
            layer = 0
        else:
            match = re.search(r"blocks\.([0-9]+)\.", name)
            layer = int(match[1]) + 1 if match else self.depth
        return base ** (self.depth + 1 - layer)


def freezes_trunk(config: VisslConfig) -> bool:
    """Return whether the weights of the trunk are frozen."""
    keys = ("FREEZE_TRUNK_ONLY", "FREEZE_TRUNK_AND_HEAD")
    evaluates = config.get(f"{SETTINGS}.EVAL_MODE_ON")
    return bool(evaluates and any(config.get(f"{SETTINGS}.{key}") for key in keys))


def loads_head(config: VisslConfig) -> bool:
    """Return whether the weights of the head are loaded from the file."""
    if not config.get(f"{SETTINGS}.EVAL_MODE_ON"):
        return True
    return bool(config.get(f"{SETTINGS}.EVAL_TRUNK_AND_HEAD"))


def name_in_trunk(config: VisslConfig, name: str) -> str:
    """Return VISSL's name of a weight of the trunk, from its name in torchvision or timm."""
    trunk = str(config.get("MODEL.TRUNK.NAME"))
    base = "trunk.base_model." if config.is_feature_extractor else "trunk."
    if trunk.startswith("resnet"):
        return f"{base}_feature_blocks.{name}"
    if trunk.startswith("alexnet"):
        if name.startswith("sobel."):
            return base + name
        return f"{base}_feature_blocks.{name.removeprefix('features.')}"
    if trunk == "convit":
        for ours, theirs in (
            ("cls_token", "class_token"),
            ("pos_embed", "pos_embedding"),
            ("mlp.fc", "mlp.linear_"),
            ("gating_param", "alpha"),
        ):
            name = name.replace(ours, theirs)
    return base + name


def iterate_points(updates_per_epoch: int, epochs: int) -> Iterator[tuple[int, float, float]]:
    """Yield updates of a training, spread over all of it, with their progress and the progress at the
    start of their epoch."""
    total = updates_per_epoch * epochs
    for update in sorted({0, 1, total // 20, total // 7, total // 3, total // 2, total - 1}):
        yield update, update / total, update // updates_per_epoch / epochs
