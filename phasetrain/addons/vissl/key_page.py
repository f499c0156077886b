"""The page of the docs with every key of VISSL."""

import sys

from phasetrain.addons.vissl.draft import NONE, NOT_NEEDED, format_row, list_table_rows
from phasetrain.addons.vissl.losses import CLASSIFIERS, SELF_SUPERVISED
from phasetrain.addons.vissl.transforms import CONVERTERS, GAPS, NEEDLESS, SAME

HEAD = """# VISSL's keys

Every key of VISSL 0.1.6 and what replaces it here, made by `make reference` from the table with
which [`phasetrain migrate vissl`](vissl.md) converts configs. `X` is TRAIN or TEST. `params` are
those of the [model](../model.md#models-from-other-libraries)."""


def key_page() -> str:
    """Return the page as Markdown."""
    lines = [HEAD, "", "## Keys", "| VISSL | phasetrain |", "|---|---|"]
    seen = set()
    for key, row in list_table_rows():
        name = key.replace("DATA.TRAIN.", "DATA.X.").replace("DATA.TEST.", "DATA.X.")
        if name not in seen:
            lines.append(f"| `{name}` | {_format_cell(row)} |")
        seen.add(name)
    lines += ["", "## Transforms", "| VISSL | phasetrain |", "|---|---|"]
    lines += [f"| `{name}` | {cell} |" for name, cell in sorted(_list_transforms().items())]
    lines += ["", "## Losses", "| VISSL | phasetrain |", "|---|---|"]
    lines += [f"| `{name}` | `cross_entropy`, or `BCEWithLogitsLoss` |" for name in CLASSIFIERS]
    lines += [f"| `{name}` | `{counterpart}` |" for name, counterpart in SELF_SUPERVISED.items()]
    return "\n".join([*lines, ""])


def _format_cell(row: str) -> str:
    for status in (NONE, NOT_NEEDED):
        if row.startswith(f"{status}: "):
            return f"*{status}*: {row.removeprefix(f'{status}: ')}"
    return format_row(row).replace("|", "\\|")


def _list_transforms() -> dict[str, str]:
    """Return transform of VISSL -> its counterpart in words."""
    counterparts = {name: f"`{same}`" for name, same in SAME.items()}
    counterparts |= {name: f"*not needed*: {reason}" for name, reason in NEEDLESS.items()}
    counterparts |= {name: f"*none*: {reason}" for name, reason in GAPS.items()}
    for name, convert in CONVERTERS.items():
        items, _ = convert({})
        names = [str(item["name"]) for item in items]
        for item in items:
            names += [str(inner["name"]) for inner in item.get("transforms", [])]
        counterparts[name] = ", ".join(f"`{inner_name}`" for inner_name in names)
    for name in ("ImgReplicatePil", "ImgPilToMultiCrop"):
        counterparts[name] = "`multi_crop`"
    counterparts["ImgPilMultiCropRandomApply"] = "`apply` in groups of `multi_crop`"
    return counterparts


if __name__ == "__main__":
    sys.stdout.write(key_page())
