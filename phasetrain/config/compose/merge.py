"""Merge layers into one config, and record which layer set each value."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from phasetrain.config.compose.sources import Layer
from phasetrain.config.nested import leaves
from phasetrain.config.schema import (
    DEFAULT_NAMES,
    LABELLED,
    PARTS,
    WORDS,
    Schema,
    is_split,
    matches,
    part_pattern,
)
from phasetrain.config.sections.keys import join_path
from phasetrain.config.sections.value_types import list_choices

IMPORTS = "RUN.imports"
"""The only list that is not replaced by higher layers but extended, since parts that a lower layer
names would be missing otherwise."""


class Merged:
    """The layers applied so far.

    Mappings are merged recursively, lists are replaced, null is kept. If a layer changes the name
    of a part, parameters that lower layers set for the old part are dropped; keys of the section
    are kept.

    Attributes:
        values: the nested config.
        origins: dotted path of each leaf -> name of the layer that set it last. A list is a leaf,
            and so is an empty mapping.
        notes: one line per dropped parameter.
    """

    def __init__(self, schema: Schema) -> None:
        self.values: dict[str, Any] = {}
        # Recorded while merging: afterwards the layers cannot be told apart, and both the error
        # messages and the precedence of lengths depend on them.
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self._schema = schema

    def apply(self, layer: Layer) -> None:
        """Merge a layer on top of the others."""
        self._merge(self.values, layer.values, "", layer.name)

    def get(self, path: str) -> Any:
        """Return the value at a dotted path, or None."""
        return lookup(self.values, path)

    def replace(self, path: str, value: Any) -> None:
        """Replace a leaf by its resolved value; its origin does not change."""
        parent, _, name = path.rpartition(".")
        layer = self.origins.pop(path)
        target = lookup(self.values, parent) if parent else self.values
        # So that `_assign` does not merge the value into the unresolved one.
        target[name] = None
        self._assign(target, name, path, value, layer)

    def remove(self, path: str, default: Layer) -> bool:
        """Undo all settings of a path: remove a label or a test split, or restore the default of a
        key.

        Returns:
            False when nothing is there.
        """
        names = path.split(".")
        parent = lookup(self.values, ".".join(names[:-1])) if len(names) > 1 else self.values
        if not isinstance(parent, dict) or names[-1] not in parent:
            return False
        del parent[names[-1]]
        self._forget(path)
        if not _may_be_absent(path):
            self._restore(path, default)
        return True

    def drop_assumed_datasets(self, assumed: Collection[str]) -> None:
        """Drop the dataset of DATA.TRAIN or DATA.TEST if only the other split names one: data that
        nobody asked for must not be mixed with it.

        Args:
            assumed: layers that apply because nothing was given.
        """
        paths = [f"DATA.{split}.dataset" for split in ("TRAIN", "TEST")]
        names = [self.get(path) for path in paths]
        chosen = [
            name is not None and self.origins.get(path) not in assumed
            for path, name in zip(paths, names, strict=True)
        ]
        if names[0] == names[1] or all(chosen) or not any(chosen):
            return
        foreign = paths[chosen.index(False)]
        if foreign in self.origins:
            self.replace(foreign, None)
        split = foreign.removesuffix(".dataset")
        for name in list(self.get(split) or ()):
            here = f"{split}.{name}"
            if not self._schema.has(here) and origin_of(self.origins, here) in assumed:
                self._drop(here)

    def finish(self, default: Layer) -> None:
        """Drop labels and splits that are null, and give each split the keys it does not set."""
        if self.get("DATA.TRAIN") is None:
            self._restore("DATA.TRAIN", default)
        self._drop_absent_test()
        # A list, since `_forget` deletes from the origins.
        for path in filter(_may_be_absent, list(self.origins)):
            if self.get(path) is None:
                self._drop(path)
        # An empty mapping is a leaf, and every leaf has an origin.
        for path in LABELLED:
            if self.get(path) == {}:
                self.origins.setdefault(path, default.name)
        data = self.get("DATA")
        for split, keys in data.items() if isinstance(data, dict) else ():
            if is_split(split) and split != "TRAIN" and isinstance(keys, dict):
                data[split] = _complete_split(keys, default.values["DATA"]["TEST"])
                self.origins.pop(f"DATA.{split}", None)
                for leaf in leaves(data[split], f"DATA.{split}"):
                    self.origins.setdefault(leaf, default.name)

    def _merge(
        self, target: dict[str, Any], source: Mapping[Any, Any], path: str, layer: str
    ) -> None:
        for key, new in source.items():
            here = join_path(path, str(key))
            pattern = part_pattern(here)
            # Before _rename, which compares names inside of mappings only.
            if pattern in WORDS:
                new = self._as_mapping(target, str(key), here, new)
            if (
                pattern is not None
                and isinstance(target.get(str(key)), dict)
                and isinstance(new, Mapping)
            ):
                self._rename(target[str(key)], here, new, pattern, layer)
            self._assign(target, str(key), here, new, layer)

    def _assign(self, target: dict[str, Any], key: str, here: str, new: Any, layer: str) -> None:
        old = target.get(key)
        new = _read_short_form(self._schema, here, new)
        # `HOOKS: null` removes all labels of lower layers, so that a higher layer can list its own.
        if new is None and here in LABELLED:
            new = {}
            old = None
        if isinstance(new, Mapping):
            if not isinstance(old, dict):
                self._forget(here)
                target[key] = {}
            if new:
                # An empty mapping was a leaf; from now on its keys have origins themselves.
                self.origins.pop(here, None)
            elif not target[key]:
                self.origins.setdefault(here, layer)
            self._merge(target[key], new, here, layer)
            return
        # Parts that a lower layer names may be registered by the modules that it imports.
        if here == IMPORTS and isinstance(new, list) and isinstance(old, list):
            if not new:
                return
            new = [*old, *(name for name in new if name not in old)]
        if isinstance(old, dict):
            self._forget(here)
        # A list replaces the lower one as a whole: with a merge by index or by appending, no layer
        # could shorten or reorder it. A copy, so that no change of the config reaches the layer.
        target[key] = deepcopy(new)
        self.origins[here] = layer

    def _as_mapping(self, target: dict[str, Any], key: str, here: str, new: Any) -> Any:
        """Convert a bare name to `{name: ...}` if the other layer has a mapping."""
        old = target.get(key)
        if isinstance(old, str) and isinstance(new, Mapping):
            target[key] = {"name": old}
            self.origins[f"{here}.name"] = self.origins.pop(here)
        if isinstance(old, dict) and isinstance(new, str):
            return {"name": new}
        return new

    def _rename(
        self, old: dict[str, Any], here: str, new: Mapping[str, Any], pattern: str, layer: str
    ) -> None:
        """Drop the parameters of the old part if `new` names another one."""
        name_key = PARTS[pattern]
        old_name = old.get(name_key, here.rpartition(".")[2] if pattern in DEFAULT_NAMES else None)
        new_name = new.get(name_key)
        if new_name is None or old_name is None or new_name == old_name:
            return
        for parameter in [p for p in old if p != name_key and not self._schema.has(f"{here}.{p}")]:
            path = f"{here}.{parameter}"
            self.notes.append(
                f"{path} = {old.pop(parameter)!r} ({origin_of(self.origins, path)}) dropped: "
                f"{here}.{name_key} is now {new_name!r} ({layer})"
            )
            self._forget(path)

    def _drop_absent_test(self) -> None:
        """Drop DATA.TEST if it has no dataset: its other keys have defaults, so that they do not
        tell whether it is wanted."""
        test = self.get("DATA.TEST")
        if not isinstance(test, dict) or test.get("dataset") is not None:
            return
        # A parameter without a dataset is kept, for the validation: `datset: idx`.
        if all(self._schema.has(f"DATA.TEST.{name}") for name in test):
            self._drop("DATA.TEST")

    def _drop(self, path: str) -> None:
        parent, _, label = path.rpartition(".")
        lookup(self.values, parent).pop(label, None)
        self._forget(path)

    def _restore(self, path: str, default: Layer) -> None:
        value = lookup(default.values, path)
        if value is None and path not in self._schema.keys:
            return
        nested: Any = value
        for name in reversed(path.split(".")):
            nested = {name: nested}
        self._merge(self.values, nested, "", default.name)

    def _forget(self, path: str) -> None:
        for leaf in [p for p in self.origins if p == path or p.startswith(f"{path}.")]:
            del self.origins[leaf]


def _read_short_form(schema: Schema, here: str, new: Any) -> Any:
    """Return the full form of a short value.

    A boolean is `on` or `off` for a key that takes these words and no booleans: YAML reads them as
    true and false. A text is a list of one for a key that takes lists of texts and no text:
    brackets need quotes in most shells.
    """
    if not isinstance(new, bool | str):
        return new
    key = schema.key(here)
    if key is None or key.type.fits(new):
        return new
    if isinstance(new, bool):
        word = "on" if new else "off"
        if word in list_choices(key.type.annotation):
            return word
    is_list_of_texts = key.type.fits(["text"]) and not key.type.fits([{}])
    # An interpolation may be replaced by a list.
    if isinstance(new, str) and "${" not in new and is_list_of_texts:
        return [new]
    return new


def _complete_split(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a split, completed with defaults; groups of keys too."""
    groups = {
        key: deepcopy(dict(default)) | dict(keys[key])
        for key, default in defaults.items()
        if isinstance(default, Mapping) and isinstance(keys.get(key), Mapping)
    }
    return deepcopy(dict(defaults)) | dict(keys) | groups


def lookup(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of nested mappings, or None."""
    node: Any = values
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    return node


def origin_of(origins: Mapping[str, str], path: str) -> str:
    """Return the layer that set a path, or the first leaf below it; `""` if there is none."""
    if path in origins:
        return origins[path]
    return next((layer for leaf, layer in origins.items() if leaf.startswith(f"{path}.")), "")


def _may_be_absent(path: str) -> bool:
    """Return whether a path is a label or a test split; all other keys always have a value."""
    if path.rpartition(".")[0] in LABELLED:
        return True
    return matches(path, "DATA.*") and path != "DATA.TRAIN"
