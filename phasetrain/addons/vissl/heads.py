"""VISSL's heads: projections of self-supervised losses, classifiers and probes of layers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phasetrain.addons.vissl.trunks import Trunk

Params = dict[str, Any]

CHAINED = ("mlp", "mlp_fsdp")
SWAV = ("swav_head", "swav_head_fsdp")
DINO = ("dino_head", "dino_head_fsdp")
PROBES = ("eval_mlp", "eval_mlp_fsdp")


class UnknownHeadError(ValueError):
    """A head without counterpart; the message says which one."""


@dataclass(frozen=True)
class Head:
    """A converted head.

    Attributes:
        section: `name` and parameters.
        rules: pairs of a regular expression, which fits VISSL's name of a weight, and the name
            within the head here.
        prototypes: numbers of prototypes that belong to the loss.
    """

    section: Params
    rules: Sequence[tuple[str, str]] = ()
    prototypes: Sequence[int] = ()


@dataclass(frozen=True)
class Layer:
    """A fully connected layer of VISSL, with the layers that follow it.

    Attributes:
        width: number of outputs.
        name: VISSL's name of the layer, such as `heads.0.clf.0`.
        norm_name: VISSL's name of the batch norm after it; empty: there is none.
        bias: whether it has a bias.
        activation: activation after it.
        dropout: whether dropout follows.
    """

    width: int
    name: str
    norm_name: str = ""
    bias: bool = True
    activation: str = "none"
    dropout: bool = False


def convert_projection(items: Sequence[Any]) -> Head:
    """Return the head of a self-supervised model.

    Raises:
        UnknownHeadError: it has no counterpart.
    """
    if items and not isinstance(items[0][0], str):
        raise UnknownHeadError("a head for each input")
    names = [str(item[0]) for item in items]
    last: Params = dict(items[-1][1]) if items else {}
    if len(names) == 1 and names[0] in DINO:
        return _convert_dino_head(last)
    if len(names) == 1 and names[0] in SWAV:
        clusters = [int(number) for number in last.get("num_clusters") or []]
        # Prototypes of DINO belong to the model, since its loss compares their scores; those of
        # SwAV belong to the loss, which freezes and normalizes them.
        if last.get("use_weight_norm_prototypes"):
            scaled = not last.get("normalize_last_layer", False)
            return _make_prototypes(_expand_swav(last), clusters, scaled=scaled)
        head = _make_projection(_expand_swav(last))
        return replace(head, prototypes=clusters)
    if names == ["vision_transformer_head"]:
        return _make_projection(_expand_transformer_head(last, "heads.0"))
    if names and all(name in CHAINED for name in names):
        return _make_projection(_expand_chain(items))
    raise UnknownHeadError(f"the head {', '.join(names) or 'without layers'}")


def convert_cluster_head(items: Sequence[Any]) -> Head:
    """Return the head that scores the prototypes of SwAV.

    Raises:
        UnknownHeadError: it is another head, or has several sets of prototypes.
    """
    names = [str(item[0]) for item in items]
    params: Params = dict(items[-1][1]) if items else {}
    if len(names) != 1 or names[0] not in SWAV or len(params.get("num_clusters") or []) != 1:
        raise UnknownHeadError(f"clusters of the head {', '.join(names)}")
    # Without a trained scale, VISSL's prototypes are unit vectors.
    return _make_prototypes(_expand_swav(params), params["num_clusters"], scaled=False)


def _convert_dino_head(params: Params) -> Head:
    hidden = [params.get("hidden_dim", 2048)] * (params.get("num_layers", 3) - 1)
    bottleneck = params.get("bottleneck_dim", 256)
    if params.get("use_bn"):
        raise UnknownHeadError("a dino_head with batch norm")
    layers = [
        Layer(width, f"heads.0.mlp.{2 * at}", activation="gelu") for at, width in enumerate(hidden)
    ]
    # A single layer is not in a list.
    last = Layer(bottleneck, f"heads.0.mlp.{2 * len(hidden)}" if hidden else "heads.0.mlp")
    scaled = not params.get("normalize_last_layer", True)
    return _make_prototypes([*layers, last], params["num_clusters"], scaled=scaled)


def _make_prototypes(layers: Sequence[Layer], clusters: Sequence[int], *, scaled: bool) -> Head:
    if len(clusters) != 1:
        raise UnknownHeadError("several sets of prototypes")
    *hidden, last = layers
    norms = {bool(layer.norm_name) for layer in hidden}
    expected = "relu" if norms == {True} else "gelu"
    if len(norms) > 1 or any(layer.activation != expected for layer in hidden):
        raise UnknownHeadError("prototypes after hidden layers other than GELU, or norm and ReLU")
    if last.norm_name or last.activation != "none" or not all(layer.bias for layer in layers):
        raise UnknownHeadError("prototypes after a norm, an activation, or a layer without bias")
    head: Params = {"name": "prototypes", "dimensions": int(clusters[0])}
    head |= {"hidden": [layer.width for layer in hidden], "bottleneck": last.width}
    if norms == {True}:
        head["batch_norm"] = True
    if scaled:
        head["trained_scale"] = True
    rules = _number_layers(layers, "layers.", first=0)
    rules += [(r"^heads\.0\.prototypes0\.weight_g$", "scales")] if scaled else []
    return Head(head, [*rules, (r"^heads\.0\.prototypes0\.weight(_v)?$", "prototypes")])


def _make_projection(layers: Sequence[Layer]) -> Head:
    *hidden, last = layers
    kinds = {(bool(layer.norm_name), layer.activation) for layer in hidden}
    is_plain = not last.norm_name and last.activation == "none"
    if not is_plain:
        kinds.add((bool(last.norm_name), last.activation))
    if len(kinds) > 1:
        raise UnknownHeadError("layers with different norms or activations")
    # A bias before a batch norm has no effect.
    if any(not layer.bias and not layer.norm_name for layer in (hidden if is_plain else layers)):
        raise UnknownHeadError("hidden layers without bias")
    if any(layer.dropout for layer in layers):
        raise UnknownHeadError("a projection with dropout")
    head: Params = {"name": "projection", "hidden": [layer.width for layer in hidden]}
    head["dimensions"] = last.width
    norm, activation = kinds.pop() if kinds else (False, "relu")
    if norm:
        head["batch_norm"] = True
    if activation != "relu":
        head["activation"] = activation
    if not is_plain:
        head["last_hidden"] = True
    elif not last.bias:
        head["last_bias"] = False
    return Head(head, _number_layers(layers, "", first=0))


def _number_layers(layers: Sequence[Layer], prefix: str, first: int) -> list[tuple[str, str]]:
    """Return the rules for the names of layers that are in one list here.

    Args:
        layers: the layers; after the last one, the list may end.
        prefix: prefix of the list.
        first: index of the first layer in the list.
    """
    rules = []
    at = first
    for layer in layers:
        rules.append((rf"^{re.escape(layer.name)}\.", f"{prefix}{at}."))
        if layer.norm_name:
            at += 1
            rules.append((rf"^{re.escape(layer.norm_name)}\.", f"{prefix}{at}."))
        at += 2 + layer.dropout
    return rules


def _expand_swav(params: Params) -> list[Layer]:
    if not params.get("normalize_feats", True):
        raise UnknownHeadError("prototypes of embeddings that are not normalized")
    activation = str(params.get("activation_name", "ReLU")).lower()
    return _expand_mlp(
        {**params, "skip_last_layer_relu_bn": params.get("skip_last_bn", True)},
        "heads.0.projection_head",
        activation if activation in ("relu", "gelu") else "none",
    )


def _expand_transformer_head(params: Params, prefix: str) -> list[Layer]:
    last = Layer(params["num_classes"], f"{prefix}.layers.head")
    if not params.get("hidden_dim"):
        return [last]
    return [Layer(params["hidden_dim"], f"{prefix}.layers.pre_logits", activation="tanh"), last]


def _expand_chain(items: Sequence[Any]) -> list[Layer]:
    """Return the layers of several `mlp` in a row."""
    layers: list[Layer] = []
    for at, item in enumerate(items):
        params = dict(item[1])
        activation = "relu" if params.get("use_relu") else "none"
        layers += _expand_mlp(params, f"heads.{at}.clf", activation)
    return layers


def _expand_mlp(params: Params, prefix: str, activation: str) -> list[Layer]:
    """Return the layers of an `mlp`, which the parameters describe.

    Args:
        params: parameters in VISSL.
        prefix: VISSL's name of the list of its layers.
        activation: activation after a layer.
    """
    layers = []
    at = 0
    # The first width is the number of features, which the model finds out by itself.
    widths = list(params["dims"])[1:]
    for number, width in enumerate(widths):
        layer = Layer(width, f"{prefix}.{at}", bias=bool(params.get("use_bias", True)))
        is_last = number == len(widths) - 1
        at += 1
        if not is_last or not params.get("skip_last_layer_relu_bn", True):
            if params.get("use_bn"):
                layer = replace(layer, norm_name=f"{prefix}.{at}")
                at += 1
            dropout = bool(params.get("use_dropout"))
            layer = replace(layer, activation=activation, dropout=dropout)
            at += (activation != "none") + dropout
        layers.append(layer)
    return layers


def convert_classifier(items: Sequence[Any], number: int = 0) -> Head:
    """Return a classifier head: `name`, `hidden`, `classes` and norms.

    Args:
        items: pairs of name and parameters, of heads on each other.
        number: position of the first one in VISSL's list of heads.

    Raises:
        UnknownHeadError: it has no counterpart.
    """
    if any(not isinstance(item[0], str) for item in items):
        raise UnknownHeadError("a list of heads for each input")
    name = str(items[0][0])
    params: Params = dict(items[0][1]) if len(items[0]) > 1 else {}
    prefix = f"heads.{number}"
    if len(items) > 1 or name in CHAINED:
        if any(str(item[0]) not in CHAINED for item in items):
            raise UnknownHeadError(f"a chain of the heads {', '.join(item[0] for item in items)}")
        layers = _expand_chain(items)
        if number:
            layers = [_move_layer(layer, number) for layer in layers]
    elif name == "vision_transformer_head":
        layers = _expand_transformer_head(params, prefix)
    elif name in PROBES:
        if params.get("use_residual"):
            raise UnknownHeadError("a residual eval_mlp")
        activation = "relu" if params.get("use_relu") else "none"
        layers = _expand_mlp(params, f"{prefix}.clf.clf", activation)
    else:
        raise UnknownHeadError(f"the head {name}")
    head = _make_classifier(layers)
    # Probes normalize their input, so that one learning rate fits layers of any scale.
    if name in PROBES:
        rule = (rf"^{re.escape(prefix)}\.channel_bn\.", "norm.")
        return Head({**head.section, "input_norm": True}, [*head.rules, rule])
    return head


def _move_layer(layer: Layer, number: int) -> Layer:
    """Return a layer of the first head of VISSL's list as one of another head."""
    names = [name.replace("heads.0.", f"heads.{number}.") for name in (layer.name, layer.norm_name)]
    return replace(layer, name=names[0], norm_name=names[1])


def _make_classifier(layers: Sequence[Layer]) -> Head:
    *hidden, last = layers
    kinds = {(bool(layer.norm_name), layer.activation, layer.dropout) for layer in hidden}
    if len(kinds) > 1:
        raise UnknownHeadError("layers with different norms or activations")
    if last.norm_name or last.activation != "none" or last.dropout:
        raise UnknownHeadError("a classifier with a norm, an activation or dropout after it")
    if not last.bias or any(not layer.bias and not layer.norm_name for layer in hidden):
        raise UnknownHeadError("a classifier without bias")
    head: Params = {"name": "mlp", "hidden": [layer.width for layer in hidden]}
    head["classes"] = last.width
    norm, activation, dropout = kinds.pop() if kinds else (False, "relu", False)
    # VISSL has torch's default probability only.
    if dropout:
        head["dropout"] = 0.5
    if norm:
        head["batch_norm"] = True
    if activation != "relu":
        head["activation"] = activation
    # The first module of the list flattens.
    return Head(head, _number_layers(layers, "layers.", first=1))


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
