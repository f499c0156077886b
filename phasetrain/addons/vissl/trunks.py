"""VISSL's trunks as models of torchvision and timm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.draft import ExperimentDraft

Params = dict[str, Any]


@dataclass(frozen=True)
class Trunk:
    """A trunk.

    Attributes:
        section: `name` and parameters of the model.
        cut: the last layer, which a head replaces.
        layers: VISSL's names of features -> names of modules.
        blocks: class of the blocks, for activation checkpointing.
        depth: number of blocks of a transformer; 0: another model.
        prefix: regular expression of VISSL's prefix of its weights within the trunk; None: their
            names differ.
        inner: prefix of the same weights in the model.
    """

    section: Params
    cut: str
    layers: Mapping[str, str] = field(default_factory=dict)
    blocks: str = ""
    depth: int = 0
    prefix: str | None = None
    inner: str = ""


RESNET_LAYERS = {
    "conv1": "relu",
    "res1": "maxpool",
    "res2": "layer1",
    "res3": "layer2",
    "res4": "layer3",
    "res5": "layer4",
    "res5avg": "avgpool",
    "flatten": "avgpool",
}
REGNET_LAYERS = {
    "conv1": "stem",
    "res2": "trunk_output.block1",
    "res3": "trunk_output.block2",
    "res4": "trunk_output.block3",
    "res5": "trunk_output.block4",
    "res5avg": "avgpool",
    "avgpool": "avgpool",
    "flatten": "avgpool",
}
ALEXNET_LAYERS = {
    name: f"features.{at}"
    for at, name in enumerate(
        ("conv1", "pool1", "conv2", "pool2", "conv3", "conv4", "conv5", "pool5")
    )
}
TORCHVISION_REGNETS = (
    "400mf",
    "800mf",
    "1_6gf",
    "3_2gf",
    "8gf",
    "16gf",
    "32gf",
    "128gf",
)


def convert_trunk(
    source: VisslConfig, draft: ExperimentDraft, base: str = "MODEL", *, views: bool = False
) -> Trunk | None:
    """Return the trunk of a model; None: it has no counterpart, which is recorded.

    Args:
        source: the config.
        draft: takes the report.
        base: section of the model, MODEL or DISTILLATION.TEACHER_MODEL.
        views: whether it gets images of several sizes.
    """
    name = str(source.get(f"{base}.TRUNK.NAME")).removesuffix("_fsdp")
    maker = TRUNKS.get(name)
    trunk_key = f"{base}.TRUNK"
    used = f"{trunk_key}.{USED_SECTION.get(name, 'none')}"
    for key in source.given:
        shared = name == "convit" and ".VISION_TRANSFORMERS" in key
        own = key.startswith(used) or key == f"{trunk_key}.NAME" or shared
        if key.startswith(f"{trunk_key}.") and not own:
            draft.deactivate(key, f"the trunk is {name}")
    trunk = maker(source, draft, trunk_key, views) if maker is not None else None
    below = [key for key in source.given if key.startswith(used)]
    if trunk is None:
        draft.miss(f"the trunk {name} exists in VISSL only", f"{trunk_key}.NAME")
        draft.deactivate(f"{trunk_key}.", f"the trunk {name} has no counterpart")
        return None
    target = "MODEL.trunk" if base == "MODEL" else "TASK.teacher"
    draft.translate(f"{target} = {trunk.section['name']}", f"{trunk_key}.NAME", *below)
    return trunk


def _convert_resnet(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    own = f"{trunk_key}.RESNETS"
    depth = int(source.get(f"{own}.DEPTH", 50))
    width = int(source.get(f"{own}.WIDTH_MULTIPLIER", 1))
    stride = int(source.get(f"{own}.LAYER4_STRIDE", 2))
    params: Params = {}
    for key, option, usual in (
        ("GROUPS", "groups", 1),
        ("WIDTH_PER_GROUP", "width_per_group", 64),
        ("ZERO_INIT_RESIDUAL", "zero_init_residual", False),
    ):
        value = source.get(f"{own}.{key}", usual)
        if value != usual:
            params[option] = value
    if source.get(f"{own}.NORM", "BatchNorm") != "BatchNorm":
        draft.miss("a ResNet with another norm than batch norm", f"{own}.NORM")
    # torchvision's name where it has the model: readers know it, and its weights fit.
    if depth == 200 or width != 1 or stride != 2:
        section: Params = {"name": "resnet", "depth": depth}
        if width != 1:
            section["width"] = width
        if stride != 2:
            section["last_stride"] = stride
    else:
        section = {"name": f"torchvision.resnet{depth}"}
    if params:
        section["params"] = params
    block = "BasicBlock" if depth < 50 else "Bottleneck"
    return Trunk(section, "fc", RESNET_LAYERS, block, prefix=r"_feature_blocks\.")


def _convert_regnet(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    own = f"{trunk_key}.REGNET"
    name = str(source.get(f"{own}.name", ""))
    if name.removeprefix("regnet_y_").removeprefix("regnet_x_") in TORCHVISION_REGNETS:
        section: Params = {"name": f"torchvision.{name}"}
        return Trunk(section, "fc", REGNET_LAYERS, "ResBottleneckBlock")
    params: Params = {}
    keys = {"depth": "depth", "w_0": "w0", "w_a": "wa", "w_m": "wm", "group_width": "group_size"}
    for key, option in keys.items():
        value = source.get(f"{own}.{key}")
        if value is None:
            return None
        params[option] = value
    layers = {"res5": "final_conv", "res5avg": "head.global_pool", "avgpool": "head.global_pool"}
    # Any RegNetY of timm would do: the parameters replace all of its sizes.
    section = {"name": "timm.regnety_002", "params": params}
    return Trunk(section, "head.fc", layers, "Bottleneck")


def _convert_efficientnet(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    version = str(source.get(f"{trunk_key}.EFFICIENT_NETS.model_version", "B0")).lower()
    section: Params = {"name": f"torchvision.efficientnet_{version}"}
    if rate := source.get(f"{trunk_key}.EFFICIENT_NETS.drop_connect_rate"):
        section["params"] = {"stochastic_depth_prob": rate}
    return Trunk(section, "classifier", {"res5avg": "avgpool", "flatten": "avgpool"}, "MBConv")


def _convert_mobilenet(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    name = str(source.get(f"{trunk_key}.MOBILE_NET.NAME"))
    return Trunk({"name": f"timm.{name}"}, "classifier", {"flatten": "global_pool"})


def _convert_alexnet(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    # The other AlexNets of VISSL have grouped convolutions and local response norm.
    section: Params = {"name": "alexnet", "sobel": True}
    if source.get(f"{trunk_key}.NAME") == "alexnet_rotnet":
        section = {"name": "alexnet", "widths": [64, 192, 384, 256, 256]}
    prefix = r"_feature_blocks\."
    return Trunk(section, "head", ALEXNET_LAYERS, prefix=prefix, inner="features.")


def _read_params(source: VisslConfig, own: str, options: Mapping[str, str]) -> Params:
    """Return parameters of a model: option -> value of the key below `own`, without null."""
    values = {option: source.get(f"{own}.{key}") for option, key in options.items()}
    return {option: value for option, value in values.items() if value is not None}


TRANSFORMER = {
    "img_size": "IMAGE_SIZE",
    "patch_size": "PATCH_SIZE",
    "embed_dim": "HIDDEN_DIM",
    "depth": "NUM_LAYERS",
    "num_heads": "NUM_HEADS",
    "proj_drop_rate": "DROPOUT_RATE",
    "attn_drop_rate": "ATTENTION_DROPOUT_RATE",
    "drop_path_rate": "DROP_PATH_RATE",
    "qkv_bias": "QKV_BIAS",
}
"""Parameter of timm's transformers -> key of VISSL."""


def _convert_vit(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    own = f"{trunk_key}.VISION_TRANSFORMERS"
    params = _read_params(source, own, TRANSFORMER)
    params["mlp_ratio"] = source.get(f"{own}.MLP_DIM") / params["embed_dim"]
    # VISSL drops out patches and positions with the same rate.
    if params.get("proj_drop_rate"):
        params["pos_drop_rate"] = params["proj_drop_rate"]
    # Crops of several sizes need interpolated position embeddings.
    if views:
        params["dynamic_img_size"] = True
    layers: dict[str, str] = {}
    if source.get(f"{own}.USE_CLASS_TOKEN", default=True) is False:
        # Without a class token VISSL averages the patches.
        # Its norm comes before the average, unlike timm's.
        params |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    masked = f"{own}.MASKED_IMAGE_MODELING"
    if source.get(f"{masked}.NAME"):
        keys = [key for key in source.given if key.startswith(masked)]
        draft.miss("masked image modelling: no trunk here masks or drops patches", *keys)
    section = {"name": "timm.vit_base_patch16_224", "params": params}
    return Trunk(section, "head", layers, "Block", depth=params["depth"], prefix="")


def _convert_convit(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    own = f"{trunk_key}.VISION_TRANSFORMERS"
    options = {key: vissl_name for key, vissl_name in TRANSFORMER.items() if key != "qkv_bias"}
    params = _read_params(source, own, options)
    params["mlp_ratio"] = source.get(f"{own}.MLP_DIM") / params["embed_dim"]
    # timm's ConViT counts the width per head.
    params["embed_dim"] //= params["num_heads"]
    extra = {
        "local_up_to_layer": "N_GPSA_LAYERS",
        "locality_strength": "LOCALITY_STRENGTH",
        "qkv_bias": "QKV_BIAS",
    }
    params |= _read_params(source, f"{trunk_key}.CONVIT", extra)
    params["qkv_bias"] = bool(source.get(f"{own}.QKV_BIAS") or params.get("qkv_bias"))
    below = [key for key in source.given if key.startswith((own, f"{trunk_key}.CONVIT"))]
    draft.translate("MODEL.trunk.params", *below)
    for key, usual in (
        (f"{trunk_key}.CONVIT.CLASS_TOKEN_IN_LOCAL_LAYERS", False),
        (f"{trunk_key}.CONVIT.USE_LOCAL_INIT", True),
        (f"{own}.CLASSIFIER", "token"),
    ):
        if source.get(key, usual) != usual:
            draft.miss(f"timm's ConViT has {usual} only", key)
    draft.note(
        "timm's ConViT projects each relative position once, VISSL's as LOCALITY_DIM copies, and "
        "the eps of its norms is 1e-6, not 1e-5."
    )
    if views:
        draft.note("timm's ConViT takes images of one size only: small crops need another trunk.")
    section = {"name": "timm.convit_base", "params": params}
    return Trunk(section, "head", {}, "Block", depth=params["depth"])


def _convert_xcit(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    options = {**TRANSFORMER, "mlp_ratio": "MLP_RATIO", "eta": "ETA", "tokens_norm": "TOKENS_NORM"}
    params = _read_params(source, f"{trunk_key}.XCIT", options)
    section = {"name": "timm.xcit_small_12_p16_224", "params": params}
    return Trunk(section, "head", {}, "XCABlock", depth=params["depth"])


def _convert_swin(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    options = {key: TRANSFORMER[key] for key in ("img_size", "patch_size", "proj_drop_rate")}
    options |= {key: TRANSFORMER[key] for key in ("attn_drop_rate", "drop_path_rate", "qkv_bias")}
    options |= {"embed_dim": "EMBED_DIM", "depths": "DEPTHS", "num_heads": "NUM_HEADS"}
    options |= {"window_size": "WINDOW_SIZE", "mlp_ratio": "MLP_RATIO"}
    params = _read_params(source, f"{trunk_key}.SWIN_TRANSFORMER", options)
    if views:
        params["strict_img_size"] = False
    section = {"name": "timm.swin_tiny_patch4_window7_224", "params": params}
    return Trunk(section, "head.fc", {}, "SwinTransformerBlock")


def _convert_beit(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    options = {**TRANSFORMER, "mlp_ratio": "MLP_RATIO", "use_abs_pos_emb": "USE_ABS_POS_EMB"}
    options |= {"use_rel_pos_bias": "USE_REL_POS_BIAS"}
    options |= {"use_shared_rel_pos_bias": "USE_SHARED_REL_POS_BIAS"}
    params = _read_params(source, f"{trunk_key}.BEIT", options)
    section = {"name": "timm.beit_base_patch16_224", "params": params}
    return Trunk(section, "head", {}, "Block", depth=params["depth"])


def _convert_convnext(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk_key: str,
    views: bool,  # noqa: FBT001
) -> Trunk | None:
    options = {"depths": "DEPTH", "dims": "DIMS", "drop_path_rate": "DROP_PATH_RATE"}
    params = _read_params(source, f"{trunk_key}.CONVNEXT", options)
    return Trunk({"name": "timm.convnext_tiny", "params": params}, "head.fc", {}, "ConvNeXtBlock")


TRUNKS: Mapping[str, Callable[[VisslConfig, ExperimentDraft, str, bool], Trunk | None]] = {
    "alexnet_deepcluster": _convert_alexnet,
    "alexnet_rotnet": _convert_alexnet,
    "resnet": _convert_resnet,
    "regnet": _convert_regnet,
    "efficientnet": _convert_efficientnet,
    "mobilenet": _convert_mobilenet,
    "vision_transformer": _convert_vit,
    "convit": _convert_convit,
    "xcit": _convert_xcit,
    "swin_transformer": _convert_swin,
    "beit_transformer": _convert_beit,
    "convnext": _convert_convnext,
}
"""Trunk of VISSL -> its converter, which gets config, draft, section, and whether it gets views."""

USED_SECTION = {
    "resnet": "RESNETS.",
    "regnet": "REGNET",
    "efficientnet": "EFFICIENT_NETS",
    "mobilenet": "MOBILE_NET.",
    "vision_transformer": "VISION_TRANSFORMERS.",
    "convit": "CONVIT.",
    "xcit": "XCIT.",
    "swin_transformer": "SWIN_TRANSFORMER.",
    "beit_transformer": "BEIT.",
    "convnext": "CONVNEXT.",
}
"""Trunk of VISSL -> the section below MODEL.TRUNK with its parameters."""
