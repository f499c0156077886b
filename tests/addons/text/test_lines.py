"""Files with one sample per line are indexed once and read from any position."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.addons.text import lines as module
from phasetrain.addons.text.lines import Lines
from phasetrain.data.datasets import DATASETS
from phasetrain.errors import ConfigError
from phasetrain.testing import assert_world_size_invariant
from phasetrain.testing.build import build_run


def write(folder: Path, name: str, *samples: Any) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    return file


@pytest.fixture
def two(tmp_path: Path) -> str:
    """Return the pattern of two files of three and two samples."""
    write(tmp_path, "a.jsonl", *({"input": [at, 0.5], "target": at} for at in range(3)))
    write(tmp_path, "deep/b.jsonl", *({"input": [at, 1.5], "target": at} for at in range(3, 5)))
    return f"{tmp_path}/**/*.jsonl"


def test_json_lines_become_tensors(two: str) -> None:
    data = Lines(two, classes=5)
    assert (len(data), data.shard_lengths) == (5, (3, 2))
    pairs = [data[at] for at in range(5)]
    assert torch.equal(torch.stack([value for value, _ in pairs])[:, 0], torch.arange(5.0))
    assert [target for _, target in pairs] == [0, 1, 2, 3, 4]
    assert pairs[0][0].dtype == torch.float32
    assert data.facts() == {"classes": 5, "input_shape": (2,)}


def test_values_and_targets_keep_their_types(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "a",
        {"ids": [1, 2], "y": 0.5},
        {"ids": [3, 4], "y": [1, 2]},
        {"ids": [[[1]]], "y": "cat"},
    )
    data = Lines(str(file), input_key="ids", target_key="y", dtype="int64")
    assert data[0][0].tolist() == [1, 2]
    assert data[0][0].dtype == torch.int64
    assert (data[0][1].dtype, data[0][1].item()) == (torch.float32, 0.5)
    assert data[1][1].tolist() == [1, 2]
    assert data[2][1] == "cat"
    assert Lines(str(file), input_key="ids", target_key=None)[0][1] is None


def test_facts_of_images_have_channels(tmp_path: Path) -> None:
    file = write(tmp_path, "a", {"input": [[[0.0] * 4] * 4] * 3, "target": 0})
    assert Lines(str(file)).facts() == {"input_shape": (3, 4, 4), "channels": 3}


def test_lines_of_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(
        "eins\r\n\nünf".encode()
    )  # an empty line is a sample, a missing end no matter
    data = Lines(f"{tmp_path}/a.txt", form="text")
    assert [data[at] for at in range(len(data))] == [("eins", None), ("", None), ("ünf", None)]
    assert data.facts() == {}


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("lines", [1, 1023, 1024, 1025, 5000])
def test_any_line_of_a_long_file_is_found_by_its_index(
    tmp_path: Path, lines: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)  # so that blocks end within lines
    (tmp_path / "a.txt").write_text("\n".join(f"line {at}" for at in range(lines)) + end)
    data = Lines(f"{tmp_path}/a.txt", form="text")
    assert len(data) == lines
    for at in {0, lines // 2, lines - 1, min(lines - 1, 1024)}:
        data = Lines(f"{tmp_path}/a.txt", form="text")
        assert data[at][0] == f"line {at}"
    text = (tmp_path / "a.txt").read_bytes()
    begins = [place for place in data.shards[0].places if place < len(text)]
    assert [text[place:].split(b"\n")[0].decode() for place in begins] == [
        f"line {at}" for at in range(0, lines, 1024)
    ]


def test_bad_lines_raise_and_others_are_read(tmp_path: Path) -> None:
    write(tmp_path, "a", {"input": [1]}, [2], {"input": [3], "target": 3})
    (tmp_path / "b").write_text('{"input": [4], "tar\n')
    data = Lines([f"{tmp_path}/a", f"{tmp_path}/b"])
    with pytest.raises(ValueError, match=r"^target_key = 'target':"):
        data[0]
    with pytest.raises(ValueError, match=r"\blist\b"):
        data[1]
    assert data[2][1] == 3
    with pytest.raises(ValueError, match="Unterminated string"):
        data[3]
    assert data.facts() == {}


class TestInARun:
    def test_facts_reach_the_model_and_shards_reach_the_sampler(self, two: str) -> None:
        words = [
            f"DATA.TRAIN={{dataset: lines, files: '{two}', classes: 5, batch_size: 2}}",
            "DATA.TEST=null",
        ]
        made = build_run(
            [
                "MODEL=mlp",
                *words,
                "DATA.TRAIN.sampler={name: lanes, lanes: 2}",
                "DATA.TRAIN.transforms=[]",
            ]
        )
        loader = made.task.parts.loaders["train"]
        [one, two_] = [batches[0] for batches in loader.batches(made.plan.phases[0])]
        assert made.task.model(one.input).shape == (2, 5)
        assert len({*one.ids.tolist(), *two_.ids.tolist()}) == 4

    def test_bad_line_is_dropped_if_the_config_says_so(self, two: str, tmp_path: Path) -> None:
        with open(tmp_path / "a.jsonl", "a") as file:
            file.write("torn\n")
        words = [
            f"DATA.TRAIN={{dataset: lines, files: '{two}', classes: 5, batch_size: 6, on_bad_sample: drop}}"
        ]
        lanes = [
            "DATA.TRAIN.sampler={name: lanes, lanes: 2}",
            "DATA.TRAIN.transforms=[]",
            "DATA.TEST=null",
        ]
        loader = build_run(["MODEL=mlp", *words, *lanes, "PHASES.epochs=1"]).task.parts.loaders[
            "train"
        ]
        [[batch]] = loader.batches(loader.plan.phases[0])
        assert sorted(batch.ids.tolist()) == [0, 1, 2, 4, 5]
        assert loader.bad is not None
        assert batch.bad[0][0] == 3

    def test_missing_key_is_a_config_error(self, two: str) -> None:
        split = f"{{dataset: lines, files: '{two}', classes: 5, batch_size: 2, target_key: taget}}"
        expected = {"code": "config.missing_field", "given": "'taget'", "suggestion": "target"}
        with raises(ConfigError, key="DATA.TRAIN.target_key", **expected):
            build_run(["MODEL=mlp", f"DATA.TRAIN={split}", "DATA.TEST=null", "PHASES.epochs=1"])

    @pytest.mark.parametrize(
        ("sampler", "message"),
        [
            ("lanes", r"^DATA\.TRAIN\.sampler \(sampler 'lanes'\): "),
            (
                "{name: lanes, batch_size: 3}",
                r"^DATA\.TRAIN\.sampler\.batch_size = 3 .* the program sets this parameter itself",
            ),
            ("{name: lanes, lane: 3}", r"^DATA\.TRAIN\.sampler\.lane = 3 .*did you mean"),
        ],
    )
    def test_bad_parameters_of_the_sampler_are_rejected(self, sampler: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            build_run([f"DATA.TRAIN.sampler={sampler}"])


class TestIndex:
    def test_unchanged_files_are_indexed_once(
        self, two: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index = f"{tmp_path}/index.json"
        first = Lines(two, index=index)
        counted: list[str] = []
        count = module.index_lines
        monkeypatch.setattr(
            module, "index_lines", lambda path: (counted.append(path), count(path))[1]
        )
        assert Lines(two, index=index).shards == first.shards
        assert counted == []
        write(tmp_path, "a.jsonl", {"input": [0, 0.5], "target": 0})
        assert Lines(two, index=index).shard_lengths == (1, 2)
        assert counted == [f"{tmp_path}/a.jsonl"]
        assert not list(tmp_path.glob("*.tmp-*"))

    def test_index_of_another_version_is_rebuilt(self, two: str, tmp_path: Path) -> None:
        index = tmp_path / "index.json"
        index.write_text(json.dumps({"format": 0, "stride": 7, "files": "what was then"}))
        assert len(Lines(two, index=str(index))) == 5
        assert json.loads(index.read_text())["format"] == 2

    def test_file_that_is_no_index_is_rejected(self, two: str, tmp_path: Path) -> None:
        (tmp_path / "index.json").write_text("{}")
        with raises(ConfigError, code="data.invalid_index"):
            Lines(two, index=f"{tmp_path}/index.json")


def test_fingerprint_depends_on_the_files_and_not_on_their_folder(two: str, tmp_path: Path) -> None:
    before = Lines(two).fingerprint()
    write(tmp_path, "else/a.jsonl", *({"input": [at, 0.5], "target": at} for at in range(3)))
    write(
        tmp_path, "else/deep/b.jsonl", *({"input": [at, 1.5], "target": at} for at in range(3, 5))
    )
    assert Lines(f"{tmp_path}/else/**/*.jsonl").fingerprint() == before
    write(tmp_path, "else/a.jsonl", {"input": [0, 0.5], "target": 0})
    assert Lines(f"{tmp_path}/else/**/*.jsonl").fingerprint() != before


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"files": "nowhere/*.txt"},
            r"^DATA \(dataset 'lines'\): files = 'nowhere/\*\.txt':",
        ),
        (
            {"files": "x", "form": "csv"},
            r"form = 'csv', dtype = 'float32':",
        ),
    ],
)
def test_bad_parameters_are_rejected(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DATASETS.build("lines", params, where="DATA")


def test_files_without_lines_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match=r"\b0 samples"):
        Lines(f"{tmp_path}/a")


def test_order_in_lanes_does_not_depend_on_the_world_size(tmp_path: Path) -> None:
    for shard in range(4):
        samples = [{"input": [shard, at], "target": at % 3} for at in range(9 + shard)]
        (tmp_path / f"{shard}.jsonl").write_text(
            "".join(json.dumps(sample) + "\n" for sample in samples)
        )
    split = f"{{dataset: lines, files: '{tmp_path}/*.jsonl', classes: 3, batch_size: 12}}"
    train = [
        "DATA.TRAIN.sampler={name: lanes, lanes: 4}",
        "DATA.TRAIN.transforms=[]",
        "DATA.TRAIN.drop_last=false",
    ]
    test = ["DATA.TEST.sampler={name: lanes, lanes: 6, shuffle: false}"]
    assert_world_size_invariant(
        ["MODEL=mlp", f"DATA.TRAIN={split}", f"DATA.TEST={split}", *train, *test],
        sizes=(1, 3),
    )
