"""Make the data of the recipe lm: the King James Bible as tokens of a trained BPE.

    apt-get install bible-kjv bible-kjv-text
    python benchmarks/recipe_data/lm.py [--out data/lm] [--vocabulary 2048]

A document is a chapter, with a verse per line. Every 20th chapter, from the 10th on, is in the
test split: 59 of 1,189. Killed at any moment, the same command finishes with the same files.
"""

import argparse
import json
import re
import subprocess
from itertools import groupby
from pathlib import Path

from phasetrain.addons.text.tokenize.tokenize import TokenizeOptions, tokenize

EACH = 20
FIRST = 9
_VERSE = re.compile(r"(\w+):\d+ (.*)")


def read_chapters() -> list[str]:
    """Return the text of each chapter, as the Debian package prints it."""
    printed = subprocess.run(
        ["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True, input=""
    ).stdout
    verses = [found.groups() for found in map(_VERSE.match, printed.splitlines()) if found]
    return [
        "\n".join(text for _, text in chapter)
        for _, chapter in groupby(verses, key=lambda verse: verse[0])
    ]


def split_chapters() -> dict[str, list[str]]:
    """Return the chapters of each split."""
    chapters = read_chapters()
    return {
        "train": [one for at, one in enumerate(chapters) if at % EACH != FIRST],
        "test": [one for at, one in enumerate(chapters) if at % EACH == FIRST],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="data/lm")
    parser.add_argument("--vocabulary", type=int, default=2048)
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name, chapters in split_chapters().items():
        lines = Path(args.out, f"{name}.jsonl")
        lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in chapters))
        if name == "train":
            options = TokenizeOptions(train_bpe=args.vocabulary)
        else:
            options = TokenizeOptions(tokenizer=f"{args.out}/train")
        made = tokenize(f"{args.out}/{name}", [str(lines)], options)
        print(
            f"{name}: {made.documents} chapters, {made.bytes:,} bytes, {made.tokens:,} tokens, "
            f"digest {made.digest()[:12]}"
        )


if __name__ == "__main__":
    main()
