"""The features of docs/features.md are those that the tests mark, each with one text."""

import re
from pathlib import Path

import pytest
from feature_table import list_features

ROOT = Path(__file__).parents[2]

MARKED = """
import pytest

@pytest.mark.feature("14", "training by epochs", "`PHASES.epochs`")
@pytest.mark.slow
def test_epochs(): ...

class TestMuon:
    @pytest.mark.feature("muon")
    @pytest.mark.feature("B1")
    def test_state(self): ...

    @pytest.mark.feature("muon", "Muon for hidden matrices")
    def test_update(self): ...
"""


def write_tests(folder: Path, **files: str) -> None:
    (folder / "tests").mkdir()
    for name, text in files.items():
        (folder / "tests" / f"{name}.py").write_text(text)


def test_rows_have_the_main_test_first_and_numbers_come_before_names(tmp_path: Path) -> None:
    more = '@pytest.mark.feature("B1", "kills", "")\ndef test_kill(): ...\n'
    write_tests(tmp_path, test_a=MARKED, test_b=more)
    features = list_features(tmp_path)
    assert [feature.row for feature in features] == [
        ("14", "training by epochs", "`PHASES.epochs`", "`tests/test_a.py::test_epochs`"),
        (
            "B1",
            "kills",
            "",
            "`tests/test_b.py::test_kill`, `tests/test_a.py::TestMuon::test_state`",
        ),
        (
            "muon",
            "Muon for hidden matrices",
            "",
            "`tests/test_a.py::TestMuon::test_update`, `tests/test_a.py::TestMuon::test_state`",
        ),
    ]
    assert [feature.is_numbered for feature in features] == [True, True, False]


def test_feature_without_a_text_or_with_two_is_an_error(tmp_path: Path) -> None:
    write_tests(tmp_path, test_a=MARKED, test_b=MARKED)
    with pytest.raises(ValueError, match="feature 14: ") as error:
        list_features(tmp_path)
    assert str(error.value).splitlines() == [
        "feature 14: tests/test_a.py::test_epochs and tests/test_b.py::test_epochs have a text",
        "feature muon: tests/test_a.py::TestMuon::test_update and "
        "tests/test_b.py::TestMuon::test_update have a text",
        "feature B1: no mark has a text, as tests/test_a.py::TestMuon::test_state has none",
    ]


def test_mark_where_the_page_does_not_look_is_an_error(tmp_path: Path) -> None:
    outside = 'pytestmark = pytest.mark.feature("3", "a module")\n'
    on_a_class = '@pytest.mark.feature("4", "a class")\nclass TestAll: ...\n'
    write_tests(tmp_path, test_a=outside, test_b=on_a_class)
    with pytest.raises(ValueError, match=r"tests/test_a\.py") as error:
        list_features(tmp_path)
    assert "tests/test_b.py" in str(error.value)


def numbers(row: str) -> set[str]:
    """Return the numbers that a row or a range of rows stands for."""
    first, dash, last = row.partition("-")
    return {str(n) for n in range(int(first), int(last) + 1)} if dash else {row}


@pytest.mark.addon
def test_every_feature_that_was_asked_for_has_a_row() -> None:
    rows = [feature.name for feature in list_features(ROOT) if feature.is_numbered]
    assert set().union(*map(numbers, rows)) == {
        *(str(number) for number in range(1, 114)),
        *(f"B{number}" for number in range(1, 13)),
    }


@pytest.mark.addon
def test_names_are_lower_case_words_with_dots() -> None:
    names = [feature.name for feature in list_features(ROOT) if not feature.is_numbered]
    assert len(names) > 100
    assert [name for name in names if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", name)] == []
