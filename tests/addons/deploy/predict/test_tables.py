"""Columns of a table are found by their names, and no row or cell is lost silently."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from raising import raises

import phasetrain
from phasetrain.addons.deploy.predict.predict import PredictOptions, predict
from phasetrain.addons.deploy.predict.tables import read_rows
from phasetrain.errors import ConfigError

TABLE = """
import torch
from phasetrain.data.datasets import TensorSamples


def table():
    inputs = torch.arange(24.0).view(8, 3) / 24
    return TensorSamples(inputs, torch.arange(8) % 2, input_columns=["a", "b", "c"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on a table with the columns a, b and c."""
    root = tmp_path_factory.mktemp("table")
    (root / "named_table.py").write_text(TABLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        words = ["experiment=null", "DATA.TRAIN={dataset: named_table.table, batch_size: 4}"]
        model = ["DATA.TEST={dataset: named_table.table}", "MODEL.name=mlp", "PHASES.epochs=1"]
        phasetrain.run([*words, *model, f"RUN.dir={root}/run"])
        yield root / "run"


@pytest.mark.feature(
    "predict.columns",
    "columns of a table are matched by name; missing columns and empty cells are errors",
    "`phasetrain predict RUN_FOLDER FILE.csv`, `input_columns` of a dataset",
)
@pytest.mark.parametrize(
    "text",
    [
        "a,b,c\n1,2,3\n",
        "1,2,3\n",
        "c,a,b\n3,1,2\n",
        "\ufeffc,name, a,label,b\n3,Ann,1,yes,2\n",
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_order_of_the_columns_does_not_matter(
    folder: Path, tmp_path: Path, text: str, *, is_packed: bool
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text, "utf-8")
    expected = torch_probabilities(folder)
    if is_packed:
        phasetrain.pack(folder, tmp_path / "a.zip", trust=True)
        [found] = phasetrain.load_pack(tmp_path / "a.zip").predict_files([file], top=2)
    else:
        [found] = predict(str(folder), [str(file)], options=PredictOptions(top=2, trust=True))
    assert dict(found.classes) == expected


def torch_probabilities(folder: Path) -> dict[str, float]:
    """Return the probability of each class for a = 1, b = 2, c = 3."""
    scores = phasetrain.load(folder, trust=True).predict(torch.tensor([[1.0, 2.0, 3.0]]))
    return dict(zip("01", torch.softmax(scores, 1)[0].tolist(), strict=True))


@pytest.mark.feature("predict.columns")
@pytest.mark.parametrize(
    ("text", "columns", "error"),
    [
        ("a,b\n1,2\n", "abc", "predict.wrong_columns"),
        ("x,y,z\n1,2,3\n", "abc", "predict.wrong_columns"),
        ("a,b,c,a\n1,2,3,4\n", "abc", "predict.wrong_columns"),
        ("a,b,c\n1,,3\n", "abc", "line 2: 'b' is empty"),
        ("a,b,c\n1,x,3\n", "abc", "line 2: 'b' is 'x'"),
        ("a,b,c\n1,2\n", "abc", "line 2 has 2 values"),
        ("1,,3\n4,5,6\n", "", "line 1: 'column 2' is empty"),
        (",,\n4,5,6\n", "", "line 1: 'column 1' is empty"),
        ("1,2,O\n4,5,6\n", "", "line 1: 'column 3' is 'O'"),
        ("12 5 3 4\n", "", "its only line '12 5 3 4' is taken for a header"),
    ],
)
def test_row_or_cell_that_has_no_meaning_is_an_error(
    text: str, columns: Sequence[str], error: str
) -> None:
    if error.startswith("predict."):
        with raises(ConfigError, code=error):
            read_rows(text.splitlines(), "rows.csv", columns)
        return
    with pytest.raises(ValueError) as caught:
        read_rows(text.splitlines(), "rows.csv", columns)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize(
    ("text", "columns", "named"),
    [
        ("a,b,c,id\n1,2,3,9\n", "abc", ["id"]),
        ("a,b\n1,2\n", "", ["a", "b"]),
        ("b,a\n1,2\n", "ab", []),
        ("1,2\n", "", []),
        ("0,1\n5,6\n", ("1", "0"), []),
    ],
)
def test_columns_that_are_ignored_or_not_compared_are_named(
    text: str, columns: Sequence[str], named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rows = read_rows(text.splitlines(), "rows.csv", columns)
    assert len(rows) == 1
    assert [record.args[-1] for record in caplog.records] == ([", ".join(named)] if named else [])
