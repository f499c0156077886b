"""VISSL's section OPTIMIZER: learning rates as a peak and multipliers, groups, schedules."""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.data import count_processes
from phasetrain.addons.vissl.draft import ExperimentDraft

LR = "OPTIMIZER.param_schedulers.lr"
WEIGHT_DECAY = "OPTIMIZER.param_schedulers.weight_decay"
NAMES = {"pos_embedding": "pos_embed", "class_token": "cls_token"}
"""Names of weights in VISSL's transformers -> in timm's."""

REGULARIZE = ("OPTIMIZER.regularize_bn", "OPTIMIZER.regularize_bias")
FSDP = "MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP"
NAMED_NORMS = tuple(
    f"timm.{name}" for name in ("vit", "convit", "xcit", "swin", "beit", "convnext")
)
"""Trunks whose norms have names with `norm`, here and in VISSL."""

OPTIMIZER_OPTIONS = (
    *("name", "momentum", "nesterov", "betas", "trust", "clip", "all_weights", "joint_norm"),
)
"""Keys of OPTIMIZER that a second optimizer has, too."""


class UnknownScheduleError(ValueError):
    """A schedule without counterpart; the message says which one."""


def convert_optimizer(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write the optimizer, its groups and schedules, and the number of epochs."""
    if source.is_extraction:
        draft.deactivate("OPTIMIZER.", "nothing is trained")
        return
    draft.put("PHASES.epochs", int(source.get("OPTIMIZER.num_epochs")), "OPTIMIZER.num_epochs")
    _convert_method(source, draft)
    _convert_lr(source, draft)
    _convert_weight_decay(source, draft)
    _convert_groups(source, draft)
    if source.get("MODEL.GRAD_CLIP.USE_GRAD_CLIP"):
        keys = ("MODEL.GRAD_CLIP.USE_GRAD_CLIP", "MODEL.GRAD_CLIP.MAX_NORM")
        draft.put("OPTIMIZER.clip_norm", float(source.get("MODEL.GRAD_CLIP.MAX_NORM")), *keys)
    else:
        draft.deactivate("MODEL.GRAD_CLIP.", "gradients are not clipped")


def _convert_method(source: VisslConfig, draft: ExperimentDraft) -> None:
    name = str(source.get("OPTIMIZER.name"))
    if name in ("sgd", "sgd_fsdp", "lars"):
        larc = bool(source.get("OPTIMIZER.use_larc"))
        method = "lars" if larc or name == "lars" else "sgd"
        draft.put("OPTIMIZER.name", method, "OPTIMIZER.name")
        for option in ("momentum", "nesterov"):
            draft.put(
                f"OPTIMIZER.{option}", source.get(f"OPTIMIZER.{option}"), f"OPTIMIZER.{option}"
            )
        if larc:
            clip = bool(source.get("OPTIMIZER.larc_config.clip"))
            draft.translate("OPTIMIZER.name", "OPTIMIZER.use_larc")
            draft.put("OPTIMIZER.clip", clip, "OPTIMIZER.larc_config.clip")
            trust = float(source.get("OPTIMIZER.larc_config.trust_coefficient"))
            draft.put("OPTIMIZER.trust", trust, "OPTIMIZER.larc_config.trust_coefficient")
            # LARC scales biases and norms, too.
            draft.put("OPTIMIZER.all_weights", value=True)
            draft.translate("OPTIMIZER.all_weights", "OPTIMIZER.use_larc")
        elif method == "lars":
            exclude = "OPTIMIZER.exclude_bias_and_norm"
            draft.put("OPTIMIZER.all_weights", not source.get(exclude, default=False), exclude)
            draft.put("OPTIMIZER.joint_norm", value=True)
    elif name in ("adam", "adamw", "adamw_mt"):
        draft.put("OPTIMIZER.name", name.removesuffix("_mt"), "OPTIMIZER.name")
        draft.put("OPTIMIZER.betas", list(source.get("OPTIMIZER.betas")), "OPTIMIZER.betas")
        draft.skip(f"{name} has no momentum", "OPTIMIZER.momentum", "OPTIMIZER.nesterov")
    else:
        draft.put("OPTIMIZER.name", "RMSprop", "OPTIMIZER.name")
        if name != "rmsprop":
            draft.miss(f"the optimizer {name}", "OPTIMIZER.name")
    if not source.get("OPTIMIZER.use_larc"):
        draft.deactivate("OPTIMIZER.larc_config.", "OPTIMIZER.use_larc is false")
    if source.get("OPTIMIZER.use_zero"):
        draft.put("DISTRIBUTED.strategy", "zero", "OPTIMIZER.use_zero")


def _convert_lr(source: VisslConfig, draft: ExperimentDraft) -> None:
    scheduler: dict[str, Any] = deepcopy(source.get(LR))
    keys = [key for key in source.given if key.startswith(f"{LR}.")]
    _scale(source, scheduler)
    try:
        peak, schedule = convert_schedule(scheduler)
    except UnknownScheduleError as error:
        draft.miss(str(error), *keys)
        draft.put("OPTIMIZER.lr", 0.1)
        draft.put("OPTIMIZER.SCHEDULES", {})
        return
    draft.put("OPTIMIZER.lr", peak)
    draft.put("OPTIMIZER.SCHEDULES.lr", schedule)
    draft.translate("OPTIMIZER.lr, OPTIMIZER.SCHEDULES.lr", *keys)


def _convert_weight_decay(source: VisslConfig, draft: ExperimentDraft) -> None:
    keys = [key for key in source.given if key.startswith(f"{WEIGHT_DECAY}.")]
    value = float(source.get("OPTIMIZER.weight_decay"))
    if keys:
        try:
            value, schedule = convert_schedule(source.get(WEIGHT_DECAY), peak="start")
            draft.put("OPTIMIZER.SCHEDULES.weight_decay", schedule, *keys)
            draft.skip("its schedule replaces it", "OPTIMIZER.weight_decay")
        except UnknownScheduleError as error:
            draft.miss(str(error), *keys)
    draft.put("OPTIMIZER.weight_decay", value)
    if not keys:
        draft.translate("OPTIMIZER.weight_decay", "OPTIMIZER.weight_decay")


def _scale(source: VisslConfig, scheduler: dict[str, Any]) -> None:
    """Scale the learning rates of a schedule with the batch size, the way VISSL does."""
    scaling = scheduler.get("auto_lr_scaling", {})
    if not scaling.get("auto_scale"):
        return
    per_process = int(source.get("DATA.TRAIN.BATCHSIZE_PER_REPLICA"))
    factor = per_process * count_processes(source) / scaling["base_lr_batch_size"]
    if scaling.get("scaling_type") == "sqrt":
        factor = math.sqrt(factor)
    _set_peak(scheduler, float(scaling["base_value"]) * factor)
    if scheduler["name"] != "composite":
        return
    # VISSL starts a warm-up at the learning rate of one node, and drops it if there is one node.
    per_node = per_process * int(source.get("DISTRIBUTED.NUM_PROC_PER_NODE"))
    start = float(scaling["base_value"]) * per_node / scaling["base_lr_batch_size"]
    kept = []
    for part in scheduler["schedulers"]:
        if part["name"] == "linear":
            part["start_value"] = start
            if int(source.get("DISTRIBUTED.NUM_NODES")) == 1 and start <= part["end_value"]:
                continue
        kept.append(part)
    scheduler["schedulers"] = kept
    if len(kept) == 1:
        scheduler.update(kept[0])


def _set_peak(scheduler: dict[str, Any], peak: float) -> None:
    name = scheduler["name"]
    if "cosine" in name:
        ratio = scheduler["end_value"] / scheduler["start_value"]
        scheduler.update(start_value=peak, end_value=peak * ratio)
    elif name in ("multistep", "step"):
        values = scheduler["values"]
        factor = round(values[1] / values[0], 6) if len(values) > 1 else 1.0
        scheduler["values"] = [peak * factor**at for at in range(len(values))]
    elif name == "step_with_fixed_gamma":
        scheduler["base_value"] = peak
    elif name == "linear":
        scheduler["end_value"] = peak
    elif name == "inverse_sqrt":
        scheduler["start_value"] = peak
    elif name == "constant":
        scheduler["value"] = peak
    for part in scheduler.get("schedulers", []) if name == "composite" else []:
        _set_peak(part, peak)


def convert_schedule(
    scheduler: Mapping[str, Any], peak: str = "largest"
) -> tuple[float, dict[str, Any]]:
    """Return the value of an option, and the schedule of its multipliers.

    Args:
        scheduler: a schedule of VISSL, in absolute values.
        peak: which value of the schedule has the multiplier 1: `largest` or `start`.

    Raises:
        UnknownScheduleError: it has no counterpart.
    """
    # Multipliers are relative to OPTIMIZER.lr, the peak; for weight decay, to its first value.
    top = _first_value(scheduler) if peak == "start" else _largest_value(scheduler)
    schedule = _convert_part(scheduler, top or 1.0)
    per_epoch = scheduler.get("update_interval", "epoch") == "epoch"
    if per_epoch and schedule["name"] not in ("constant", "multistep", "step"):
        schedule["every"] = "epoch"
    return round(top, 10), schedule


def _convert_part(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    name = str(scheduler["name"])
    convert = PARTS.get(name)
    if convert is None:
        raise UnknownScheduleError(f"the schedule {name}")
    return convert(scheduler, top)


def _convert_constant(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    value = _share(scheduler["value"], top)
    if value == 1:
        return {"name": "constant"}
    return {"name": "linear", "start": value, "end": value}


def _convert_linear(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    ends = {key: _share(scheduler[f"{key}_value"], top) for key in ("start", "end")}
    return {"name": "linear", **ends}


def _convert_cosine(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    ends = [_share(scheduler[f"{key}_value"], top) for key in ("start", "end")]
    if math.isclose(ends[0], 1, rel_tol=1e-6):
        return {"name": "cosine", "end": ends[1]}
    # half a wave between any two values
    return {"name": "one_cycle", "rise": 0.0, "start": ends[0], "peak": ends[0], "end": ends[1]}


def _convert_restarts(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    period = float(scheduler["restart_interval_length"])
    start, end = (float(scheduler[f"{key}_value"]) for key in ("start", "end"))
    adaptive = bool(scheduler.get("is_adaptive"))
    # A whole wave is two periods long, and the schedule starts in the middle of one, at its peak.
    half = scheduler.get("wave_type", "half") == "half"
    decay = float(scheduler.get("lr_multiplier", 1.0))
    if half and not adaptive and math.isclose(start, top, rel_tol=1e-6):
        schedule = {"name": "cosine_restarts", "period": period, "end": _share(end, top)}
        return schedule if decay == 1 else {**schedule, "decay": decay}
    parts: list[dict[str, Any]] = []
    # A period may be rounded, such as 0.334 or 0.333: a last wave of less than 1 % is none.
    count = math.ceil(round(1 / period, 2))
    for number in range(count):
        restart = number if half else (number + 1) // 2
        peak = start * decay**restart
        if adaptive:
            begin = period * (restart if half else max(2 * restart, 1))
            peak = end + (start - end) * (1 + math.cos(math.pi * begin)) / 2
        ends = (end, peak) if not half and number % 2 else (peak, end)
        first, last = (_share(value, top) for value in ends)
        wave = {"name": "one_cycle", "rise": 0.0, "start": first, "peak": first, "end": last}
        parts.append({**wave, "length": period})
    del parts[-1]["length"]
    if (whole := period * count) > 1:
        parts[-1]["until"] = round(1 - (whole - 1) / period, 10)
    return {"name": "composite", "parts": parts}


def _convert_steps(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    values = list(scheduler["values"])
    return {"name": "step", "factor": _find_factor(values), "every": 1 / len(values)}


def _convert_fixed_gamma(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    return {
        "name": "step",
        "factor": scheduler["gamma"],
        "every": 1 / (scheduler["num_updates"] + 1),
    }


def _convert_polynomial(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    return {"name": "polynomial", "power": scheduler["power"]}


def _convert_composite(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    scaling = list(scheduler.get("interval_scaling") or [])
    if len(scheduler.get("lengths") or []) != len(scheduler["schedulers"]):
        raise UnknownScheduleError("a composite schedule without a length of each part")
    for at, part in enumerate(scheduler["schedulers"]):
        converted = _convert_part(part, top)
        length = float(scheduler["lengths"][at])
        # Parts of a part follow each other in the list: a composite has no composite inside.
        inner = converted["parts"] if converted["name"] == "composite" else [converted]
        if at < len(scaling) and scaling[at] == "fixed":
            converted["scaling"] = "fixed"
        for entry in inner:
            entry["length"] = length * entry.get("length", 1.0)
        parts += inner
    # The last part lasts until the end.
    del parts[-1]["length"]
    return {"name": "composite", "parts": parts}


def _convert_multistep(scheduler: Mapping[str, Any], top: float) -> dict[str, Any]:
    values = list(scheduler["values"])
    if len(values) == 1:
        return {"name": "constant"}
    milestones = [f"{epoch} epochs" for epoch in scheduler["milestones"]]
    schedule = {"name": "multistep", "milestones": milestones, "factor": _find_factor(values)}
    if not math.isclose(values[0], top, rel_tol=1e-6):
        raise UnknownScheduleError("steps that do not start at the peak")
    return schedule


PARTS: Mapping[str, Callable[[Mapping[str, Any], float], dict[str, Any]]] = {
    "composite": _convert_composite,
    "constant": _convert_constant,
    "linear": _convert_linear,
    "cosine": _convert_cosine,
    "cosine_warm_restart": _convert_restarts,
    "multistep": _convert_multistep,
    "step": _convert_steps,
    "step_with_fixed_gamma": _convert_fixed_gamma,
    "polynomial": _convert_polynomial,
}
"""Schedule of VISSL -> its converter, which gets it and the value with the multiplier 1."""


def _find_factor(values: list[float]) -> float:
    factor = round(values[1] / values[0], 6)
    for value, following in pairwise(values):
        if not math.isclose(following, value * factor, rel_tol=1e-3):
            raise UnknownScheduleError(f"steps by different factors, {values}")
    return float(factor)


def _share(value: float, top: float) -> float:
    return round(float(value) / top, 10)


def _first_value(scheduler: Mapping[str, Any]) -> float:
    if scheduler["name"] == "composite":
        return _first_value(scheduler["schedulers"][0])
    for key in ("start_value", "value", "base_value"):
        if key in scheduler:
            return float(scheduler[key])
    return float(scheduler["values"][0])


def _largest_value(scheduler: Mapping[str, Any]) -> float:
    name = str(scheduler["name"])
    if name == "composite":
        return max(_largest_value(part) for part in scheduler["schedulers"])
    if name in ("multistep", "step"):
        return max(map(float, scheduler["values"]))
    if name in ("step_with_fixed_gamma", "polynomial"):
        return float(scheduler["base_value"])
    if name == "constant":
        return float(scheduler["value"])
    return max(float(scheduler.get("start_value", 0.0)), float(scheduler.get("end_value", 0.0)))


def _convert_groups(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write rules for the weights that do not decay, and for learning rates of layers."""
    groups: list[dict[str, Any]] = draft.experiment["OPTIMIZER"].pop("groups", [])
    constructor = str(source.get("OPTIMIZER.param_group_constructor"))
    draft.translate("OPTIMIZER.groups", "OPTIMIZER.param_group_constructor")
    head = "OPTIMIZER.head_optimizer_params."
    if constructor == "default":
        rules = _make_default_rules(source, draft)
        groups += _convert_head_options(source, draft, rules) + rules
    elif constructor in ("dino", "lr_decay"):
        reason = f"the constructor {constructor} does not read it"
        draft.skip(reason, "OPTIMIZER.non_regularized_parameters", *REGULARIZE)
        for prefix in (head, f"{LR}_head.", f"{WEIGHT_DECAY}_head."):
            draft.deactivate(prefix, reason)
        groups += _make_named_rules(draft)
    if constructor == "lr_decay":
        groups += _convert_layer_decay(source, draft)
    elif constructor == "linear_eval_heads":
        groups += _convert_eval_heads(source, draft)
    if constructor != "lr_decay":
        draft.deactivate("OPTIMIZER.layer_wise_lr_decay.", f"the constructor is {constructor}")
    if groups:
        draft.put("OPTIMIZER.groups", groups)


def _make_default_rules(source: VisslConfig, draft: ExperimentDraft) -> list[dict[str, Any]]:
    """Return rules for the weights that do not decay with VISSL's constructor `default`."""
    words = list(source.get("OPTIMIZER.non_regularized_parameters", []))
    words_key = "OPTIMIZER.non_regularized_parameters"
    if _has_single_group(source):
        draft.skip("all weights are in one group of VISSL, and decay", *REGULARIZE, words_key)
        draft.translate("OPTIMIZER.groups", "OPTIMIZER.construct_single_param_group_only")
        return []
    if draft.experiment["OPTIMIZER"]["weight_decay"] == 0:
        draft.skip("nothing decays", *REGULARIZE, words_key)
        return []
    norms = bool(source.get("OPTIMIZER.regularize_bn"))
    biases = bool(source.get("OPTIMIZER.regularize_bias"))
    rules: list[dict[str, Any]] = []
    if not norms:
        rules.append({"types": "*Norm*", "weight_decay": 0.0})
    if not biases:
        rules.append({"match": "*.bias", "weight_decay": 0.0})
    draft.translate("OPTIMIZER.groups", *REGULARIZE)
    if str(_trunk_section(draft).get("name")).startswith("timm.convnext") and not norms:
        draft.miss("norms of ConvNeXt, which decay in VISSL only", *REGULARIZE)
    for word in words:
        # VISSL's transformers but ConViT have timm's names, in which these words are not found.
        if word in NAMES and "convit" not in str(_trunk_section(draft).get("name")):
            draft.skip("VISSL's weights have no such names, so that all decay", words_key)
        else:
            rules.append({"match": f"*{NAMES.get(word, word)}*", "weight_decay": 0.0})
            draft.translate("OPTIMIZER.groups", words_key)
    return rules


def _make_named_rules(draft: ExperimentDraft) -> list[dict[str, Any]]:
    """Return rules for the weights that do not decay because of their names."""
    rules = [{"match": "*.bias", "weight_decay": 0.0}]
    # The batch norms of convolutional networks, and those of heads, have other names.
    if str(_trunk_section(draft).get("name")).startswith(NAMED_NORMS):
        prefix = "trunk." if "trunk" in draft.experiment["MODEL"] else ""
        rules.append({"match": f"{prefix}*norm*", "weight_decay": 0.0})
    return rules


def _trunk_section(draft: ExperimentDraft) -> Mapping[str, Any]:
    model: Mapping[str, Any] = draft.experiment.get("MODEL", {})
    section: Mapping[str, Any] = model.get("trunk", model)
    return section


def _convert_layer_decay(source: VisslConfig, draft: ExperimentDraft) -> list[dict[str, Any]]:
    """Write the learning rates of layers, and return the rule for the last norm."""
    decay = float(source.get("OPTIMIZER.layer_wise_lr_decay.decay"))
    keys = ("OPTIMIZER.param_group_constructor", "OPTIMIZER.layer_wise_lr_decay.decay")
    if not str(_trunk_section(draft).get("name")).startswith("timm.vit"):
        draft.miss("layers of a trunk other than a vision transformer", *keys)
        return []
    draft.put("OPTIMIZER.layer_decay", decay, *keys)
    # VISSL counts the last norm to the last block.
    prefix = "trunk." if "trunk" in draft.experiment["MODEL"] else ""
    return [{"match": f"{prefix}norm.*", "lr_scale": decay}]


def _convert_eval_heads(source: VisslConfig, draft: ExperimentDraft) -> list[dict[str, Any]]:
    """Return a rule for the options of each head."""
    key = "OPTIMIZER.linear_eval_heads"
    entries = list(source.get(key, []))
    labels = list(draft.experiment.get("MODEL", {}).get("heads", {}))
    has_own_norms = any("regularize_bn" in entry for entry in entries)
    if len(labels) != len(entries) or not source.is_feature_extractor or has_own_norms:
        draft.miss("options of heads other than learning rate and weight decay", key)
        return []
    default = float(source.get("OPTIMIZER.weight_decay"))
    rules = [
        {"match": f"heads.{label}.*", "lr_scale": float(entry["lr"])}
        | {"weight_decay": float(entry.get("weight_decay", default))}
        for label, entry in zip(labels, entries, strict=True)
    ]
    draft.translate("OPTIMIZER.groups", key)
    if not source.get(REGULARIZE[0]):
        rules.append({"types": "*Norm*", "weight_decay": 0.0})
    if not source.get(REGULARIZE[1]):
        rules.append({"match": "*.bias", "weight_decay": 0.0})
    return rules


def _convert_head_options(
    source: VisslConfig, draft: ExperimentDraft, rules: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a rule for the head, or write a second optimizer for it if its schedules differ.

    Args:
        source: the config.
        draft: takes the optimizer.
        rules: rules for weights that do not decay, of the whole model.
    """
    params = "OPTIMIZER.head_optimizer_params"
    optimizer = draft.experiment["OPTIMIZER"]
    schedules = optimizer["SCHEDULES"]
    rate, schedule = optimizer["lr"], schedules.get("lr")
    lr_keys = [key for key in source.given if key.startswith(f"{LR}_head.")]
    wd_keys = [key for key in source.given if key.startswith(f"{WEIGHT_DECAY}_head.")]
    if _has_single_group(source) or draft.head_pattern is None:
        for prefix in (f"{params}.", f"{LR}_head.", f"{WEIGHT_DECAY}_head."):
            draft.deactivate(prefix, "the head has no group of its own")
        return []
    if source.get(f"{params}.use_different_lr"):
        scheduler = deepcopy(source.get(f"{LR}_head"))
        _scale(source, scheduler)
        try:
            rate, schedule = convert_schedule(scheduler)
        except UnknownScheduleError as error:
            draft.miss(str(error), *lr_keys)
            return []
    decay, decay_schedule = _read_head_decay(source)
    if schedule != schedules.get("lr") or decay_schedule != schedules.get("weight_decay"):
        options = {"lr": (rate, schedule), "weight_decay": (decay, decay_schedule)}
        return _write_head_optimizer(draft, options, rules)
    group: dict[str, Any] = {}
    if decay != optimizer["weight_decay"]:
        group["weight_decay"] = decay
    if rate != optimizer["lr"]:
        group["lr_scale"] = round(rate / optimizer["lr"], 6)
    keys = [f"{params}.use_different_lr", f"{params}.use_different_wd", f"{params}.weight_decay"]
    if group:
        draft.translate("OPTIMIZER.groups", *keys, *lr_keys)
    draft.deactivate(f"{LR}_head.", "the head has the learning rate of the trunk")
    draft.deactivate(f"{params}.", "the head has no options of its own")
    draft.skip("the same schedule as that of all weights", *wd_keys)
    return [{"match": draft.head_pattern, **group}] if group else []


def _read_head_decay(source: VisslConfig) -> tuple[float, dict[str, Any] | None]:
    """Return the weight decay of the head and its schedule; None: it is constant."""
    if source.has(f"{WEIGHT_DECAY}_head"):
        return convert_schedule(source.get(f"{WEIGHT_DECAY}_head"), peak="start")
    params = "OPTIMIZER.head_optimizer_params"
    own = bool(source.get(f"{params}.use_different_wd"))
    return float(source.get(f"{params}.weight_decay" if own else "OPTIMIZER.weight_decay")), None


def _has_single_group(source: VisslConfig) -> bool:
    """Return whether VISSL puts all weights into one group, in which all decay."""
    return bool(source.get("OPTIMIZER.construct_single_param_group_only") or source.get(FSDP))


def _write_head_optimizer(
    draft: ExperimentDraft,
    options: Mapping[str, tuple[float, dict[str, Any] | None]],
    rules: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Write an optimizer for the head, whose schedules are its own; return no rules.

    Args:
        draft: takes the optimizer.
        options: option -> its value and schedule; None: it is constant.
        rules: rules for weights that do not decay, of the whole model.
    """
    source = draft.source
    keys = [
        key
        for key in source.given
        if key.startswith((f"{LR}_head.", f"{WEIGHT_DECAY}_head.", "OPTIMIZER.head_optimizer"))
    ]
    optimizer = draft.experiment["OPTIMIZER"]
    if "strategy" in draft.experiment.get("DISTRIBUTED", {}) or source.get(
        "MODEL.SHARDED_DDP_SETUP.USE_SDP"
    ):
        draft.miss("a sharding strategy, and other schedules for the head", *keys)
        return []
    entry: dict[str, Any] = {"match": draft.head_pattern}
    entry |= {key: optimizer[key] for key in OPTIMIZER_OPTIONS if key in optimizer}
    entry |= {option: value for option, (value, _) in options.items()}
    entry["SCHEDULES"] = {
        option: schedule or {"name": "constant"} for option, (_, schedule) in options.items()
    }
    own = [rule for rule in rules if "types" not in rule or draft.head_has_norms]
    if own and options["weight_decay"][0]:
        entry["groups"] = own
    draft.put("OPTIMIZER.others", {"head": entry}, *keys)
    draft.note("The head has schedules of its own, and so a second optimizer.")
    return []
