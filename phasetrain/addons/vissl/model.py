"""VISSL's sections MODEL, LOSS and METERS."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.data import find_image_size
from phasetrain.addons.vissl.draft import ExperimentDraft, find_row
from phasetrain.addons.vissl.heads import (
    CHAINED,
    DINO,
    PROBES,
    SWAV,
    Head,
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
CLASSY = "classy_state_dict"
"""Key of the weights in a file of VISSL."""

PROJECTIONS = (*SWAV, *DINO, "identity")
"""Heads without classes, which an extraction of features leaves out."""


def convert_model(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write the model, its initial weights, the loss and the meters."""
    _complete_fragment(source, draft)
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
    try:
        head = convert_projection(list(source.get(HEADS, [])))
        draft.translate("MODEL.head", HEADS)
    except UnknownHeadError as error:
        draft.miss(str(error), HEADS)
        head = Head({})
    if trunk is not None and head.section:
        _write_embedding(draft, trunk, head)
        _put_checkpointing(source, draft, trunk)
    convert_self_supervised(source, draft, loss, head.prototypes)
    if loss == "dino_distillation_loss":
        _convert_view_teacher(source, draft)
    draft.deactivate("METERS.", "tests of a self-supervised loss measure the loss")
    draft.put("METERS.loss", {})


def _complete_fragment(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Set the keys that files without data take from the files below them."""
    if source.get("DATA.TRAIN.DATA_SOURCES") or source.get("DATA.TEST.DATA_SOURCES"):
        return
    heads = list(source.get(HEADS, []))
    if "LOSS.name" not in source.given and heads and heads[0][0] in SWAV:
        source.assume("LOSS.name", "swav_loss")
        draft.note("The files name no loss; their head is the head of SwAV.")
    if source.has(POOLS) and not source.has(f"{SETTINGS}.EVAL_MODE_ON"):
        source.assume(f"{SETTINGS}.EVAL_MODE_ON", value=True)
        source.assume(f"{SETTINGS}.FREEZE_TRUNK_ONLY", value=True)
        draft.note(
            "The files name features and no EVAL_MODE_ON: taken as probes of a frozen trunk."
        )


def _write_embedding(draft: ExperimentDraft, trunk: Trunk, head: Head) -> None:
    draft.put("MODEL.name", "trunk_head")
    draft.put("MODEL.trunk", {**trunk.section, "cut": trunk.cut})
    draft.put("MODEL.head", dict(head.section))
    draft.head_pattern = "head.*"
    draft.head_has_norms = bool(head.section.get("batch_norm"))
    draft.head_rules = [(pattern, f"head.{name}") for pattern, name in head.rules]
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
    if not source.get(f"{SETTINGS}.EVAL_MODE_ON"):
        draft.deactivate(f"{SETTINGS}.", "EVAL_MODE_ON is false")
    if trunk is None:
        return []
    if not heads:
        raise UnknownHeadError("a model without heads")
    if not source.is_feature_extractor:
        keys = [key for key in source.given if key.startswith(SETTINGS)]
        draft.translate("MODEL", *keys)
        freezes = bool(source.get(f"{SETTINGS}.EVAL_MODE_ON")) and bool(
            source.get(f"{SETTINGS}.FREEZE_TRUNK_ONLY")
        )
        return _write_plain_classifier(source, draft, trunk, heads, named=freezes)
    pools = list(source.get(POOLS))
    sections: dict[str, Any] = {}
    for number, ((name, pool), item) in enumerate(zip(pools, heads, strict=False)):
        label = _make_label(str(name), sections)
        head = _convert_head(source, draft, item, number)
        sections[label] = {**head.section, **convert_feature(trunk, str(name), pool)}
        draft.head_rules += [(pattern, f"heads.{label}.{name}") for pattern, name in head.rules]
    _write_heads(draft, trunk, sections)
    keys = [key for key in source.given if key.startswith(SETTINGS)]
    draft.translate("MODEL.heads", *keys)
    if len(pools) != len(heads):
        raise UnknownHeadError(f"{len(heads)} heads for {len(pools)} features")
    return list(sections)


def _make_label(name: str, taken: Container[str]) -> str:
    """Return the label of a head, which may get the same feature as another, pooled differently."""
    while name in taken:
        name += "_"
    return name


def _convert_head(source: VisslConfig, draft: ExperimentDraft, item: Any, number: int) -> Head:
    """Return the head for an entry of VISSL's list, with its scaled initial weights."""
    items = [item] if isinstance(item[0], str) else list(item)
    head = convert_classifier(items, number)
    key = "MODEL.HEAD.PARAMS_MULTIPLIER"
    scale = float(source.get(key))
    # VISSL scales linear layers, and those of `mlp` only.
    if scale == 1.0 or str(items[0][0]) not in (*CHAINED, *PROBES):
        return head
    if head.section.get("batch_norm"):
        draft.miss("scaled initial weights in a head with batch norm", key)
        return head
    draft.translate("MODEL.heads.LABEL.init_scale", key)
    return replace(head, section={**head.section, "init_scale": scale})


def _write_heads(draft: ExperimentDraft, trunk: Trunk, sections: Mapping[str, Any]) -> None:
    draft.put("MODEL.name", "trunk_heads")
    draft.put("MODEL.trunk", {**trunk.section, "cut": trunk.cut})
    draft.put("MODEL.heads", dict(sections), HEADS)
    draft.head_pattern = "heads.*"
    draft.head_has_norms = any(
        section.get("batch_norm") or section.get("input_norm") for section in sections.values()
    )
    size = find_image_size(draft)
    draft.put("MODEL.input_shape", [3, size, size])


def _write_plain_classifier(
    source: VisslConfig,
    draft: ExperimentDraft,
    trunk: Trunk,
    heads: Sequence[Any],
    *,
    named: bool = False,
) -> list[str]:
    """Write a model whose last layer is the head, if the head is one layer.

    Args:
        source: the config.
        draft: takes the model.
        trunk: the trunk.
        heads: heads of VISSL, each on the one before it.
        named: write a trunk with a head, whose modules have separate names, in any case.
    """
    # Several heads on one feature are a chain.
    item = heads if len(heads) > 1 else heads[0]
    head = _convert_head(source, draft, item, 0)
    section = head.section
    if not named and section.keys() == {"name", "hidden", "classes"} and not section["hidden"]:
        draft.experiment["MODEL"] = {**trunk.section, "classes": section["classes"]}
        draft.head_rules = [(pattern, f"{trunk.cut}.") for pattern, _ in head.rules]
        draft.head_pattern = f"{trunk.cut}.*"
        draft.translate("MODEL.classes", HEADS)
        return []
    draft.head_rules = [(pattern, f"heads.head.{name}") for pattern, name in head.rules]
    _write_heads(draft, trunk, {"head": section})
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
    if folder := source.get("EXTRACT_FEATURES.OUTPUT_DIR"):
        draft.put("EXTRACT.dir", folder, "EXTRACT_FEATURES.OUTPUT_DIR")
    if str(source.get("engine_name")) == "extract_cluster":
        _convert_assignments(source, draft, trunk)
        return
    predicts = str(source.get("engine_name")) == "extract_label_predictions"
    if predicts and source.is_feature_extractor:
        _extract_probes(source, draft, trunk)
        return
    uses_head = source.get(f"{SETTINGS}.EVAL_TRUNK_AND_HEAD")
    if not uses_head or not _extract_head(source, draft, trunk):
        _extract_features(source, draft, trunk)


def _extract_features(source: VisslConfig, draft: ExperimentDraft, trunk: Trunk) -> None:
    """Write an extraction of features of the trunk."""
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
        labels[_make_label(str(name), labels)] = {"name": layer, **feature}
    if labels:
        _write_heads(draft, trunk, labels)
        layers = [f"heads.{label}" for label in labels]
    else:
        draft.experiment["MODEL"] = {**trunk.section}
        layers = [_last_layer(trunk)]
        if layers == ["norm"]:
            # VISSL's transformers return the class token, or the mean of the patches.
            tokens = trunk.section.get("params", {}).get("class_token", True)
            draft.put("EXTRACT.pool", "first" if tokens else "mean")
        heads = list(source.get(HEADS, []))
        projects = any(item[0] in PROJECTIONS for item in heads)
        if heads and not projects and not source.get(f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY"):
            _write_plain_head(source, draft, trunk, heads)
    draft.put("EXTRACT.layers", layers)
    keys = [key for key in source.given if key.startswith(SETTINGS)]
    draft.translate("EXTRACT.layers", *keys)
    if not draft.experiment["MODEL"].get("classes"):
        draft.put("EXTRACT.predictions", value=False)
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


def _extract_probes(source: VisslConfig, draft: ExperimentDraft, trunk: Trunk) -> None:
    """Write an extraction of the scores of classifiers of several features."""
    try:
        labels = _write_classifier(source, draft, trunk)
    except UnknownHeadError as error:
        draft.miss(str(error), HEADS)
        return
    draft.put("EXTRACT.layers", [f"heads.{label}" for label in labels])
    draft.put("EXTRACT.predictions", value=False)
    draft.note("The layers have the scores of the heads; the largest one is the predicted class.")


def _extract_head(source: VisslConfig, draft: ExperimentDraft, trunk: Trunk) -> bool:
    """Write an extraction of the output of the head, which VISSL compares in its benchmark of
    nearest neighbours; return whether there is such a head."""
    heads = list(source.get(HEADS, []))
    if source.is_feature_extractor or not heads or any(item[0] == "identity" for item in heads):
        return False
    if str(source.get("engine_name")) == "extract_label_predictions":
        return False
    try:
        head = convert_projection(heads)
    except UnknownHeadError as error:
        draft.miss(str(error), HEADS)
        return True
    _write_embedding(draft, trunk, head)
    draft.put("EXTRACT.layers", ["head"])
    draft.put("EXTRACT.predictions", value=False)
    keys = [key for key in source.given if key.startswith(SETTINGS)]
    draft.translate("EXTRACT.layers", HEADS, *keys)
    return True


def _write_plain_head(
    source: VisslConfig, draft: ExperimentDraft, trunk: Trunk, heads: Sequence[Any]
) -> None:
    try:
        _write_plain_classifier(source, draft, trunk, heads)
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
        head = convert_classifier(heads[:1])
        section["classes"] = head.section["classes"]
    except (UnknownHeadError, IndexError):
        draft.miss("a teacher without logits", f"{base}.HEAD.PARAMS")
        head = Head({})
    keys = [key for key in source.given if key.startswith(f"{base}.")]
    path = source.get(f"{base}.WEIGHTS_INIT.PARAMS_FILE")
    rules = _make_trunk_rules(teacher, whole=True)
    rules += [[pattern, f"{teacher.cut}."] for pattern, _ in head.rules]
    section["weights"] = {"path": path, "rename": rules}
    draft.put("TASK.name", "distillation")
    draft.put("TASK.teacher", section, *keys)


def _convert_view_teacher(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write the teacher of a self-supervised distillation."""
    base = "DISTILLATION.TEACHER_MODEL"
    trunk = convert_trunk(source, draft, base, views=True)
    if trunk is None:
        return
    try:
        head = convert_projection(list(source.get(f"{base}.HEAD.PARAMS", [])))
    except UnknownHeadError as error:
        draft.miss(str(error), f"{base}.HEAD.PARAMS")
        return
    path = source.get(f"{base}.WEIGHTS_INIT.PARAMS_FILE")
    size = find_image_size(draft)
    rules = _make_trunk_rules(trunk, whole=False)
    rules += [[pattern, f"head.{name}"] for pattern, name in head.rules]
    section = {
        "name": "trunk_head",
        "trunk": {**trunk.section, "cut": trunk.cut},
        "head": dict(head.section),
        "input_shape": [3, size, size],
        "weights": {"path": path, "rename": rules},
    }
    draft.put("TASK.teacher", section, *[key for key in source.given if key.startswith(base)])
    if trunk.prefix is None:
        draft.note(f"Names of weights of {trunk.section['name']} need TASK.teacher.weights.rename.")


def _convert_frozen(source: VisslConfig, draft: ExperimentDraft) -> None:
    model = draft.experiment["MODEL"]
    has_trunk = "trunk" in model
    patterns = [str(name) for name in source.get("MODEL.NON_TRAINABLE_PARAMS", [])]
    draft.translate("MODEL.freeze", "MODEL.NON_TRAINABLE_PARAMS")
    trains = not source.is_extraction
    frozen = f"{SETTINGS}.FREEZE_TRUNK_ONLY"
    if trains and source.get(f"{SETTINGS}.EVAL_MODE_ON") and source.get(frozen):
        if not has_trunk:
            draft.miss("a frozen trunk in a model without named heads", frozen)
        elif source.is_feature_extractor:
            patterns.append("trunk")
        else:
            # VISSL freezes the weights and leaves the trunk in training mode, in which batch norms
            # update their statistics; a learning rate of 0 does the same.
            draft.put("OPTIMIZER.groups", [{"match": "trunk.*", "lr_scale": 0.0}], frozen)
    if patterns:
        draft.put("MODEL.freeze", patterns)
    rules = []
    updates_key = "MODEL.TEMP_FROZEN_PARAMS_ITER_MAP"
    renames = dict(draft.head_rules)
    for name, updates in source.get(updates_key, []):
        # VISSL's names are those inside of DistributedDataParallel.
        vissl_name = str(name).removeprefix("module.")
        matches = [new for pattern, new in renames.items() if re.search(pattern, vissl_name)]
        if "prototypes" in name and draft.experiment.get("LOSS", {}).get("name") == "swav":
            draft.put("LOSS.frozen_updates", int(updates), updates_key)
        elif matches:
            rules.append({"match": matches[0].rstrip("."), "for": int(updates)})
        elif vissl_name.endswith(".weight_g"):
            draft.translate("MODEL.freeze_updates", updates_key)
        else:
            pattern = "head.*" if "heads" in vissl_name else vissl_name
            rules.append({"match": pattern, "for": int(updates)})
    if rules:
        draft.put("MODEL.freeze_updates", rules, updates_key)


def _make_trunk_rules(trunk: Trunk, *, whole: bool) -> list[list[str]]:
    """Return rules that rename VISSL's weights of the trunk to the names in the model."""
    target = trunk.inner if whole else f"trunk.{trunk.inner}"
    if trunk.prefix is None:
        return []
    # VISSL calls the trunk inside of a frozen one `base_model`.
    return [[rf"^trunk\.(base_model\.)?{trunk.prefix}", target]]


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
    weights: dict[str, Any] = {"path": path}
    rules = _make_trunk_rules(trunk, whole="trunk" not in model)
    affixes = [f"{base}.REMOVE_PREFIX", f"{base}.APPEND_PREFIX"]
    if str(source.get(f"{base}.STATE_DICT_KEY_NAME")) == CLASSY:
        draft.skip("VISSL changes no names in its own files", *affixes)
    else:
        weights |= _read_prefixes(source)
        key = source.get(f"{base}.STATE_DICT_KEY_NAME")
        weights |= {"key": key} if key else {}
        appended = str(source.get(affixes[1]) or "")
        if appended:
            # The last layer of such a file is no layer of VISSL's trunk.
            last = [[rf"^{re.escape(appended)}{re.escape(trunk.cut)}\.", "unused."]]
            rules = [["^", appended], *last, *rules]
            weights["strict"] = False
    skipped = list(source.get(f"{base}.SKIP_LAYERS", []))
    if source.loads_head and "heads" not in skipped:
        rules += [[pattern, name] for pattern, name in draft.head_rules]
        # Like VISSL, which loads what the file has.
        weights["strict"] = False
    elif draft.head_rules:
        parts = {"trunk_heads": "heads.*", "trunk_head": "head.*"}
        weights["reinit"] = [parts.get(model["name"], f"{trunk.cut}.*")]
    kept = [f"*{name}*" for name in skipped if name not in ("heads", "num_batches_tracked")]
    if kept:
        weights["reinit"] = [*weights.get("reinit", []), *kept]
    if rules:
        weights["rename"] = rules
    draft.put("MODEL.weights", weights, *[key for key in source.given if key.startswith(base)])
    if trunk.prefix is None:
        draft.note(
            f"The weights of {path} have other names than {trunk.section['name']}: add rules to "
            "MODEL.weights.rename; `phasetrain plan` lists the names on both sides."
        )


def _read_prefixes(source: VisslConfig) -> dict[str, Any]:
    removed = str(source.get("MODEL.WEIGHTS_INIT.REMOVE_PREFIX") or "")
    return {"prefix_remove": removed} if removed else {}


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
