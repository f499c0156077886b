"""Composes a config of Hydra without running its code: defaults lists, packages of groups,
references between keys."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phasetrain.errors import ConfigError, did_you_mean

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")

MAX_REFERENCES = 20
"""Maximum number of references that one value goes through."""


def compose_config(path: Path, choices: Sequence[str]) -> dict[str, Any]:
    """Return the whole config of a main file and the files of its defaults list.

    References `${a.b}` are replaced by the value of the key; others, as `${oc.env:HOME}`, stay.

    Args:
        path: the main file; groups are folders next to it.
        choices: `GROUP=NAME`, in addition to the defaults list or instead of its entry.

    Raises:
        ConfigError: a file is missing or no YAML, or a choice is not `GROUP=NAME`.
    """
    chosen = {}
    for choice in choices:
        group, separator, name = choice.partition("=")
        if not separator:
            raise ConfigError(
                f"--choose = {choice!r}: expected GROUP=NAME, such as trainer=gpu",
                code="config.syntax",
            )
        chosen[group.lstrip("+")] = name
    config = _load(path.parent, path.stem, chosen, is_main=True)
    resolved: dict[str, Any] = _resolve(config, config)
    return resolved


def _load(
    folder: Path, name: str, chosen: Mapping[str, str], *, is_main: bool = False
) -> dict[str, Any]:
    """Return a file merged with the files of its defaults list, in their order."""
    path = folder / f"{name}.yaml"
    content = _read(path)
    merged: dict[str, Any] = {}
    entries = list(content.pop("defaults", []))
    if "_self_" not in entries:
        entries.append("_self_")
    if is_main:
        listed = {key for entry in entries if isinstance(entry, Mapping) for key in entry}
        entries += [{group: name} for group, name in chosen.items() if group not in listed]
    for entry in entries:
        if entry == "_self_":
            _merge(merged, content)
        elif isinstance(entry, str):
            _merge(merged, _load(folder, entry.removesuffix(".yaml"), chosen))
        else:
            for key, option in entry.items():
                group = str(key).removeprefix("optional ").removeprefix("override ").strip()
                selected = chosen.get(group.lstrip("/"), option)
                _merge_group(merged, folder, group, selected, chosen, is_optional="optional" in key)
    return merged


def _merge_group(
    merged: dict[str, Any],
    folder: Path,
    group: str,
    option: Any,
    chosen: Mapping[str, str],
    *,
    is_optional: bool,
) -> None:
    if option is None or group.startswith(("hydra", "/hydra")):
        return
    root = folder if not group.startswith("/") else folder.parent
    group = group.lstrip("/").partition("@")[0]
    for name in option if isinstance(option, list) else [option]:
        name = str(name).removesuffix(".yaml")
        if is_optional and not (root / group / f"{name}.yaml").is_file():
            continue
        content = _load(root / group, name, chosen)
        # A file with `# @package _global_` has sections of the whole config.
        is_global = "@package _global_" in (root / group / f"{name}.yaml").read_text("utf-8")
        _merge(merged, content if is_global else {group: content})


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except OSError as error:
        names = sorted(other.stem for other in path.parent.glob("*.yaml"))
        near = did_you_mean(path.stem, names)
        raise ConfigError(
            f"{path}: this config cannot be read ({error.strerror}){near or ''}",
            code="config.not_found",
        ) from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path}: this is no YAML: {error}", code="config.syntax") from error
    if not isinstance(content, dict):
        return {}
    return {str(key): value for key, value in content.items()}


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _resolve(value: Any, config: Mapping[str, Any], depth: int = 0) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolve(entry, config, depth) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolve(entry, config, depth) for entry in value]
    if not isinstance(value, str) or depth > MAX_REFERENCES:
        return value
    match = _REFERENCE.fullmatch(value)
    if match:
        target: Any = config
        for name in match[1].split("."):
            target = target.get(name) if isinstance(target, Mapping) else None
        return value if target is None else _resolve(target, config, depth + 1)
    return _REFERENCE.sub(lambda found: str(_resolve(found[0], config, depth + 1)), value)
