from pathlib import Path

import pytest

from phasetrain.data.datasets.shards import find_files, index_files


def test_patterns_give_each_file_once_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.csv"):
        (tmp_path / name).touch()
    names = [
        Path(path).name
        for path in find_files([f"{tmp_path}/c.*", f"{tmp_path}/*.txt", f"{tmp_path}/a.txt"])
    ]
    assert names == ["c.csv", "a.txt", "b.txt"]
    with pytest.raises(ValueError, match="files = "):
        find_files(f"{tmp_path}/*.tar")


def test_index_of_another_kind_or_stride_is_rebuilt(tmp_path: Path) -> None:
    path, index = str(tmp_path / "a"), str(tmp_path / "index.json")
    Path(path).write_bytes(b"12345")
    asked: list[str] = []

    def places(one: str) -> tuple[int, list[int]]:
        asked.append(one)
        return 5, [0, 2, 4]

    def shards(kind: str, stride: int) -> list[tuple[int, tuple[int, ...]]]:
        found = index_files([path], index, kind=kind, stride=stride, places=places)
        return [(shard.samples, shard.places) for shard in found]

    expected = [(5, (0, 2, 4))]
    assert shards("lines", 2) == expected
    assert shards("lines", 2) == expected
    assert len(asked) == 1
    assert shards("archives", 2) == expected
    assert shards("archives", 4) == expected
    assert len(asked) == 3
