"""The object store in memory keeps what object stores promise, and no more."""

import gc
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from iopath.common.file_io import PathManager

from phasetrain.testing import MemoryHandler


def files(objects: dict[str, bytes] | None = None) -> PathManager:
    manager = PathManager()
    manager.register_handler(MemoryHandler({} if objects is None else objects))
    return manager


def write(manager: PathManager, path: str, content: bytes) -> None:
    with manager.open(path, "wb") as file:
        file.write(content)


def test_bytes_and_text_come_back() -> None:
    manager = files()
    write(manager, "mem://a/one", b"\x00\xff")
    with manager.open("mem://a/two", "w") as text:
        text.write("zwölf\n")
    with manager.open("mem://a/one", "rb") as file:
        assert file.read() == b"\x00\xff"
    with manager.open("mem://a/two", "r") as text:
        assert text.read() == "zwölf\n"


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_write_is_seen_at_close_and_whole(mode: str) -> None:
    manager = files({"mem://a": b"old"})
    file = manager.open("mem://a", mode)
    file.write("new" if mode == "w" else b"new")
    file.flush()
    assert manager.open("mem://a", "rb").read() == b"old"
    file.close()
    assert manager.open("mem://a", "rb").read() == b"new"


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_write_that_fails_or_is_dropped_is_never_seen(mode: str) -> None:
    manager = files()
    half = "half" if mode == "w" else b"half"
    with suppress(ZeroDivisionError), manager.open("mem://failed", mode) as file:
        file.write(half)
        raise ZeroDivisionError
    dropped = manager.open("mem://dropped", mode)
    dropped.write(half)
    dropped.flush()
    del dropped, file
    gc.collect()
    assert manager.ls("mem://") == []


def test_folders_are_prefixes() -> None:
    manager = files()
    manager.mkdirs("mem://run/checkpoints")
    assert not manager.exists("mem://run")
    write(manager, "mem://run/checkpoints/a/model", b"1")
    write(manager, "mem://run/checkpoints/b", b"2")
    write(manager, "mem://running", b"3")
    assert manager.ls("mem://run") == manager.ls("mem://run/") == ["checkpoints"]
    assert manager.ls("mem://run/checkpoints") == ["a", "b"]
    assert manager.ls("mem://") == ["run", "running"]
    assert manager.ls("mem://none") == []
    assert [
        manager.isdir(f"mem://{path}") for path in ("run", "run/checkpoints/a", "running", "ru")
    ] == [
        True,
        True,
        False,
        False,
    ]
    assert [manager.isfile(f"mem://{path}") for path in ("run", "running")] == [False, True]
    assert manager.exists("mem://run")
    assert manager.exists("mem://running")


def test_objects_are_deleted_and_copied() -> None:
    manager = files({"mem://a": b"1", "mem://b": b"2"})
    with pytest.raises(FileExistsError):
        manager.copy("mem://a", "mem://b")
    assert manager.copy("mem://a", "mem://b", overwrite=True)
    manager.rm("mem://a")
    assert manager.open("mem://b", "rb").read() == b"1"
    assert manager.ls("mem://") == ["b"]
    for missing in (lambda: manager.rm("mem://a"), lambda: manager.copy("mem://a", "mem://c")):
        with pytest.raises(FileNotFoundError):
            missing()
    with pytest.raises(FileNotFoundError):
        manager.open("mem://a", "rb")


@pytest.mark.parametrize("mode", ["a", "ab", "r+b", "xb"])
def test_unsupported_operations_are_rejected(mode: str) -> None:
    manager = files({"mem://a": b"1"})
    with pytest.raises(io.UnsupportedOperation, match="mem://a "):
        manager.open("mem://a", mode)
    with pytest.raises(io.UnsupportedOperation, match=r"mem://a .* mem://b"):
        manager.mv("mem://a", "mem://b")
    assert manager.ls("mem://") == ["a"]


def test_handlers_share_objects_when_asked_or_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: dict[str, bytes] = {}
    write(files(shared), "mem://a", b"1")
    assert files(shared).exists("mem://a")
    assert not files().exists("mem://a")
    monkeypatch.setattr(MemoryHandler, "objects", {})
    first, second = PathManager(), PathManager()
    first.register_handler(MemoryHandler())
    second.register_handler(MemoryHandler())
    write(first, "mem://b", b"2")
    assert second.exists("mem://b")


def test_threads_may_write_and_list_at_once() -> None:
    manager = files()

    def work(number: int) -> None:
        for count in range(50):
            write(manager, f"mem://{number}/{count}", b"x" * count)
            manager.ls("mem://")
            if count % 2:
                manager.rm(f"mem://{number}/{count}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [len(manager.ls(f"mem://{number}")) for number in range(4)] == [25, 25, 25, 25]
