"""Public names of packages, which are imported on first use."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from phasetrain.config.exports import find_exports, find_public
from phasetrain.config.registry import Registry

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ".".join(path.relative_to(ROOT).parts[:-1])
    for path in sorted((ROOT / "phasetrain").rglob("__init__.py"))
    if "export_lazily(" in path.read_text("utf-8")
]


def test_packages_of_parts_export_lazily() -> None:
    assert len(PACKAGES) == 14
    assert "phasetrain.losses" in PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_all_public_names_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = vars(module)["__all__"]
    assert set(names) == find_exports(package).keys()
    assert set(names) <= set(dir(module))
    for name in names:
        assert find_public(module, name) is vars(module)[name], name


def test_package_imports_a_module_when_its_name_is_used() -> None:
    program = (
        "import sys, phasetrain.losses as losses\n"
        "print('phasetrain.losses.weighted_sum' in sys.modules)\n"
        "print(losses.WeightedSum.__module__)\n"
        "print('phasetrain.losses.from_model' in sys.modules)\n"
        "print(hasattr(losses, 'NoSuchLoss'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "phasetrain.losses.weighted_sum", "False", "False"]


def test_dotted_path_finds_a_name_that_is_not_imported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = importlib.import_module("phasetrain.losses")
    monkeypatch.delitem(vars(losses), "CrossEntropy", raising=False)
    registry: Registry[object] = Registry("loss", "LOSS")
    part = registry.find("phasetrain.losses.CrossEntropy")
    assert part is importlib.import_module("phasetrain.losses.cross_entropy").CrossEntropy


def test_other_modules_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_with_names_on_request.py").write_text(
        "def __getattr__(name):\n    raise RuntimeError(name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("module_with_names_on_request")
    assert find_public(module, "Loss") is None
