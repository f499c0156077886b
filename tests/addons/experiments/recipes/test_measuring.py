"""Measuring a recipe: the kill is in the stage that was chosen, and the kernels are limited."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from phasetrain.addons.experiments.recipes import run_recipe
from phasetrain.addons.experiments.recipes.recipe import find_variant
from phasetrain.app.result import RunResult
from phasetrain.hooks import Hook


def load_benchmark() -> Any:
    """Return the module benchmarks/recipes.py."""
    path = Path(__file__).parents[4] / "benchmarks" / "recipes.py"
    spec = importlib.util.spec_from_file_location("measured_recipes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measured_recipes = load_benchmark()


class Started:
    """Records the first run that is started, and ends it as if it was stopped."""

    def __init__(self) -> None:
        self.words: Sequence[str] = ()
        self.hooks: Mapping[str, Hook] = {}

    def __call__(self, words: Sequence[str], hooks: Mapping[str, Hook]) -> RunResult:
        self.words = words
        self.hooks = hooks
        folder = next(word for word in words if word.startswith("RUN.dir="))
        return RunResult("interrupted", 130, folder.removeprefix("RUN.dir="))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(measured_recipes, "run_engine", found)
    # It would hold for all later tests of this process.
    monkeypatch.setattr(run_recipe, "limit_cpu_capability", lambda _capability: None)
    return found


@pytest.mark.parametrize(
    ("name", "stage", "is_killed"),
    [
        ("lm/adamw", "", True),
        ("fashion/simclr", "pretrain", True),
        ("fashion/simclr", "probe", False),
    ],
)
def test_kill_is_in_its_stage(
    name: str, stage: str, is_killed: bool, started: Started, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        measured_recipes.run_seed(find_variant(name)[1], 0, tmp_path, (stage, 7))
    assert ended.value.code == 130
    kill: Any = started.hooks.get("kill")
    assert (kill is not None) == is_killed
    assert kill is None or kill.updates == 7


@pytest.mark.parametrize(
    ("name", "limit"),
    [("lm/adamw", "MACHINE.cpu_capability=AVX2"), ("lm/muon", "MACHINE.cpu_capability=null")],
)
def test_recipe_may_choose_its_kernels(
    name: str, limit: str, started: Started, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        measured_recipes.run_seed(find_variant(name)[1], 0, tmp_path, None)
    assert [word for word in started.words if "cpu_capability" in word][-1] == limit
