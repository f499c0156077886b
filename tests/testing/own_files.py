"""Small data sets in files, for the checks of the parts that read them."""

import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from phasetrain.models import SmallCNN

FILES, EACH, CLASSES = 5, 30, 10

Pictures = NDArray[np.uint8]


def idx(folder: Path, pictures: Pictures) -> None:
    """Write images and labels as MNIST has them."""
    (folder / "images").write_bytes(
        bytes([0, 0, 8, 3]) + struct.pack(">3I", *pictures.shape) + pictures.tobytes()
    )
    labels = (np.arange(len(pictures)) % CLASSES).astype(np.uint8)
    (folder / "labels").write_bytes(
        bytes([0, 0, 8, 1]) + struct.pack(">I", len(labels)) + labels.tobytes()
    )


def image_folder(folder: Path, pictures: Pictures) -> None:
    """Write a folder per class."""
    for at, picture in enumerate(pictures):
        path = folder / str(at % CLASSES) / f"{at}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture).save(path)


def image_mask_folder(folder: Path, pictures: Pictures) -> None:
    """Write images, and masks of their bright pixels."""
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for at, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / "images" / f"{at}.png")
        Image.fromarray((picture > 127).astype(np.uint8)).save(folder / "masks" / f"{at}.png")


def stamps(folder: Path, pictures: Pictures) -> None:
    """Write cut-out pictures of two classes, and backgrounds."""
    y, x = np.mgrid[:120, :120].astype(np.uint8)
    inside = np.hypot(y - 60.0, x - 60.0) < 50
    for name in ("stamps/animals", "stamps/town", "backgrounds"):
        (folder / name).mkdir(parents=True)
    for at in range(8):
        cutout = np.stack([y, x, np.full_like(y, at), np.where(inside, 255, 0)], axis=-1)
        for name in ("animals", "town"):
            Image.fromarray(cutout.astype(np.uint8)).save(folder / f"stamps/{name}/{at}.png")
        Image.fromarray(np.tile(pictures[at], (20, 25))).save(folder / f"backgrounds/{at}.jpg")


def file_list(folder: Path, pictures: Pictures) -> None:
    """Write images, and lists of their paths and labels."""
    names = [f"{at}.png" for at in range(len(pictures))]
    for name, picture in zip(names, pictures, strict=True):
        Image.fromarray(picture).save(folder / name)
    (folder / "images.json").write_text(json.dumps(names))
    (folder / "labels.json").write_text(json.dumps([at % CLASSES for at in range(len(names))]))


def lines(folder: Path, pictures: Pictures) -> None:
    """Write files of lines, with classes as targets."""
    _lines(folder, pictures, lambda at: at % CLASSES)


def scores(folder: Path, pictures: Pictures) -> None:
    """Write files of lines, with scores of classes as targets."""
    _lines(folder, pictures, lambda at: [float((at + one) % CLASSES) for one in range(CLASSES)])


def _lines(folder: Path, pictures: Pictures, target: Callable[[int], Any]) -> None:
    rows = [
        {"input": (row[0] / 255).tolist(), "target": target(at)} for at, row in enumerate(pictures)
    ]
    for file in range(FILES):
        text = "".join(json.dumps(row) + "\n" for row in rows[file * EACH : (file + 1) * EACH])
        (folder / f"{file}.jsonl").write_text(text)


def text(folder: Path, pictures: Pictures) -> None:
    """Write a text of as many blocks as there are pictures."""
    (folder / "text.txt").write_bytes(
        b"".join(bytes(97 + row[0, :16] % 26) for row in pictures.reshape(-1, 1, 64))
    )


def tokens(folder: Path, pictures: Pictures) -> None:
    """Write a folder of byte tokens, from 30 documents."""
    tokenizing = pytest.importorskip("phasetrain.addons.text.tokenize.tokenize")
    for at, rows in enumerate(pictures.reshape(30, -1)):
        (folder / f"{at:02}.txt").write_bytes(bytes(97 + rows[: 60 + at] % 26))
    texts = sorted(map(str, folder.glob("*.txt")))
    options = tokenizing.TokenizeOptions(shard_tokens=500)
    tokenizing.tokenize(str(folder / "written"), texts, options)


def lengths(folder: Path, pictures: Pictures) -> None:
    """Write a length for each of the digits."""
    (folder / "lengths.txt").write_text("".join(f"{at * 7 % 50}\n" for at in range(1442)))


def cmudict(folder: Path, pictures: Pictures) -> None:
    """Write a pronouncing dictionary."""
    consonants = ("B", "D", "F", "K", "L", "M", "N", "P")
    words = [
        (f"{first.lower()}{vowel.lower()}{last.lower()}", f"{first} {vowel}E1 {last}")
        for first in consonants
        for vowel in "AI"
        for last in consonants
    ]
    lines = [f"{word} {sounds.replace('IE', 'IY')}" for word, sounds in words]
    (folder / "words.dict").write_text("\n".join(lines))


def ucr(folder: Path, pictures: Pictures) -> None:
    """Write a set of series with two classes."""
    (folder / "Waves").mkdir()
    for part in ("TRAIN", "TEST"):
        rows = [[at % 2, *row.flatten().tolist()] for at, row in enumerate(pictures[:60])]
        text = "\n".join("\t".join(map(str, row)) for row in rows)
        (folder / "Waves" / f"Waves_{part}.tsv").write_text(text)


def huggingface(folder: Path, pictures: Pictures) -> None:
    """Write a folder as Hugging Face's library saves it."""
    import datasets  # takes seconds

    rows = {
        "x": [(row[0] / 255).tolist() for row in pictures],
        "label": [at % CLASSES for at in range(len(pictures))],
    }
    made = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(folder / "saved")


def webdataset(folder: Path, pictures: Pictures) -> None:
    """Write archives."""
    for file in range(FILES):
        with tarfile.open(folder / f"{file}.tar", "w") as archive:
            for at in range(file * EACH, (file + 1) * EACH):
                image = io.BytesIO()
                Image.fromarray(pictures[at]).save(image, "PNG")
                for extension, content in (
                    ("png", image.getvalue()),
                    ("cls", str(at % CLASSES).encode()),
                ):
                    member = tarfile.TarInfo(f"{at:03}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def judge(folder: Path, pictures: Pictures) -> None:
    """Write weights of a classifier."""
    torch.manual_seed(0)
    torch.save(SmallCNN(CLASSES, width=4).state_dict(), folder / "weights.pt")


WRITERS: Mapping[str, Callable[[Path, Pictures], None]] = MappingProxyType(
    {
        one.__name__: one
        for one in (
            idx,
            image_folder,
            image_mask_folder,
            stamps,
            file_list,
            lines,
            scores,
            text,
            tokens,
            lengths,
            cmudict,
            ucr,
            judge,
            huggingface,
            webdataset,
        )
    }
)
"""What writes the folder of a name."""


def written(folder: Path, words: list[str]) -> list[str]:
    """Return words in which `FILES/NAME` is the path of a folder, written by the writer of that
    name."""
    pictures = np.random.default_rng(0).integers(0, 256, (FILES * EACH, 8, 8), dtype=np.uint8)
    for name, write in WRITERS.items():
        wanted = any(f"FILES/{name}/" in word for word in words)
        if wanted and not (folder / name).exists():
            (folder / name).mkdir(parents=True)
            write(folder / name, pictures)
    return [word.replace("FILES", str(folder)) for word in words]
