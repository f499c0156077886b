"""Whatever happens to the bytes of a checkpoint is noticed before they are used, and hostile
manifests do nothing."""

import itertools
import json
import random
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from phasetrain.checkpoint.commit import (
    Manifest,
    Verify,
    commit,
    list_checkpoints,
    read_files,
    read_manifest,
)
from phasetrain.engine.position import RunState
from phasetrain.errors import InvalidCheckpointError
from phasetrain.runtime.storage import FileRecord, Storage

CONTENTS = {"tensors.safetensors": b"weights" * 9, "state.json": b"{}"}
STATE = RunState(1, 0, 5, 50).state_dict()


class TestDamage:
    """Whatever happens to the bytes of a checkpoint is noticed before they are used."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        described = Manifest(2, 1, "r", None, STATE, {})
        saved = commit(
            Storage(), str(tmp_path), CONTENTS, lambda files: replace(described, files=files)
        )
        return tmp_path / saved.name

    def reason(self, folder: Path, verify: Verify = "full") -> str:
        with pytest.raises(InvalidCheckpointError) as caught:
            read_files(Storage(), str(folder), read_manifest(Storage(), str(folder)), verify)
        return str(caught.value)

    def reason_of_none(self, folder: Path) -> bool:
        return bool(
            read_files(Storage(), str(folder), read_manifest(Storage(), str(folder)), "full")
        )

    def test_every_flipped_bit_of_the_manifest(self, folder: Path) -> None:
        sound = (folder / "manifest.json").read_bytes()
        unseen = []
        for at, bit in itertools.product(range(len(sound)), range(8)):
            try:
                Manifest.decode(sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :])
            except InvalidCheckpointError:
                continue
            unseen.append((at, bit))
        assert unseen == []
        assert Manifest.decode(sound).sequence == 1

    def test_flipped_bits_of_the_other_files(self, folder: Path) -> None:
        generator = random.Random(0)
        for name, data in CONTENTS.items():
            for _ in range(20):
                at, bit = generator.randrange(len(data)), generator.randrange(8)
                (folder / name).write_bytes(
                    data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
                )
                assert self.reason(folder).startswith(f"{name} has digest")
            (folder / name).write_bytes(data)
        assert self.reason_of_none(folder)

    def test_every_truncation(self, folder: Path) -> None:
        for name in (*CONTENTS, "manifest.json"):
            data = (folder / name).read_bytes()
            for size in range(
                0, len(data) - 1, 7
            ):  # less than the last byte, a mere line end of the manifest
                (folder / name).write_bytes(data[:size])
                assert self.reason(folder, "size").startswith(name)
            (folder / name).write_bytes(data)

    @pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
    def test_a_missing_file(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        assert self.reason(folder, "off") == f"{name} cannot be read (No such file or directory)"

    def test_size_alone_is_checked_where_that_is_asked_for(self, folder: Path) -> None:
        (folder / "state.json").write_bytes(b"[]")
        manifest = read_manifest(Storage(), str(folder))
        assert read_files(Storage(), str(folder), manifest, "size")["state.json"] == b"[]"
        (folder / "state.json").write_bytes(b"[] ")
        assert read_files(Storage(), str(folder), manifest, "off")["state.json"] == b"[] "
        assert self.reason(folder, "size") == "state.json has 3 bytes, the manifest says 2"

    def test_a_folder_without_a_manifest_is_listed_as_rejected(self, folder: Path) -> None:
        (folder / "manifest.json").unlink()
        found, rejected = list_checkpoints(Storage(), str(folder.parent))
        assert (found, list(rejected)) == ([], ["p0001-s00000000"])
        assert "manifest.json" in rejected["p0001-s00000000"]


class TestHostileManifests:
    SOUND = Manifest(1, 1, "r", None, STATE, {"a": FileRecord(1, "0")})

    def refused(self, body: Any) -> str:
        digest = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        with pytest.raises(InvalidCheckpointError) as caught:
            Manifest.decode(json.dumps({"body": body, "digest": digest}).encode())
        return str(caught.value)

    def test_the_sound_one_is_read(self) -> None:
        assert Manifest.decode(self.SOUND.encode()) == self.SOUND

    @pytest.mark.parametrize(
        "name",
        [
            "../state.json",
            "/etc/passwd",
            "a/b",
            "..",
            ".",
            "",
            ".hidden",
            "a\\b",
            "a\n",
            "a\0",
            "C:x",
            "file://x",
        ],
    )
    def test_names_that_lead_out_of_the_folder(self, name: str) -> None:
        body = asdict(self.SOUND) | {"files": {name: {"size": 1, "digest": "0"}}}
        assert (
            self.refused(body)
            == f"manifest.json names the file {name!r}, which is not a plain file name"
        )

    def test_a_later_format(self) -> None:
        assert (
            self.refused(asdict(replace(self.SOUND, format=4)))
            == "manifest.json has format 4, this version reads up to 3: upgrade it"
        )

    @pytest.mark.parametrize(
        "change",
        [
            {"state": []},
            {"state": {}},
            {"state": {"phase": "x", "step": 0, "updates": 0, "samples": 0, "finished": ""}},
            {"files": []},
            {"files": {"a": 1}},
            {"files": {"a": {"size": 1}}},
            {"sequence": []},
            {"format": "1"},
            {"surprise": 1},
            {"facts": []},
            {"facts": {"surprise": 1}},
            {"facts": {"metrics": {"test/accuracy": "high"}}},
            {"facts": {"metrics": [1]}},
        ],
    )
    def test_other_types_than_expected(self, change: dict[str, Any]) -> None:
        assert self.refused(asdict(self.SOUND) | change).startswith("manifest.json cannot be read")

    @pytest.mark.parametrize(
        "data", [b"", b"[]", b"null", b"{}", b"[" * 100_000, b"\xff", b'{"body": {}, "digest": 1}']
    )
    def test_what_is_no_manifest(self, data: bytes) -> None:
        with pytest.raises(InvalidCheckpointError):
            Manifest.decode(data)
