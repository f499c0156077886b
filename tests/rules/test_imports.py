"""The levels of pyproject.toml cover the package: every module is on exactly one."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def levels() -> list[str]:
    """Return the modules and folders named in the layers contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    return [name.strip(" ()") for layer in layers for name in re.split("[|:]", layer)]


def modules() -> list[str]:
    """Return every module of the package by its dotted name."""
    names = []
    for path in sorted((ROOT / "phasetrain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def misplaced(modules: Iterable[str], levels: Iterable[str]) -> list[str]:
    """Return a line for each module that is on no level, or on more than one."""
    levels = list(levels)
    found = []
    for module in modules:
        homes = [level for level in levels if module == level or module.startswith(f"{level}.")]
        if module != "phasetrain" and len(homes) != 1:
            found.append(
                f"{module}: on {', '.join(homes) or 'no level'}; name it once in [tool.importlinter]"
            )
    return found


def test_every_module_is_on_one_level() -> None:
    assert misplaced(modules(), levels()) == []


def test_a_new_module_and_a_module_named_twice_are_seen() -> None:
    found = misplaced(
        ["phasetrain.new", "phasetrain.engine.plan", "phasetrain.data.loading.loader"],
        ["phasetrain.engine", "phasetrain.engine.plan", "phasetrain.data"],
    )
    assert found == [
        "phasetrain.new: on no level; name it once in [tool.importlinter]",
        "phasetrain.engine.plan: on phasetrain.engine, phasetrain.engine.plan; name it once in [tool.importlinter]",
    ]


def test_the_contract_lists_top_level_folders_and_files_only() -> None:
    assert [level for level in levels() if level.count(".") > 1] == []


def test_type_checking_imports_count() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    assert settings["exclude_type_checking_imports"] is False
