"""The card of a packed model: where it comes from, as JSON and as a page."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from phasetrain import __version__
from phasetrain.addons.deploy.input_transform import describe_transform
from phasetrain.config.addons import require_service
from phasetrain.config.nested import to_json_value
from phasetrain.errors import ConfigError
from phasetrain.runs.view import RunView
from phasetrain.runtime.format import format_count, format_metric

LONGEST_LIST = 20
"""Maximum number of class names on the page."""


def make_card(
    folder: str,
    config: Mapping[str, Any],
    model_info: Mapping[str, Any],
    splits: Mapping[str, Mapping[str, Any]],
    *,
    license_name: str | None,
    certificate: str | None,
) -> dict[str, Any]:
    """Return the content of card.json; equal runs and arguments give equal cards.

    Args:
        folder: the run folder.
        config: its config.
        model_info: the model: name, checkpoint, updates, metrics, digests, classes.
        splits: its data, see `read_splits`.
        license_name: license of the model, such as `Apache-2.0`.
        certificate: path of a certificate.json of `phasetrain certify`.

    Raises:
        ConfigError: there is no such certificate.
    """
    run = RunView(folder)
    environment = run.environment.content
    versions = {key: environment.get(key) for key in ("phasetrain", "python", "torch", "numpy")}
    plan = run.plan.content
    # Step by step: records of another version may lack any of them.
    command = environment.get("command") or ()
    git = _read_mapping(environment.get("git"))
    card = {
        "name": plan.get("name"),
        "license": license_name,
        **model_info,
        "data": {
            name: {
                "dataset": split.get("dataset"),
                "samples": split.get("samples"),
                "transforms": list(map(describe_transform, split.get("transforms") or ())),
                "facts": split["facts"],
            }
            for name, split in splits.items()
        },
        "seed": config["RUN"].get("seed"),
        "command": shlex.join(map(str, command)),
        "commit": git.get("commit"),
        "versions": {**versions, "packed_with": __version__},
        "machine": {key: environment.get(key) for key in ("machine", "device", "threads")},
        "deviations": environment.get("departures", []),
        "certificate": _read_certificate(certificate),
    }
    status = run.status
    # Of an earlier checkpoint, the digest of the final weights says nothing.
    is_final = status.state == "finished" and status.checkpoint == model_info["checkpoint"]
    card["run_sha256"] = status.digest if is_final else None
    content: dict[str, Any] = to_json_value(card)
    return content


def _read_mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return {}


def _read_certificate(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    read_certificate = require_service("read_certificate", "experiments", f"--certificate {path}")
    try:
        content: dict[str, Any] = read_certificate(path)
        return content
    except ConfigError as error:
        text = str(error).replace("--check", "--certificate")
        raise ConfigError(text, code="pack.certificate") from error


def format_page(card: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    model = card["model"]
    lines = [
        f"# {card['name']}",
        "",
        f"`{model['name']}` with {model['parameters']:,} parameters, trained with phasetrain for "
        f"{card['updates']} updates.",
        "",
        *_format_table(("", ""), _list_rows(card)),
        "",
        "## Metrics",
        *_format_table(
            ("metric", "value"),
            [(name, _format_value(value)) for name, value in card["metrics"].items()],
        ),
        "",
        "## Data",
        *_format_table(
            ("split", "dataset", "samples", "transforms"),
            [
                (name, split["dataset"], split["samples"], ", ".join(split["transforms"]))
                for name, split in card["data"].items()
            ],
        ),
        "",
        "## Use",
        "```bash",
        # Not the name of the file, on which its digest would depend.
        "phasetrain predict MODEL.zip FILE...",
        "```",
        "",
        "It repeats the example in the file first. The file contains no code.",
    ]
    if card["code"]:
        names = ", ".join(f"`{entry['module']}` ({entry['file']})" for entry in card["code"])
        lines += [
            "",
            f"Needs custom code, which is not part of it: {names}; name it by `--imports`.",
        ]
    if card["command"]:
        lines += ["", "## Reproduce", "```bash", str(card["command"]), "```"]
    lines += ["", "## Exactness", _describe_exactness(card)]
    return "\n".join(lines) + "\n"


def _list_rows(card: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    classes = list(card["classes"])
    shown = ", ".join(classes[:LONGEST_LIST])
    if len(classes) > LONGEST_LIST:
        shown += f", ... ({len(classes)})"
    versions = ", ".join(f"{name} {value}" for name, value in card["versions"].items())
    tensors = None  # an earlier checkpoint is in no status.json
    if card["run_sha256"] is not None:
        tensors = f"sha256 {card['run_sha256']}"
    rows = [
        ("license", card["license"] or "not stated"),
        ("input", _describe_input(card)),
        ("classes", shown or "none"),
        ("checkpoint", f"{card['checkpoint']}, weights: {card['weights']}"),
        # Two digests of the same weights: a file also has a header.
        ("digest of the file weights.safetensors", f"sha256 {card['weights_sha256']}"),
        ("digest of the tensors, as in status.json", tensors),
        ("digest of the config", card["config"]),
        ("seed", card["seed"]),
        ("commit", card["commit"]),
        ("versions", versions),
    ]
    return [row for row in rows if row[1] is not None]


def _format_value(metric: Any) -> str:
    # Neither counts, nor what JSON has for NaN.
    if isinstance(metric, float):
        return format_metric(metric)
    return str(metric)


def _describe_input(card: Mapping[str, Any]) -> str | None:
    """Return the shape of an input and the channels of images; None if no split has recorded
    them."""
    # Test splits first: their transforms are those of predictions.
    for split in sorted(card["data"], key=lambda name: name == "train"):
        split_info = card["data"][split]["facts"]
        shape = split_info.get("input_shape")
        if isinstance(shape, list):
            text = f"shape {tuple(shape)} after the transforms"
            if isinstance(split_info.get("channels"), int):
                text += f", of images with {format_count(split_info['channels'], 'channel')}"
            return text
    return None


def _describe_exactness(card: Mapping[str, Any]) -> str:
    certificate = card["certificate"]
    if certificate is None:
        return "No certificate of `phasetrain certify` is part of this card."
    return (
        f"`phasetrain certify`, {certificate.get('made')}: {certificate.get('verdict')} (config "
        f"sha256 {certificate.get('config_sha256')}); the whole certificate is in card.json."
    )


def _format_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    def format_row(cells: Sequence[Any]) -> str:
        # Names come from configs and data, and may contain anything.
        texts = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
        return f"| {' | '.join(texts)} |"

    return [format_row(head), f"|{'---|' * len(head)}", *map(format_row, rows)]
