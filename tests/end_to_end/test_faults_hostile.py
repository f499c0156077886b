"""Malicious checkpoints are read as data and never executed."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged import NEWEST, PREVIOUS, newest_valid_name, resign
from faulty import ONE, Starter
from harness import SMALL, newest

CANARY = "canary"


class Bomb:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.system, (f"touch {CANARY}",)


class TestHostileOnes:
    """Foreign checkpoints with matching digests are rejected without a side effect."""

    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    @staticmethod
    def huge(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        name = next(one for one in header if one != "__metadata__")
        header[name]["shape"] = [2**40, 2**20]
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    @staticmethod
    def a_zip(content: bytes) -> bytes:
        with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("archive/data.pkl", b"\0" * 10_000_000)
        return buffer.getvalue()

    CONTENTS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
        "a pickle for tensors": ("tensors.safetensors", lambda content: pickle.dumps(Bomb())),
        "a pickle for the state": ("state.json", lambda content: pickle.dumps(Bomb())),
        "a pickle for the promises": ("promised.json", lambda content: pickle.dumps(Bomb())),
        "a huge shape": ("tensors.safetensors", lambda content: TestHostileOnes.huge(content)),
        "a huge header": (
            "tensors.safetensors",
            lambda content: (2**60).to_bytes(8, "little") + content[8:],
        ),
        "a zip bomb": ("tensors.safetensors", lambda content: TestHostileOnes.a_zip(content)),
        "depth": ("state.json", lambda content: b"[" * 100_000 + b"]" * 100_000),
        "depth of promises": (
            "promised.json",
            lambda content: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        ),
        "no mapping": ("promised.json", lambda content: b"[]"),
        "nothing": ("state.json", lambda content: b""),
    }

    @pytest.mark.parametrize("kind", CONTENTS)
    def test_replaced_content_is_rejected_and_never_executed(
        self, killed_copy: Path, tmp_path: Path, kind: str
    ) -> None:
        name, change = self.CONTENTS[kind]
        path = killed_copy / "checkpoints" / NEWEST / name
        path.write_bytes(change(path.read_bytes()))
        resign(path.parent)
        assert newest_valid_name(killed_copy) == PREVIOUS
        assert not (tmp_path / CANARY).exists()

    @pytest.mark.parametrize(
        "name", ["../stolen", "/etc/passwd", "a/b", "..", ".hidden", "", "x\0y", "a\\b"]
    )
    def test_file_name_outside_its_folder_is_rejected(self, killed_copy: Path, name: str) -> None:
        resign(
            killed_copy / "checkpoints" / NEWEST,
            lambda body: body["files"].update({name: {"size": 1, "digest": "0"}}),
        )
        assert newest_valid_name(killed_copy) == PREVIOUS

    CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
        "phase": lambda body: body["state"].update(phase=-1),
        "step": lambda body: body["state"].update(step="1; rm"),
        "updates": lambda body: body["state"].update(updates=1e400),
        "sequence": lambda body: body.update(sequence=None),
        "format": lambda body: body.update(format=99),
        "more": lambda body: body.update(more=1),
        "less": lambda body: body.pop("files"),
    }

    @pytest.mark.parametrize("change", CHANGES)
    def test_senseless_manifest_is_rejected(self, killed_copy: Path, change: str) -> None:
        resign(killed_copy / "checkpoints" / NEWEST, self.CHANGES[change])
        assert newest_valid_name(killed_copy) == PREVIOUS

    def test_config_is_compared_and_never_executed(
        self, killed_copy: Path, tmp_path: Path, starter: Starter
    ) -> None:
        folder = killed_copy / "checkpoints" / NEWEST
        promised = json.loads((folder / "promised.json").read_text())
        canary = str(tmp_path / CANARY)
        promised["config"]["MODEL"] = {
            "_target_": "os.system",
            "_args_": [f"touch {canary}"],
            "name": "os.system",
        }
        promised["config"]["RUN"]["imports"] = ["antigravity"]
        (folder / "promised.json").write_text(json.dumps(promised))
        resign(folder)
        ended = starter.run(killed_copy, *SMALL, ONE)
        assert ended.code == 3, ended.output
        assert "MODEL.name: " in ended.output
        assert "'os.system'" in ended.output
        assert not (tmp_path / CANARY).exists()

    def test_planted_failure_is_detected(self, tmp_path: Path) -> None:
        pickle.loads(pickle.dumps(Bomb()))
        assert (tmp_path / CANARY).exists()

    def test_resigned_without_a_change_it_is_used(self, killed_copy: Path) -> None:
        resign(killed_copy / "checkpoints" / NEWEST)
        loaded = newest(killed_copy)
        assert Path(loaded.path).name == NEWEST
