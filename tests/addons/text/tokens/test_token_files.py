"""Token files are checked before they are used, and read without reading all of them."""

import json
import pickle
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raises

from phasetrain.addons.text.tokens import MANIFEST, TokenFiles
from phasetrain.addons.text.tokens.tokenizers import ByteCodec, load_codec
from phasetrain.errors import ConfigError

Write = Callable[..., str]
TEXT = "".join(chr(97 + at) * length + "\n" for at, length in enumerate((5, 1, 12, 3, 8, 2, 30, 4)))


def test_shards_are_one_stream(write: Write) -> None:
    files = TokenFiles(write())
    assert len(files.manifest.shards) == 3
    assert (files.manifest.documents, files.tokens, files.manifest.bytes) == (8, 73, 65)
    expected = [256 if one == "\n" else ord(one) for one in TEXT]
    for begin, end in ((0, 73), (0, 1), (19, 24), (20, 60), (72, 73), (5, 5)):
        assert files.read(begin, end).tolist() == expected[begin:end]
    ends = [at + 1 for at, one in enumerate(TEXT) if one == "\n"]
    assert files.read_document_ends().tolist() == ends


@pytest.mark.addon("remote")
def test_folder_on_a_server_is_read_through_the_cache(write: Write, tmp_path: Path) -> None:
    from web_server import quick_transfers, serve_files

    folder = Path(write())
    with serve_files() as server, quick_transfers(tmp_path / "cache"):
        server.files = {f"/t/{file.name}": file.read_bytes() for file in folder.iterdir()}
        server.faults["/t/shard-00001.tokens"] = deque([503, "truncate"])
        files = TokenFiles(f"{server.url}/t/", verify="never")
        assert [name for _, name, _ in server.requests if "shard" in name] == []
        local = TokenFiles(str(folder))
        assert files.read(0, 73).tolist() == local.read(0, 73).tolist()
        assert files.read_document_ends().tolist() == local.read_document_ends().tolist()
        assert load_codec(f"{server.url}/t").digest == ByteCodec().digest
        # Changed after the manifest was read, and no longer in the cache.
        server.files["/t/shard-00001.tokens"] = server.files["/t/shard-00000.tokens"]
        shutil.rmtree(tmp_path / "cache")
        with raises(ConfigError, code="remote.wrong_digest"):
            files.read(20, 60)
        with raises(ConfigError, code="tokens.no_manifest"):
            TokenFiles(f"{server.url}/other")


def test_files_can_be_sent_to_a_worker(write: Write) -> None:
    files = TokenFiles(write())
    files.read(0, 73)
    again = pickle.loads(pickle.dumps(files))
    assert again.read(30, 33).tolist() == files.read(30, 33).tolist()


def test_file_that_is_cut_while_it_is_used_is_an_error(write: Write) -> None:
    folder = write()
    files = TokenFiles(folder)
    cut(Path(folder))
    with pytest.raises(OSError, match=r"shorter.*shard-00001\.tokens"):
        files.read(0, 73)


def cut(folder: Path) -> None:
    file = folder / "shard-00001.tokens"
    file.write_bytes(file.read_bytes()[:-2])


def delete(folder: Path) -> None:
    (folder / "shard-00002.documents").unlink()


def swap(folder: Path) -> None:
    file = folder / "shard-00000.tokens"
    values = np.fromfile(file, dtype="<u2")
    file.write_bytes(values[::-1].tobytes())


def shift_documents(folder: Path) -> None:
    file = folder / "shard-00000.documents"
    file.write_bytes((np.fromfile(file, dtype="<i8") + 1).tobytes())


def exceed(folder: Path) -> None:
    file = folder / "shard-00002.tokens"
    values = np.fromfile(file, dtype="<u2")
    values[-1] = 257
    file.write_bytes(values.tobytes())


def unfinish(folder: Path) -> None:
    (folder / MANIFEST).rename(folder / "progress.json")


def later_version(folder: Path) -> None:
    content: Any = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, "version": 2}))


@pytest.mark.feature("data.tokens")
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (cut, "tokens.truncated"),
        (delete, "tokens.truncated"),
        (swap, "tokens.changed_shard"),
        (shift_documents, "tokens.changed_shard"),
        (exceed, "tokens.outside_vocabulary"),
        (unfinish, "tokens.unfinished"),
        (later_version, "tokens.invalid_manifest"),
        (lambda folder: (folder / MANIFEST).unlink(), "tokens.no_manifest"),
    ],
)
def test_damage_is_found_when_the_folder_is_opened(
    write: Write, damage: Callable[[Path], None], code: str
) -> None:
    folder = write()
    damage(Path(folder))
    with raises(ConfigError, code=code):
        TokenFiles(folder)


def test_without_verification_only_sizes_are_checked(write: Write) -> None:
    folder = write()
    swap(Path(folder))
    assert TokenFiles(folder, verify="never").tokens == 73
    cut(Path(folder))
    with raises(ConfigError, code="tokens.truncated"):
        TokenFiles(folder, verify="never")


def test_changed_table_of_bytes_is_found(write: Write) -> None:
    folder = write()
    file = Path(folder, "bytes.table")
    file.write_bytes(file.read_bytes()[::-1])
    with raises(ConfigError, code="tokens.changed_shard"):
        assert TokenFiles(folder).byte_counts is None
