"""Rules of keys that depend on the splits of DATA: METERS.*.splits, LOSS.losses.*.splits and
LOSS.ignore_index."""

from collections.abc import Iterator, Mapping
from typing import Any

from phasetrain.config.rules.draft import ConfigDraft
from phasetrain.config.schema import is_split
from phasetrain.errors import did_you_mean

PADDING = -100
"""Padding of targets by default, which cross entropy ignores."""


def derive_ignored_targets(draft: ConfigDraft) -> None:
    """Set LOSS.ignore_index of cross entropy if targets are padded, so that batches are weighted by
    the targets that count, as the loss is a mean over them."""
    loss = draft.config["LOSS"]
    kinds = (loss["name"], draft.get("TASK.name"))
    if kinds != ("cross_entropy", "supervised") or loss.get("ignore_index") is not None:
        return
    for split, section in draft.config["DATA"].items():
        collate = section["collate"]
        options = collate if isinstance(collate, Mapping) else {"name": collate}
        is_padding = options.get("target_value", PADDING) == PADDING
        # With `fields`, only mappings of targets are padded, which cross entropy does not take.
        if options.get("name") == "pad" and is_padding and not options.get("fields"):
            draft.set("LOSS.ignore_index", PADDING, f"DATA.{split}.collate pads targets with it")
            return


def check_splits(draft: ConfigDraft) -> None:
    """Reject names of splits that DATA does not have, and a split for which no loss is left."""
    splits = [name for name in draft.config["DATA"] if is_split(name)]
    for path, names in _list_selections(draft):
        if not names:
            draft.reject(
                path,
                f"{path} = []: expected at least one of {', '.join(splits)}; leave it out for all",
            )
        for name in names:
            if name not in splits:
                near = did_you_mean(name, splits) or ";"
                draft.reject(
                    path,
                    f"{path} = {name!r}: DATA has no such split{near} it has {', '.join(splits)}",
                    "config.unknown_split",
                )
    _check_loss_of_each_split(draft, splits)


def _list_selections(draft: ConfigDraft) -> Iterator[tuple[str, list[str]]]:
    sections: dict[str, Any] = {"METERS": draft.config["METERS"]}
    sections["LOSS.losses"] = _list_losses(draft)
    for path, entries in sections.items():
        for label, entry in entries.items():
            if isinstance(entry, Mapping) and entry.get("splits") is not None:
                yield f"{path}.{label}.splits", entry["splits"]


def _list_losses(draft: ConfigDraft) -> Mapping[str, Any]:
    section = draft.config["LOSS"]
    losses = section.get("losses")
    if section["name"] == "weighted_sum" and isinstance(losses, Mapping):
        return losses
    return {}


def _check_loss_of_each_split(draft: ConfigDraft, splits: list[str]) -> None:
    losses = _list_losses(draft).values()
    for split in splits if losses else ():
        selected = [(loss or {}).get("splits") for loss in losses]
        if all(names is not None and split not in names for names in selected):
            draft.reject(
                "LOSS.losses",
                f"LOSS.losses: DATA.{split} has no loss, because `splits` of every entry leaves it "
                f"out; add {split} to the `splits` of one of them",
            )
