import json
from pathlib import Path

import pytest
import torch
from raising import raises

from phasetrain.addons.deploy.extract.feature_files import (
    FeatureFolder,
    decode_columns,
    encode_columns,
    read_columns,
    read_index,
)
from phasetrain.errors import ChangedError, ConfigError

REQUEST = {"model": "abc", "layers": ["trunk"], "format": "safetensors"}


def columns(first: int, rows: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(first, first + rows)
    return {
        "id": ids,
        "target": ids % 3,
        "layer.trunk": ids.float()[:, None] * torch.tensor([1.0, -1.0]),
    }


def made(path: Path, form: str = "safetensors") -> FeatureFolder:
    folder = FeatureFolder(str(path), form)
    folder.begin({**REQUEST, "format": form})
    folder.finish(
        [folder.write(0, 0, columns(0, 4)), folder.write(1, 4, columns(4, 2))], {"classes": 3}
    )
    return folder


@pytest.mark.parametrize("form", ["safetensors", "npz"])
class TestFormats:
    def test_columns_come_back_and_bytes_are_a_function_of_them(self, form: str) -> None:
        content = encode_columns(columns(0, 4), form)
        assert content == encode_columns(columns(0, 4), form)
        back = decode_columns(content, form)
        assert back.keys() == columns(0, 4).keys()
        assert all(torch.equal(back[name], value) for name, value in columns(0, 4).items())

    def test_all_rows_in_order(self, tmp_path: Path, form: str) -> None:
        made(tmp_path / "train", form)
        assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
            "index.json",
            f"shard-00000.{form}",
            f"shard-00001.{form}",
        ]
        found = read_columns(f"{tmp_path}/train/", ["trunk", "id"])
        assert found["id"].tolist() == [0, 1, 2, 3, 4, 5]
        assert found["trunk"][5].tolist() == [5, -5]


def test_index_lists_columns_and_shards(tmp_path: Path) -> None:
    made(tmp_path)
    index = read_index(str(tmp_path))
    assert (index["complete"], index["rows"], index["classes"], index["request"]) == (
        True,
        6,
        3,
        REQUEST,
    )
    assert index["columns"] == {
        "id": ["int64", []],
        "target": ["int64", []],
        "layer.trunk": ["float32", [2]],
    }
    assert [(shard["file"], shard["first"], shard["rows"]) for shard in index["shards"]] == [
        ("shard-00000.safetensors", 0, 4),
        ("shard-00001.safetensors", 4, 2),
    ]


class TestKept:
    def test_shards_of_a_folder_that_is_complete_and_of_one_that_is_not(
        self, tmp_path: Path
    ) -> None:
        folder = FeatureFolder(str(tmp_path), "safetensors")
        folder.begin(REQUEST)
        written = folder.write(1, 4, columns(4, 2))
        assert (folder.read_intact(0), folder.read_intact(1)) == (None, written)
        made(tmp_path)
        again = FeatureFolder(str(tmp_path), "safetensors")
        again.begin(REQUEST)
        assert again.read_intact(1) == written

    def test_a_shard_without_a_record_or_with_other_bytes_is_made_again(
        self, tmp_path: Path
    ) -> None:
        made(tmp_path)
        file = tmp_path / "shard-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert FeatureFolder(str(tmp_path), "safetensors").read_intact(1) is None
        assert FeatureFolder(str(tmp_path), "safetensors").read_intact(0) is not None
        (tmp_path / "index.json").unlink()
        assert FeatureFolder(str(tmp_path), "safetensors").read_intact(0) is None


class TestErrors:
    def test_changed_request_is_rejected(self, tmp_path: Path) -> None:
        made(tmp_path)
        with pytest.raises(ChangedError, match=r"layers = \['trunk'\].*\['head'\]"):
            FeatureFolder(str(tmp_path), "safetensors").begin({**REQUEST, "layers": ["head"]})

    def test_folder_without_features_is_rejected(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="extract.no_features"):
            read_index(str(tmp_path))

    def test_incomplete_folder_is_rejected(self, tmp_path: Path) -> None:
        FeatureFolder(str(tmp_path), "safetensors").begin(REQUEST)
        with raises(ConfigError, code="extract.incomplete"):
            read_columns(str(tmp_path), ["trunk"])

    def test_unknown_column_is_rejected_with_a_suggestion(self, tmp_path: Path) -> None:
        made(tmp_path)
        with raises(ConfigError, code="extract.unknown_column", suggestion="trunk"):
            read_columns(str(tmp_path), ["trnk"])

    def test_damaged_and_missing_shards_are_rejected(self, tmp_path: Path) -> None:
        made(tmp_path)
        (tmp_path / "shard-00000.safetensors").write_bytes(
            encode_columns(columns(0, 3), "safetensors")
        )
        with raises(ConfigError, code="extract.damaged_shard"):
            read_columns(str(tmp_path), ["trunk"])
        (tmp_path / "shard-00000.safetensors").unlink()
        with raises(ConfigError, code="extract.unreadable_shard"):
            read_columns(str(tmp_path), ["trunk"])

    def test_index_has_a_format_version(self, tmp_path: Path) -> None:
        made(tmp_path)
        assert json.loads((tmp_path / "index.json").read_text())["format_version"] == 1
