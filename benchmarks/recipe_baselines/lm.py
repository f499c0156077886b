"""Baselines of the recipe lm, in bits per byte of its test split: xz, and n-grams of bytes.

    python benchmarks/recipe_baselines/lm.py [--data data/lm]

- `xz -9`: compressed size of training and test text, less the size of the training text alone.
- n-grams of bytes with interpolated Witten-Bell smoothing (Chen and Goodman 1999, "An empirical
  study of smoothing techniques for language modeling"), from the training text; the order with
  the best result on the test text is taken, which favours the baseline.
"""

import argparse
import json
import lzma
from collections import Counter, defaultdict
from math import log2
from pathlib import Path

ORDERS = (3, 4, 5, 6, 7)


def read_split(folder: str, name: str) -> list[bytes]:
    """Return the documents of a split, each with its end."""
    lines = Path(folder, f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["text"].encode() + b"\0" for line in lines]


def measure_xz(train: list[bytes], test: list[bytes]) -> float:
    """Return the bits per byte of the test text after the training text."""
    before = b"".join(train)
    size = {
        text: len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        for text in (before, before + b"".join(test))
    }
    counted = sum(len(one) - 1 for one in test)
    return 8 * (size[before + b"".join(test)] - size[before]) / counted


def measure_ngrams(train: list[bytes], test: list[bytes]) -> dict[int, float]:
    """Return order -> bits per byte of the test text."""
    longest = max(ORDERS)
    counts: dict[bytes, Counter[int]] = defaultdict(Counter)
    for document in train:
        text = b"\0" + document
        for at in range(1, len(text)):
            for length in range(min(at, longest - 1) + 1):
                counts[text[at - length : at]][text[at]] += 1
    bits = dict.fromkeys(ORDERS, 0.0)
    for document in test:
        text = b"\0" + document
        for at in range(1, len(text)):
            probability = 1 / 256
            for length in range(longest):
                seen = counts.get(text[at - length : at]) if length <= at else None
                if seen:
                    total = seen.total()
                    kinds = len(seen)
                    probability = (seen[text[at]] + kinds * probability) / (total + kinds)
                if length + 1 in bits:
                    bits[length + 1] -= log2(probability)
    counted = sum(len(one) - 1 for one in test)
    return {order: found / counted for order, found in bits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="data/lm")
    args = parser.parse_args()
    train, test = read_split(args.data, "train"), read_split(args.data, "test")
    ngrams = measure_ngrams(train, test)
    order = min(ngrams, key=lambda one: ngrams[one])
    found = {
        "xz -9": {"test/bits_per_byte": round(measure_xz(train, test), 4)},
        f"{order}-gram of bytes": {"test/bits_per_byte": round(ngrams[order], 4)},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
