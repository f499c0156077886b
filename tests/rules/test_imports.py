"""The floors of pyproject.toml cover the package: every module stands on exactly one."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def floors() -> list[str]:
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


def misplaced(modules: Iterable[str], floors: Iterable[str]) -> list[str]:
    """Return a line for each module that stands on no floor, or on more than one."""
    floors = list(floors)
    found = []
    for module in modules:
        homes = [floor for floor in floors if module == floor or module.startswith(f"{floor}.")]
        if module != "phasetrain" and len(homes) != 1:
            found.append(
                f"{module}: on {', '.join(homes) or 'no floor'}; name it once in [tool.importlinter]"
            )
    return found


def test_every_module_stands_on_one_floor() -> None:
    assert misplaced(modules(), floors()) == []


def test_a_new_module_and_a_module_named_twice_are_seen() -> None:
    found = misplaced(
        ["phasetrain.new", "phasetrain.engine.plan", "phasetrain.data.loading.loader"],
        ["phasetrain.engine", "phasetrain.engine.plan", "phasetrain.data"],
    )
    assert found == [
        "phasetrain.new: on no floor; name it once in [tool.importlinter]",
        "phasetrain.engine.plan: on phasetrain.engine, phasetrain.engine.plan; name it once in [tool.importlinter]",
    ]


def test_the_contract_lists_top_level_folders_and_files_only() -> None:
    assert [floor for floor in floors() if floor.count(".") > 1] == []


def test_type_checking_imports_count() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    assert settings["exclude_type_checking_imports"] is False
