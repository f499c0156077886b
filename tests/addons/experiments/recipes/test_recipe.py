"""The files of recipes, the pages made from them, and the list."""

import json
from pathlib import Path

import pytest
import yaml
from raising import raises

from phasetrain.addons.experiments.recipes.pages import render_index, render_page, replace_generated
from phasetrain.addons.experiments.recipes.recipe import (
    Criterion,
    Measurement,
    find_files,
    find_variant,
    read_recipe,
)
from phasetrain.addons.experiments.recipes.run_recipe import stage_words
from phasetrain.app.setup import resolve_config
from phasetrain.cli import main
from phasetrain.errors import ConfigError

ROOT = Path(__file__).parents[4]
PAGES = ROOT / "docs" / "recipes"
NAMES = sorted(find_files())
GOOD = {
    "title": "t",
    "data": "d",
    "status": "run",
    "variants": {"one": {"title": "v", "run": "experiment=digits", "metrics": {"test/loss": None}}},
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


@pytest.mark.parametrize("name", NAMES)
class TestEach:
    @pytest.mark.feature("recipes")
    def test_page_has_the_tables_of_the_recipe(self, name: str) -> None:
        page = (PAGES / f"{name}.md").read_text("utf-8")
        assert page == replace_generated(page, render_page(read_recipe(find_files()[name])))
        assert page.startswith(f"# {name}\n")

    def test_pictures_are_there(self, name: str) -> None:
        page = (PAGES / f"{name}.md").read_text("utf-8")
        for line in page.splitlines():
            if line.startswith("!["):
                assert (PAGES / line.partition("](")[2].rstrip(")")).is_file()

    def test_nothing_is_claimed_that_was_not_run(self, name: str) -> None:
        recipe = read_recipe(find_files()[name])
        for variant in recipe.variants.values():
            assert recipe.status == "run" or variant.measured is None
            if variant.measured is not None:
                values = variant.measured.values[variant.metric]
                assert len(values) == len(variant.measured.digests) == 5
                assert variant.metrics[variant.metric].is_met(variant.measured.mean(variant.metric))


@pytest.mark.addon
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, one) for name in NAMES for one in read_recipe(find_files()[name]).variants],
)
def test_stages_resolve_with_a_thread_count(name: str, variant: str) -> None:
    _, found = find_variant(f"{name}/{variant}")
    folders = {stage: f"runs/x/{stage}" for stage in found.stages}
    for stage in found.stages:
        words = stage_words(found, stage, 3, folders)
        missing = [f"{key}=/nowhere" for key in found.paths]
        setup = resolve_config([*words, *missing])
        assert setup.config.MACHINE.threads is not None
        assert setup.config.RUN.seed == 3


def test_index_has_the_table_of_all_recipes() -> None:
    page = (PAGES / "index.md").read_text("utf-8")
    recipes = [read_recipe(path) for path in find_files().values()]
    assert page == replace_generated(page, render_index(recipes))


def test_page_without_markers_is_rejected() -> None:
    with pytest.raises(ValueError, match="facts"):
        replace_generated("# page", "table")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"status": "done"}, "status"),
        ({"titel": "t"}, "titel"),
        ({"title": None}, "title"),
        ({"variants": {}}, "variants"),
        ({"packages": [{"debian": "x"}]}, "packages"),
        ({"packages": [{"file": "x"}]}, "packages"),
        ({"measured": {"variants": {"two": {}}}}, "measured.variants"),
        ({"variants": {"one": {**GOOD["variants"]["one"], "metrics": {"a": "good"}}}}, "metrics.a"),  # type: ignore[index]
    ],
)
def test_wrong_facts_are_rejected(changes: dict[str, object], key: str, tmp_path: Path) -> None:
    with raises(ConfigError, code="recipe.invalid") as caught:
        read_recipe(write(tmp_path, **changes))
    assert key in str(caught.value)


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: [")
    with raises(ConfigError, code="recipe.invalid"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("text", "value", "is_met"),
    [
        (">= 0.92", 0.92, True),
        (">= 0.92", 0.9199, False),
        ("< 5", 5.0, False),
        ("<= 1e-2", 0.01, True),
        (">= 0", float("nan"), False),
        ("", 7.0, True),
    ],
)
def test_criterion(text: str, value: float, is_met: bool) -> None:
    assert Criterion(text).is_met(value) is is_met


def test_mean_and_spread() -> None:
    one = Measurement("2026-01-01", {"m": [1.0, 2.0, 3.0], "k": [4.0]}, 1.0, ["a"], ["b"], {})
    assert (one.mean("m"), one.spread("m"), one.spread("k")) == (2.0, 1.0, 0.0)


class TestStages:
    def test_seed_and_folders_are_filled_in(self, tmp_path: Path) -> None:
        stages = {"pretrain": "DATA.TRAIN.fold={seed}", "probe": "MODEL.weights.path={pretrain}"}
        variants = {"one": {**GOOD["variants"]["one"], "run": stages}}  # type: ignore[index]
        variant = read_recipe(write(tmp_path, variants=variants)).variants["one"]
        folders = {"pretrain": "r/pretrain", "probe": "r/probe"}
        assert stage_words(variant, "pretrain", 2, folders) == [
            "DATA.TRAIN.fold=2",
            "RUN.seed=2",
            "RUN.dir=r/pretrain",
        ]
        assert stage_words(variant, "probe", 2, folders)[0] == "MODEL.weights.path=r/pretrain"


class TestList:
    def test_names_every_variant(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["recipes", "list"]) == 0
        out = capsys.readouterr().out
        assert all(f"\n{name}/" in out for name in NAMES)

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["recipes", "list", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}
        digits = rows["digits/small_cnn"]
        assert (digits["status"], digits["criterion"], digits["missing"]) == ("run", ">= 0.98", [])
        assert digits["mean"] > 0.98

    def test_recipes_of_the_user(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "recipes").mkdir()
        write(tmp_path / "recipes", status="not_run_by_us")
        assert main(["recipes", "list", "--config-dir", str(tmp_path)]) == 0
        (line,) = [
            one for one in capsys.readouterr().out.splitlines() if one.startswith("mine/one")
        ]
        assert "not run by us" in line
