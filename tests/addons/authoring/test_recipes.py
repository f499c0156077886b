"""Recipes are found by words of a question, and exist in the docs."""

from pathlib import Path

import pytest

from phasetrain.addons.authoring.recipes import RECIPES, list_recipes

ROOT = Path(__file__).parents[3]


def list_headings(page: str) -> list[str]:
    lines = (ROOT / page).read_text("utf-8").splitlines()
    return [line.lstrip("#").strip() for line in lines if line.startswith("#")]


@pytest.mark.parametrize("page", RECIPES)
def test_recipes_are_headings_of_their_page(page: str) -> None:
    assert [heading for heading, _ in RECIPES[page] if heading not in list_headings(page)] == []


@pytest.mark.parametrize("page", ["data", "runs", "training"])
def test_every_recipe_of_the_cookbook_is_listed(page: str) -> None:
    path = f"docs/cookbook/{page}.md"
    assert [heading for heading, _ in RECIPES[path]] == list_headings(path)[1:]


@pytest.mark.parametrize(
    ("question", "heading"),
    [
        ("onnx", "Export to ONNX or safetensors"),
        ("pandas", "Read the metrics in Python"),
        ("class_weights", "Weight classes in the loss"),
        ("custom sampler", "Custom samplers"),
        ("set_epoch", "Random draws of a dataset"),
        ("several datasets", "Mix datasets in proportions"),
        ("two backward passes", "Several backward passes"),
        ("Decodes", "A custom model"),
        ("web service", "Predict arrays in a web service"),
        ("active learning", "Choose samples by the model"),
        ("straight-through", "Statistics that the model keeps itself"),
        ("quantization-aware training", "Freeze statistics after some updates"),
        ("fake quantization", "Freeze statistics after some updates"),
        ("observers", "Freeze statistics after some updates"),
        ("freeze statistics", "Freeze statistics after some updates"),
        ("metric of generated samples", "Generate samples in a test"),
        ("persistent chains", "A persistent buffer of samples"),
        ("ECE", "Calibrate a trained model"),
        ("block-diagonal batch", "Classify graphs"),
        ("missing modality", "A metric per group of samples"),
        ("recall@k", "Rank against the whole corpus"),
        ("initial weights", "Compare with a plain loop"),
    ],
)
def test_recipe_is_found_by_words(question: str, heading: str) -> None:
    assert any(line.startswith(f"  {heading}: ") for line in list_recipes(question))


def test_a_single_word_has_to_occur() -> None:
    assert list_recipes("optimzer") == []
