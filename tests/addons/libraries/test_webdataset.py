"""Shards of WebDataset: written by that library, read here."""

import io
import pickle
import re
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from raising import raises

from phasetrain.addons.libraries import webdataset as module
from phasetrain.addons.libraries.webdataset import WebDataset
from phasetrain.app.api import run
from phasetrain.data.datasets import DATASETS
from phasetrain.data.protocols import ShardedDataset
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run


def png(value: int, size: tuple[int, int] = (4, 3)) -> bytes:
    """Return a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, (value, 0, 255)).save(file, "PNG")
    return file.getvalue()


def write(
    path: Path,
    samples: Sequence[Mapping[str, bytes]],
    *,
    mode: str = "w",
    extra: Sequence[str] = (),
) -> Path:
    """Write an archive; the members of a sample are named by its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name in extra:
            archive.addfile(tarfile.TarInfo(name))
        for at, sample in enumerate(samples):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"train/{path.stem}-{at:03}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def pictures(*values: int) -> list[dict[str, bytes]]:
    return [{"png": png(value), "cls": str(value % 3).encode()} for value in values]


@pytest.fixture
def two(tmp_path: Path) -> str:
    """Return the pattern of two archives of three and of two pictures."""
    write(tmp_path / "a.tar", pictures(0, 51, 102))
    write(tmp_path / "b.tar", pictures(153, 204))
    return f"{tmp_path}/*.tar"


def test_images_and_classes_are_decoded(two: str) -> None:
    data = WebDataset(two, classes=3)
    assert (len(data), data.shard_lengths, isinstance(data, ShardedDataset)) == (5, (3, 2), True)
    pairs = [data[at] for at in range(5)]
    assert [target for _, target in pairs] == [0, 0, 0, 0, 0]
    assert [round(float(image[0, 0, 0]), 6) for image, _ in pairs] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert (pairs[0][0].shape, pairs[0][0].dtype) == ((3, 3, 4), torch.float32)
    assert data.facts() == {"classes": 3, "channels": 3}
    assert WebDataset(two, mode="L", size=8).facts() == {"channels": 1, "input_shape": (1, 8, 8)}
    assert WebDataset(two, mode="L", size=8)[4][0].shape == (1, 8, 8)


@pytest.mark.filterwarnings("ignore:unclosed file")  # the library leaves it to the collector
def test_archives_of_the_library_are_read_like_by_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset", reason="the extra `webdataset` is not installed")
    with library.TarWriter(str(tmp_path / "a.tar")) as writer:
        for at in range(5):
            numbers = np.arange(at + 2, dtype=np.float32)
            writer.write(
                {
                    "__key__": f"deep/s{at}",
                    "npy": numbers,
                    "cls": at,
                    "json": {"at": at},
                    "txt": f"ü{at}",
                }
            )
    whole = library.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode()
    data = WebDataset(f"{tmp_path}/a.tar", input_key=["npy", "txt", "json"], target_key="cls")
    assert len(data) == 5
    for (value, target), expected in zip((data[at] for at in range(5)), whole, strict=True):
        assert value["npy"].tolist() == expected["npy"].tolist()
        assert (value["txt"], value["json"], target) == (
            expected["txt"],
            expected["json"],
            expected["cls"],
        )


def test_members_are_decoded_by_their_extension(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(2), b=np.ones(3))
    write(
        tmp_path / "a.tar",
        [{"npz": file.getvalue(), "seg.png": png(51), "bin": b"\x00\x01", "JPG": png(255)}],
    )
    read = WebDataset(
        f"{tmp_path}/a.tar", input_key=["npz", "seg.png", "bin", "jpg;png"], target_key=None
    )
    value, target = read[0]
    assert {name: one.tolist() for name, one in value["npz"].items()} == {
        "a": [0.0, 0.0],
        "b": [1.0, 1.0, 1.0],
    }
    assert (float(value["seg.png"][0, 0, 0]), value["bin"], target) == (
        pytest.approx(0.2),
        b"\x00\x01",
        None,
    )
    assert float(value["jpg;png"][0, 0, 0]) == 1.0


def test_folders_and_hidden_members_are_skipped(tmp_path: Path) -> None:
    write(
        tmp_path / "a.tar",
        pictures(51, 102),
        extra=["__notes__.txt", "no-extension", "train/__x.png"],
    )
    assert [
        float(WebDataset(f"{tmp_path}/a.tar")[at][0][0, 0, 0]) for at in range(2)
    ] == pytest.approx([0.2, 0.4])


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_any_sample_is_reached_by_its_index(
    tmp_path: Path, mode: str, form: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarfile.TarFile, "format", form)
    path = tmp_path / f"{'long' * 40}.tar"  # longer than the name in a header may be
    write(path, [{"cls": str(at).encode(), "txt": b"x" * at} for at in range(150)], mode=mode)
    data = WebDataset(str(path), input_key="txt", target_key="cls")
    assert data.shards[0].places[0] == 0
    assert len(data.shards[0].places) == 3
    for at in (149, 0, 63, 64, 65, 130, 1):
        text, target = data[at]
        assert (len(text), target) == (at, at)


def test_skipped_samples_are_not_decoded(two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []
    read: list[str] = []
    read_samples, content = module.read_samples, module.TarSample.read
    data = WebDataset(two)
    monkeypatch.setattr(
        module,
        "read_samples",
        lambda path, place=0: opened.append((path[-5:], place)) or read_samples(path, place),
    )
    monkeypatch.setattr(
        module.TarSample,
        "read",
        lambda self, one: read.append(self.key[-5:] + one) or content(self, one),
    )
    assert [data[at][1] for at in (0, 2, 3, 4)] == [0, 0, 0, 0]
    assert opened == [("a.tar", 0), ("b.tar", 0)]
    assert read == [
        "a-000png",
        "a-000cls",
        "a-002png",
        "a-002cls",
        "b-000png",
        "b-000cls",
        "b-001png",
        "b-001cls",
    ]


def test_index_is_reused_and_rebuilt_for_changed_archives(
    tmp_path: Path, two: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = str(tmp_path / "index.json")
    first = WebDataset(two, index=index)
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_samples", None)  # a look into an archive would fail
        assert WebDataset(two, index=index).shards == first.shards
    write(tmp_path / "b.tar", pictures(1, 2, 3, 4))
    assert WebDataset(two, index=index).shard_lengths == (3, 4)
    assert WebDataset(two, index=index).fingerprint() != first.fingerprint()
    Path(index).write_text("[]")
    with raises(ConfigError, code="data.invalid_index"):
        WebDataset(two, index=index)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "b.tar", "index.json"]


@pytest.mark.feature("85")
def test_error_names_the_sample_and_its_archive(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", pictures(0))
    write(
        tmp_path / "b.tar",
        [*pictures(51), {"png": png(0)[:-30], "cls": b"1"}, {"cls": b"1"}, *pictures(102)],
    )
    data = WebDataset(f"{tmp_path}/*.tar")
    with raises(PhasetrainError, code="data.unreadable_sample") as caught:
        data[2]
    assert re.search(r"/b\.tar: train/b-001\.png\b", str(caught.value))
    missing = r"^input_key = 'jpg;.*': sample 3 \(.*/b\.tar: train/b-002\.jpg.*\bcls$"
    with pytest.raises(PhasetrainError, match=missing):
        data[3]
    assert float(data[4][0][0, 0, 0]) == pytest.approx(0.4)


def test_damaged_archives_are_rejected_when_the_dataset_is_built(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", pictures(0, 51, 102))
    whole = path.read_bytes()
    places = [sample.offset for sample in module.read_samples(str(path))]
    path.write_bytes(whole[: places[1]] + b"nonsense" * 64 + whole[places[1] + 512 :])
    with pytest.raises(ConfigError, match=rf"a\.tar'.*\b{places[1]}$"):
        DATASETS.build("webdataset", {"files": str(path)}, where="DATA.TRAIN")
    path.write_bytes(whole[: places[2] + 530])
    with pytest.raises(ConfigError, match=r"a\.tar'"):
        DATASETS.build("webdataset", {"files": str(path)}, where="DATA.TRAIN")
    path.write_bytes(b"no archive at all" * 100)
    with pytest.raises(ConfigError, match=r"a\.tar'"):
        DATASETS.build("webdataset", {"files": str(path)}, where="DATA.TRAIN")


def test_archive_with_a_repeated_member_is_rejected(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("x.cls"))
    with pytest.raises(ConfigError, match=r"a\.tar'.*\bx\.cls"):
        DATASETS.build("webdataset", {"files": f"{tmp_path}/a.tar"}, where="DATA.TRAIN")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"files": "/nowhere/*.tar"}, r"files = '/nowhere/\*\.tar':"),
        ({"mode": "RGBA"}, "mode = 'RGBA':"),
        ({"size": 0}, "size = 0:"),
    ],
)
def test_bad_parameters_are_rejected(two: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DATASETS.build("webdataset", {"files": two} | params, where="DATA.TRAIN")


def test_missing_pillow_is_a_config_error(two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with raises(ConfigError, code="config.missing_library"):
        WebDataset(two)
    assert len(WebDataset(two, input_key="cls", target_key=None)) == 5


def test_dataset_can_be_pickled(two: str) -> None:
    data = WebDataset(two)
    assert data[0][1] == 0
    assert float(pickle.loads(pickle.dumps(data))[1][0][0, 0, 0]) == pytest.approx(0.2)


@pytest.mark.slow
def test_run_killed_within_a_shard_resumes_exactly_with_and_without_workers(
    tmp_path: Path,
) -> None:
    for shard in range(3):
        write(
            tmp_path / f"{shard}.tar",
            [
                {"png": png(shard * 40 + at, (8, 8)), "cls": str(at % 3).encode()}
                for at in range(14)
            ],
        )
    split = (
        f"{{dataset: webdataset, files: '{tmp_path}/*.tar', classes: 3, size: 8, batch_size: 6, "
        + ("sampler: {name: lanes, lanes: 3}}")
    )
    words = ["MODEL.name=small_cnn", "MODEL.width=4", f"DATA.TRAIN={split}", f"DATA.TEST={split}"]
    made = build_run(words).task.parts
    assert made.facts["MODEL.channels"] == 3
    [first, second, *_] = made.loaders["train"].sampler.steps(build_run(words).plan.phases[0], 0)
    assert [draw.indices.tolist() for draw in first + second] == [
        [14, 15, 0, 1, 28, 29],
        [16, 17, 2, 3, 30, 31],
    ]  # no lane is at the end of a shard by then
    assert_exact_resume(words, steps=[1, 2, 6], workers=(0, 2))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_key_that_no_sample_has_is_a_config_error(tmp_path: Path, two: str, policy: str) -> None:
    data = f"{{dataset: webdataset, files: '{two}', classes: 3, size: 4, target_key: clss, on_bad_sample: {policy}}}"
    words = [
        f"DATA.TRAIN={data}",
        "DATA.TRAIN.batch_size=2",
        "DATA.TRAIN.workers=0",
        "DATA.TEST=null",
    ]
    expected = {"code": "config.missing_field", "key": "DATA.TRAIN.target_key", "given": "'clss'"}
    with raises(ConfigError, suggestion="cls", **expected) as caught:
        run([*words, "PHASES.epochs=1", f"RUN.dir={tmp_path}/run"], terminal=Terminal(live=False))
    assert f"{tmp_path}/a.tar: train/a-000.clss" in str(caught.value)
