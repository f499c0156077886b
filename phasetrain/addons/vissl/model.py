"""VISSL's sections MODEL, LOSS and METERS."""

from collections.abc import Mapping, Sequence
from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.data import find_image_size
from phasetrain.addons.vissl.draft import ExperimentDraft, find_row
from phasetrain.addons.vissl.heads import (
    DINO,
    SWAV,
    UnknownHeadError,
    convert_classifier,
    convert_cluster_head,
    convert_feature,
    convert_projection,
)
from phasetrain.addons.vissl.losses import (
    CLASSIFIERS,
    SELF_SUPERVISED,
    convert_classification,
    convert_meters,
    convert_self_supervised,
)
from phasetrain.addons.vissl.trunks import Trunk, convert_trunk

SETTINGS = "MODEL.FEATURE_EVAL_SETTINGS"
POOLS = f"{SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP"
HEADS = "MODEL.HEAD.PARAMS"
PROJECTIONS = (*SWAV, *DINO, "identity")
"""Heads without classes, which an extraction of features leaves out."""

SWAV_RULES = [
    [r"^heads\.0\.projection_head\.", "head.layers."],
    [r"^heads\.0\.prototypes0\.weight$", "head.prototypes"],
]
"""Names of weights in VISSL's head with prototypes, and here."""


def convert_model(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write the model, its initial weights, the loss and the meters."""
    loss = str(source.get("LOSS.name"))
    # Files merged over each other keep the parameters of losses that another one replaced.
    for key in source.given:
        if key.startswith("LOSS.") and not key.startswith(f"LOSS.{loss}.") and key.count(".") > 1:
            draft.deactivate(key, f"the loss is {loss}")
    if source.is_extraction:
        _convert_extraction(source, draft)
    elif loss in SELF_SUPERVISED:
        _convert_embedding(source, draft, loss)
    elif loss in (*CLASSIFIERS, "distillation_loss"):
        _convert_classifier(source, draft, loss)
    else:
        convert_trunk(source, draft, views=True)
        reason = f"belongs to the loss {loss}, which has no counterpart"
        row = find_row(f"LOSS.{loss}.temperature") or ""
        draft.miss(f"the loss {loss}: {row.removeprefix('none: ')}", "LOSS.name")
        draft.skip(reason, HEADS, "MODEL.TEMP_FROZEN_PARAMS_ITER_MAP")
        for prefix in ("DISTILLATION.", f"LOSS.{loss}.", "MODEL.WEIGHTS_INIT."):
            draft.deactivate(prefix, reason)
    if "MODEL" in draft.experiment:
        _convert_frozen(source, draft)
        _convert_weights(source, draft)
    else:
        reason = "the model has no counterpart"
        draft.skip(reason, HEADS)
        for prefix in (SETTINGS, "MODEL.WEIGHTS_INIT.", "MODEL.ACTIVATION_CHECKPOINTING."):
            draft.deactivate(prefix, reason)


def _convert_embedding(source: VisslConfig, draft: ExperimentDraft, loss: str) -> None:
    """Write a trunk with a projection, and a self-supervised loss."""
    trunk = convert_trunk(source, draft, views=True)
    prototypes: list[int] = []
    try:
        head, prototypes = convert_projection(list(source.get(HEADS, [])))
        draft.translate("MODEL.head", HEADS)
    except UnknownHeadError as error:
        draft.miss(str(error), HEADS)
        head = {}
    if trunk is not None and head:
        _write_embedding(draft, trunk, head)
        _put_checkpointing(source, draft, trunk)
    convert_self_supervised(source, draft, loss, prototypes)
    if loss == "dino_distillation_loss":
        _convert_view_teacher(source, draft)
    draft.deactivate("METERS.", "tests of a self-supervised loss measure the loss")
    draft.put("METERS.loss", {})


def _write_embedding(draft: ExperimentDraft, trunk: Trunk, head: Mapping[str, Any]) -> None:
    draft.put("MODEL.name", "trunk_head")
    draft.put("MODEL.trunk", {**trunk.section, "cut": trunk.cut})
    draft.put("MODEL.head", dict(head))
    size = find_image_size(draft)
    draft.put("MODEL.input_shape", [3, size, size])


def _convert_classifier(source: VisslConfig, draft: ExperimentDraft, loss: str) -> None:
    """Write a classifier, or a trunk with several heads."""
    trunk = convert_trunk(source, draft)
    try:
        labels = _write_classifier(source, draft, trunk)
    except UnknownHeadError as error:
        draft.miss(str(error), HEADS)
        labels = []
    if loss == "distillation_loss":
        _convert_teacher(source, draft)
    convert_classification(source, draft, labels)
    convert_meters(source, draft, labels)
    if trunk is not None:
        _put_checkpointing(source, draft, trunk)


def _write_classifier(
    source: VisslConfig, draft: ExperimentDraft, trunk: Trunk | None
) -> list[str]:
    """Write the model, and return the labels of its heads; none: a model with one output."""
    heads = list(source.get(HEADS, []))
    pools = list(source.get(POOLS, []))
    if not source.get(f"{SETTINGS}.EVAL_MODE_ON"):
        draft.deactivate(f"{SETTINGS}.", "EVAL_MODE_ON is false")
        pools = []
    if trunk is None:
        return []
    if not heads:
        raise UnknownHeadError("a model without heads")
    frozen = bool(source.get(f"{SETTINGS}.FREEZE_TRUNK_ONLY")) and bool(
        source.get(f"{SETTINGS}.EVAL_MODE_ON")
    )
    if not pools:
        keys = [key for key in source.given if key.startswith(SETTINGS)]
        draft.translate("MODEL", *keys)
        return _write_plain_classifier(draft, trunk, heads, named=frozen)
    sections: dict[str, Any] = {}
    for (name, pool), head in zip(pools, heads, strict=False):
        # Two heads may get the same feature, pooled in other ways.
        label = str(name)
        while label in sections:
            label += "_"
        sections[label] = {**convert_classifier(head), **convert_feature(trunk, str(name), pool)}
    _write_heads(draft, trunk, sections)
    keys = [key for key in source.given if key.startswith(SETTINGS)]
    draft.translate("MODEL.heads", *keys)
    if len(pools) != len(heads):
        raise UnknownHeadError(f"{len(heads)} heads for {len(pools)} features")
    return list(sections)


def _write_heads(draft: ExperimentDraft, trunk: Trunk, sections: Mapping[str, Any]) -> None:
    draft.put("MODEL.name", "trunk_heads")
    draft.put("MODEL.trunk", {**trunk.section, "cut": trunk.cut})
    draft.put("MODEL.heads", dict(sections), HEADS)
    size = find_image_size(draft)
    draft.put("MODEL.input_shape", [3, size, size])


def _write_plain_classifier(
    draft: ExperimentDraft, trunk: Trunk, heads: Sequence[Any], *, named: bool = False
) -> list[str]:
    """Write a model whose last layer is the head, if the head is one layer.

    Args:
        draft: takes the model.
        trunk: the trunk.
        heads: heads of VISSL, each on the one before it.
        named: write a trunk with a head, whose modules have separate names, in any case.
    """
    if len(heads) > 1:
        if any("dims" not in params for _, params in heads):
            raise UnknownHeadError(f"a chain of the heads {', '.join(head[0] for head in heads)}")
        # A chain of linear heads is one head with hidden layers.
        widths = [width for _, params in heads for width in params["dims"][1:]]
        heads = [["mlp", {**heads[0][1], "dims": [0, *widths]}]]
    head = convert_classifier(heads[0])
    if not named and not head["hidden"] and not head.get("input_norm"):
        draft.experiment["MODEL"] = {**trunk.section, "classes": head["classes"]}
        draft.translate("MODEL.classes", HEADS)
        return []
    _write_heads(draft, trunk, {"head": head})
    return ["head"]


def _convert_extraction(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write an extraction of pooled features."""
    trunk = convert_trunk(source, draft)
    draft.put("RUN.engine", "extract", "engine_name")
    draft.put("RUN.checkpoint", "none")
    draft.put("METERS", {})
    draft.deactivate("METERS.", "nothing is tested")
    draft.deactivate("LOSS.", "nothing is trained")
    draft.deactivate("OPTIMIZER.", "nothing is trained")
    if trunk is None:
        return
    if str(source.get("engine_name")) == "extract_cluster":
        _convert_assignments(source, draft, trunk)
        return
    labels: dict[str, Any] = {}
    flatten = bool(source.get(f"{SETTINGS}.SHOULD_FLATTEN_FEATS"))
    for name, pool in source.get(POOLS, []):
        try:
            feature = convert_feature(trunk, str(name), pool)
        except UnknownHeadError as error:
            draft.miss(str(error), POOLS)
            continue
        # A head without weights pools the feature, and EXTRACT.layers names it.
        layer = "torch.nn.Flatten" if flatten else "torch.nn.Identity"
        labels[str(name)] = {"name": layer, **feature}
    if labels:
        _write_heads(draft, trunk, labels)
        layers = [f"heads.{label}" for label in labels]
    else:
        draft.experiment["MODEL"] = {**trunk.section}
        layers = [_last_layer(trunk)]
        heads = list(source.get(HEADS, []))
        projects = any(item[0] in PROJECTIONS for item in heads)
        if heads and not projects and not source.get(f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY"):
            _write_plain_head(draft, trunk, heads)
    draft.put("EXTRACT.layers", layers)
    keys = [key for key in source.given if key.startswith(SETTINGS)]
    draft.translate("EXTRACT.layers", *keys)
    if not draft.experiment["MODEL"].get("classes"):
        draft.put("EXTRACT.predictions", value=False)
    folder = source.get("EXTRACT_FEATURES.OUTPUT_DIR")
    if folder:
        draft.put("EXTRACT.dir", folder, "EXTRACT_FEATURES.OUTPUT_DIR")
    draft.skip("the heads are not used for features of the trunk", HEADS)


def _convert_assignments(source: VisslConfig, draft: ExperimentDraft, trunk: Trunk) -> None:
    """Write an extraction of the nearest prototype of each sample, the column `label`."""
    try:
        head = convert_cluster_head(list(source.get(HEADS, [])))
    except UnknownHeadError as error:
        draft.miss(str(error), HEADS)
        return
    _write_embedding(draft, trunk, head)
    keys = [key for key in source.given if key.startswith(SETTINGS)]
    draft.translate("MODEL.head", HEADS, *keys)
    draft.note("The cluster of each sample is the column `label` of the extracted files.")


def _last_layer(trunk: Trunk) -> str:
    return trunk.layers.get("res5avg", "norm" if trunk.depth else trunk.cut.split(".")[0])


def _write_plain_head(draft: ExperimentDraft, trunk: Trunk, heads: Sequence[Any]) -> None:
    try:
        _write_plain_classifier(draft, trunk, heads)
    except UnknownHeadError as error:
        draft.miss(str(error), HEADS)


def _convert_teacher(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write the teacher of a distillation."""
    base = "DISTILLATION.TEACHER_MODEL"
    teacher = convert_trunk(source, draft, base)
    if teacher is None:
        return
    section = dict(teacher.section)
    heads = list(source.get(f"{base}.HEAD.PARAMS", []))
    try:
        section["classes"] = convert_classifier(heads[0])["classes"]
    except (UnknownHeadError, IndexError):
        draft.miss("a teacher without logits", f"{base}.HEAD.PARAMS")
    keys = [key for key in source.given if key.startswith(f"{base}.")]
    path = source.get(f"{base}.WEIGHTS_INIT.PARAMS_FILE")
    section["weights"] = {"path": path, **_read_rules(teacher, whole=True)}
    draft.put("TASK.name", "distillation")
    draft.put("TASK.teacher", section, *keys)


def _convert_view_teacher(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write the teacher of a self-supervised distillation."""
    base = "DISTILLATION.TEACHER_MODEL"
    trunk = convert_trunk(source, draft, base, views=True)
    if trunk is None:
        return
    try:
        head, _ = convert_projection(list(source.get(f"{base}.HEAD.PARAMS", [])))
    except UnknownHeadError as error:
        draft.miss(str(error), f"{base}.HEAD.PARAMS")
        return
    path = source.get(f"{base}.WEIGHTS_INIT.PARAMS_FILE")
    size = find_image_size(draft)
    section = {
        "name": "trunk_head",
        "trunk": {**trunk.section, "cut": trunk.cut},
        "head": head,
        "input_shape": [3, size, size],
        "weights": {"path": path, **_read_rules(trunk, whole=False)},
    }
    draft.put("TASK.teacher", section, *[key for key in source.given if key.startswith(base)])
    draft.note(
        "VISSL's names of weights of heads and transformers need TASK.teacher.weights.rename."
    )


def _convert_frozen(source: VisslConfig, draft: ExperimentDraft) -> None:
    model = draft.experiment["MODEL"]
    has_trunk = "trunk" in model
    patterns = [str(name) for name in source.get("MODEL.NON_TRAINABLE_PARAMS", [])]
    draft.translate("MODEL.freeze", "MODEL.NON_TRAINABLE_PARAMS")
    trains = not source.is_extraction
    frozen = f"{SETTINGS}.FREEZE_TRUNK_ONLY"
    if trains and source.get(f"{SETTINGS}.EVAL_MODE_ON") and source.get(frozen):
        if has_trunk:
            patterns.append("trunk")
        else:
            draft.miss("a frozen trunk in a model without named heads", frozen)
    if patterns:
        draft.put("MODEL.freeze", patterns)
    rules = []
    updates_key = "MODEL.TEMP_FROZEN_PARAMS_ITER_MAP"
    for name, updates in source.get(updates_key, []):
        if "prototypes" in name and draft.experiment.get("LOSS", {}).get("name") == "swav":
            draft.put("LOSS.frozen_updates", int(updates), updates_key)
        else:
            # VISSL's names are those inside of DistributedDataParallel.
            pattern = str(name).removeprefix("module.")
            if "heads" in pattern:
                pattern = "head.prototypes" if "prototypes" in pattern else "head.*"
            rules.append({"match": pattern, "for": int(updates)})
    if rules:
        draft.put("MODEL.freeze_updates", rules, updates_key)


def _read_rules(trunk: Trunk, *, whole: bool) -> dict[str, Any]:
    """Return rules that rename VISSL's weights to the names in the model."""
    target = trunk.inner if whole else f"trunk.{trunk.inner}"
    if trunk.prefix is None:
        return {}
    rules = [[f"^{trunk.prefix}", target]]
    if whole:
        rules.append([r"^heads\.0\.clf\.0\.", "fc."])
    return {"rename": rules}


def _convert_weights(source: VisslConfig, draft: ExperimentDraft) -> None:
    base = "MODEL.WEIGHTS_INIT"
    path = str(source.get(f"{base}.PARAMS_FILE") or "")
    if not path:
        draft.deactivate(f"{base}.", "there is no PARAMS_FILE")
        return
    trunk = convert_trunk(source, draft)
    if trunk is None:
        return
    model = draft.experiment["MODEL"]
    whole = "trunk" not in model
    weights: dict[str, Any] = {"path": path}
    appended = str(source.get(f"{base}.APPEND_PREFIX") or "")
    removed = str(source.get(f"{base}.REMOVE_PREFIX") or "")
    if removed:
        weights["prefix_remove"] = removed
    if appended:
        # The file has the names of the trunk itself.
        if not whole:
            weights["prefix_add"] = "trunk."
    else:
        weights |= _read_rules(trunk, whole=whole)
        if model.get("head", {}).get("name") == "prototypes" and "rename" in weights:
            weights["rename"] += SWAV_RULES
    # A pretrained file has the head of another task.
    if not source.get(f"{SETTINGS}.EVAL_TRUNK_AND_HEAD"):
        heads = {"trunk_heads": ["heads.*"], "trunk_head": ["head.*"]}
        weights["reinit"] = heads.get(model["name"], [f"{trunk.cut}.*"])
    draft.put("MODEL.weights", weights, *[key for key in source.given if key.startswith(base)])
    if trunk.prefix is None:
        draft.note(
            f"The weights of {path} have other names than {trunk.section['name']}: add rules to "
            "MODEL.weights.rename; `phasetrain plan` lists the names on both sides."
        )


def _put_checkpointing(source: VisslConfig, draft: ExperimentDraft, trunk: Trunk) -> None:
    keys = [
        key
        for key in source.given
        if "CHECKPOINT" in key
        and key.startswith(("MODEL.ACTIV", "MODEL.TRUNK"))
        and source.get(key)
    ]
    wanted = source.get("MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING")
    own = any(key.startswith("MODEL.TRUNK") and source.get(key) is True for key in keys)
    if (wanted or own) and trunk.blocks:
        draft.put("MACHINE.activation_checkpointing", [trunk.blocks], *keys)
