"""Confusions and samples."""

import json
from pathlib import Path

import numpy as np
import pytest

from phasetrain.addons.report.images import make_data_url
from phasetrain.addons.report.page.predicted import (
    predictions_section,
    read_confusion,
    shorten_names,
)
from phasetrain.addons.report.page.reading import PredictionsRecord, RunReport

IMAGE = make_data_url(np.zeros((2, 2), np.uint8))
SAMPLE = {"index": 7, "label": "cat", "prediction": "dog", "confidence": 0.75, "image": IMAGE}


def section(tmp_path: Path, **found: object) -> tuple[str, list[str]]:
    folder = tmp_path / "run"
    folder.mkdir()
    content = {"test": {"updates": 1500, **found}}
    (folder / "predictions.json").write_text(json.dumps(content))
    run = RunReport(folder)
    return predictions_section(run), run.problems


def test_a_matrix_with_its_share_by_row(tmp_path: Path) -> None:
    text, problems = section(tmp_path, classes=["cat", "dog"], confusion=[[3, 1], [0, 4]])
    assert problems == []
    assert "Confusion matrix: 7 of 8 right" in text
    assert "after 1,500 updates" in text
    assert 'title="cat predicted as dog: 1, 25.0 %">1</td>' in text
    assert 'title="dog predicted as dog: 4, 100.0 %">4</td>' in text
    assert "<td>cat</td><td>dog</td><td>1</td><td>25.0 %</td>" in text


def test_many_classes_are_listed_and_not_drawn(tmp_path: Path) -> None:
    counts = np.eye(60, dtype=int) * 5
    counts[3, 4] = 2
    text, problems = section(
        tmp_path, classes=[f"class {number}" for number in range(60)], confusion=counts.tolist()
    )
    assert problems == []
    assert 'class="matrix"' not in text
    assert "<td>class 3</td><td>class 4</td>" in text


def test_samples(tmp_path: Path) -> None:
    right = SAMPLE | {"prediction": "cat", "image": None, "confidence": None}
    text, problems = section(tmp_path, first=[right], mistakes=[SAMPLE])
    assert problems == []
    assert text.index("Samples of the test") < text.index("Mistakes")
    assert f'<img src="{IMAGE}" alt="sample 7">' in text
    assert text.count("sample right") == text.count("sample wrong") == text.count("no image") == 1
    assert "<b>dog</b> 75 %" in text


@pytest.mark.parametrize(
    "found",
    [
        {"classes": ["a"], "confusion": [[1, 2], [3, 4]]},
        {"classes": ["a", "b"], "confusion": [[1, 2], [3]]},
        {"confusion": [[1]]},
        {"first": [{}]},
        {"first": 5},
        {"updates": None},
    ],
)
def test_damaged_predictions_cost_their_section(tmp_path: Path, found: dict[str, object]) -> None:
    text, problems = section(tmp_path, **found)
    assert text == ""
    assert len(problems) == 1
    assert "predictions.json: the entry of test cannot be read" in problems[0]


def test_an_image_that_is_no_data_is_not_loaded(tmp_path: Path) -> None:
    text, _ = section(tmp_path, first=[SAMPLE | {"image": "https://example.org/x.png"}])
    assert "example.org" not in text


def test_nothing_was_kept(tmp_path: Path) -> None:
    assert section(tmp_path) == ("", [])
    assert read_confusion(PredictionsRecord(0)) is None


class TestNames:
    def test_shared_words_at_the_start_are_left_out(self) -> None:
        names = ["northern_spotted_owl", "northern_spotted_eagle"]
        assert list(shorten_names(names).values()) == ["…owl", "…eagle"]

    def test_long_names_lose_their_middle(self) -> None:
        names = ["ruby-throated hummingbird", "ruby-throated kinglet", "cat"]
        assert shorten_names(names) == {
            "ruby-throated hummingbird": "ruby-…ngbird",
            "ruby-throated kinglet": "ruby-…inglet",
            "cat": "cat",
        }

    def test_short_names_stay(self) -> None:
        assert shorten_names(["class 10", "class 11"])["class 11"] == "class 11"
        assert shorten_names(["a_single_long_name"]) == {"a_single_long_name": "a_sin…g_name"}

    def test_whole_names_are_in_the_titles(self, tmp_path: Path) -> None:
        names = ["melanoma in situ", "melanoma in situ <late>"]
        sample = SAMPLE | {"label": names[0], "prediction": names[1]}
        text, problems = section(
            tmp_path, classes=names, confusion=[[3, 1], [0, 4]], mistakes=[sample]
        )
        assert problems == []
        assert '<span class="label" title="melanoma in situ">' in text
        assert text.count('title="melanoma in situ &lt;late&gt;"') == 3
        assert "<b>…situ &lt;late&gt;</b>" in text
