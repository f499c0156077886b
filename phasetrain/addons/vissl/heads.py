"""VISSL's heads: projections of self-supervised losses, classifiers and probes of layers."""

import re
from collections.abc import Sequence
from typing import Any

from phasetrain.addons.vissl.trunks import Trunk

Params = dict[str, Any]

CHAINED = ("mlp", "mlp_fsdp")
SWAV = ("swav_head", "swav_head_fsdp")
DINO = ("dino_head", "dino_head_fsdp")
PROBES = ("eval_mlp", "eval_mlp_fsdp")


class UnknownHeadError(ValueError):
    """A head without counterpart; the message says which one."""


def convert_projection(items: Sequence[Any]) -> tuple[Params, list[int]]:
    """Return the head of a self-supervised model, and its numbers of prototypes.

    Raises:
        UnknownHeadError: it has no counterpart.
    """
    if items and not isinstance(items[0][0], str):
        raise UnknownHeadError("a head for each input")
    names = [str(item[0]) for item in items]
    last: Params = dict(items[-1][1]) if items else {}
    if len(names) == 1 and names[0] in DINO:
        hidden = [last.get("hidden_dim", 2048)] * (last.get("num_layers", 3) - 1)
        head: Params = {"name": "prototypes", "dimensions": int(last["num_clusters"][0])}
        return {**head, "hidden": hidden, "bottleneck": last.get("bottleneck_dim", 256)}, []
    if len(names) == 1 and names[0] in SWAV:
        return _convert_swav_head(last)
    if names and all(name in CHAINED for name in names):
        return _convert_chain(items), []
    if names == ["vision_transformer_head"]:
        hidden = [last["hidden_dim"]] if last.get("hidden_dim") else []
        return {"name": "projection", "hidden": hidden, "dimensions": last["num_classes"]}, []
    raise UnknownHeadError(f"the head {', '.join(names) or 'without layers'}")


def convert_cluster_head(items: Sequence[Any]) -> Params:
    """Return the head that scores the prototypes of SwAV.

    Raises:
        UnknownHeadError: it is another head, or has several sets of prototypes.
    """
    names = [str(item[0]) for item in items]
    params: Params = dict(items[-1][1]) if items else {}
    if len(names) != 1 or names[0] not in SWAV or len(params.get("num_clusters") or []) != 1:
        raise UnknownHeadError(f"clusters of the head {', '.join(names)}")
    dims = list(params["dims"])
    head: Params = {"name": "prototypes", "dimensions": int(params["num_clusters"][0])}
    head |= {"hidden": dims[1:-1], "bottleneck": dims[-1]}
    if params.get("use_bn"):
        head["batch_norm"] = True
    return head


def _convert_swav_head(params: Params) -> tuple[Params, list[int]]:
    dims = list(params["dims"])
    clusters = [int(number) for number in params.get("num_clusters") or []]
    # Prototypes of DINO belong to the model, since its loss compares their scores.
    if params.get("use_weight_norm_prototypes"):
        head: Params = {"name": "prototypes", "dimensions": clusters[0], "hidden": dims[1:-1]}
        return {**head, "bottleneck": dims[-1]}, []
    # Those of SwAV belong to the loss, which freezes and normalizes them.
    head = {"name": "projection", "hidden": dims[1:-1], "dimensions": dims[-1]}
    if params.get("use_bn"):
        head["batch_norm"] = True
    return head, clusters


def _convert_chain(items: Sequence[Any]) -> Params:
    """Return one projection for several `mlp`, each with separate layers."""
    widths: list[int] = []
    norm = False
    for _, params in items:
        # The first width is that of the features, which the model finds out by itself.
        widths += list(params["dims"])[1:]
        norm = norm or bool(params.get("use_bn"))
    head: Params = {"name": "projection", "hidden": widths[:-1], "dimensions": widths[-1]}
    last: Params = dict(items[-1][1])
    if norm:
        head["batch_norm"] = True
        # By default VISSL leaves out norm and ReLU after the last layer.
        if not last.get("skip_last_layer_relu_bn", True) and not last.get("use_relu"):
            head["last_batch_norm"] = True
    return head


def convert_classifier(item: Any) -> Params:
    """Return a classifier head: `name`, `hidden`, `classes` and norms.

    Args:
        item: a pair of name and parameters, or a list with one such pair.

    Raises:
        UnknownHeadError: it has no counterpart.
    """
    if item and not isinstance(item[0], str):
        if len(item) > 1:
            raise UnknownHeadError(f"a chain of the heads {', '.join(head[0] for head in item)}")
        item = item[0]
    name = str(item[0])
    params: Params = dict(item[1]) if len(item) > 1 else {}
    if name == "vision_transformer_head":
        hidden = [params["hidden_dim"]] if params.get("hidden_dim") else []
        return {"name": "mlp", "hidden": hidden, "classes": params["num_classes"]}
    if name not in (*CHAINED, *PROBES):
        raise UnknownHeadError(f"the head {name}")
    dims = list(params["dims"])
    head: Params = {"name": "mlp", "hidden": dims[1:-1], "classes": dims[-1]}
    # VISSL has torch's default probability only.
    if params.get("use_dropout"):
        head["dropout"] = 0.5
    if params.get("use_bn") and len(dims) > 2:
        head["batch_norm"] = True
    # Probes normalize their input, so that one learning rate fits layers of any scale.
    if name in PROBES:
        head["input_norm"] = True
    return head


def convert_feature(trunk: Trunk, name: str, pool: Sequence[Any]) -> Params:
    """Return `from`, `norm` and `pool` of a head that gets a feature of VISSL.

    Raises:
        UnknownHeadError: the trunk has no such feature here.
    """
    feature = _find_layers(trunk, name)
    pooling = str(pool[0])
    args = list(pool[1]) if len(pool) > 1 else []
    if pooling == "AdaptiveAvgPool2d":
        feature["pool"] = args[0]
    elif pooling == "AdaptiveMaxPool2d":
        feature["pool"] = {"size": args[0], "kind": "max"}
    elif pooling in ("AvgPool2d", "MaxPool2d"):
        names = ("kernel", "stride", "padding")
        # The arguments of torch's pooling are optional from the end.
        feature["pool"] = dict(zip(names, args, strict=False))
        if pooling == "MaxPool2d":
            feature["pool"]["kind"] = "max"
    elif pooling != "Identity":
        raise UnknownHeadError(f"the pooling {pooling}")
    return feature


def _find_layers(trunk: Trunk, name: str) -> Params:
    if name in trunk.layers:
        return {"from": trunk.layers[name]}
    if trunk.depth:
        blocks = [f"blocks.{at}" for at in range(trunk.depth)]
        if name in ("lastCLS", "norm"):
            return {"from": "norm", "pool": "first"}
        if name in ("lastPOOL", "lastMAP"):
            return {"from": "norm", "pool": "mean"}
        if match := re.fullmatch(r"(concatCLS|concatPOOL|blkCLS)(\d+)", name):
            number = int(match[2])
            layers: Any = blocks[-number:]
            if match[1] == "blkCLS":
                layers = blocks[number]
            pool = "mean" if match[1] == "concatPOOL" else "first"
            return {"from": layers, "norm": "norm", "pool": pool}
    if name in ("trunk_pool", "flatten", "avgpool", "res5avg"):
        return {}
    raise UnknownHeadError(f"the feature {name} of {trunk.section['name']}")
