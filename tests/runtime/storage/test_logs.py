"""A log holds what was written once, in order, however often the disk was full in between."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from failpoints import PLACES, Failpoint, Files, Objects, Place, Refusing, refused

from phasetrain.runtime.storage import LogFile, Storage
from phasetrain.runtime.storage.logs import BUFFER_BYTES

Kind = Callable[[Path], Place]


def opened(place: Place, before: Callable[[str, str], None] | None = None) -> LogFile:
    return place.storage(before).log_file(f"{place.path}/log")


@pytest.mark.parametrize("kind", PLACES)
class TestOnAnyPlace:
    def test_it_grows_and_is_cut(self, tmp_path: Path, kind: Kind) -> None:
        place = kind(tmp_path / "place")
        log = opened(place)
        assert (log.size, log.read()) == (0, b"")
        log.write(b"one\n")
        log.write(b"two\n")
        assert log.size == 8
        log.sync()
        assert place.content() == {"log": b"one\ntwo\n"}
        log.truncate(4)
        log.write(b"three\n")
        log.close()
        assert place.content() == {"log": b"one\nthree\n"}
        again = opened(place)
        assert (again.size, again.read()) == (10, b"one\nthree\n")
        again.write(b"four\n")
        again.close()
        assert place.content() == {"log": b"one\nthree\nfour\n"}

    def test_cutting_drops_what_was_not_handed_over(self, tmp_path: Path, kind: Kind) -> None:
        log = opened(place := kind(tmp_path / "place"))
        log.write(b"one\n")
        log.flush()
        log.write(b"two\n")
        log.truncate(4)
        assert log.size == 4
        log.close()
        assert place.content() == {"log": b"one\n"}

    def test_a_sync_that_is_refused_is_made_good_by_the_next(
        self, tmp_path: Path, kind: Kind
    ) -> None:
        place = kind(tmp_path / "place")
        before = Failpoint(None, refused(28))
        log = opened(place, before)
        log.write(b"one\n")
        before.number, before.lasting = 0, True
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                log.sync()
        log.write(b"two\n")
        before.number = None
        log.sync()
        assert place.content() == {"log": b"one\ntwo\n"}
        log.close()


class TestLocal:
    def test_small_writes_are_collected(self, tmp_path: Path) -> None:
        log = opened(place := Files(tmp_path / "place"))
        log.write(b"x" * (BUFFER_BYTES - 1))
        assert place.content() == {"log": b""}
        log.write(b"x")
        assert len(place.content()["log"]) == BUFFER_BYTES
        log.close()

    def test_writing_raises_nothing_and_loses_nothing_while_the_disk_is_full(
        self, tmp_path: Path
    ) -> None:
        before = Failpoint(None, refused(28))
        log = opened(place := Files(tmp_path / "place"), before)
        log.write(b"first\n")
        assert log.flush() is None
        before.number, before.lasting = 0, True
        lines = [f"{number}\n".encode() * 1000 for number in range(20)]
        for line in lines:
            log.write(line)
        error = log.flush()
        assert error is not None
        assert error.errno == 28
        assert place.content() == {"log": b"first\n"}
        assert log.size == len(b"first\n" + b"".join(lines))
        before.number = None
        assert log.flush() is None
        assert place.content() == {"log": b"first\n" + b"".join(lines)}
        log.close()

    def test_a_part_that_was_written_is_not_written_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = opened(place := Files(tmp_path / "place"))
        whole = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda handle, data, at: whole(handle, data[:3], at))
        log.write(b"abcdefgh\n")
        log.close()
        assert place.content() == {"log": b"abcdefgh\n"}

    def test_a_log_that_cannot_be_opened(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No space left"):
            Storage(Refusing("open")).log_file(f"{tmp_path}/log")
        assert list(tmp_path.iterdir()) == []

    def test_nobody_waits_for_a_sync_in_order_to_write(self, tmp_path: Path) -> None:
        entered, gate, order = threading.Event(), threading.Event(), list[str]()

        def before(operation: str, path: str) -> None:
            if operation == "fsync":
                entered.set()
                gate.wait(10)
                order.append("synced")

        log = opened(place := Files(tmp_path / "place"), before)
        log.write(b"one\n")
        thread = threading.Thread(target=log.sync)
        thread.start()
        assert entered.wait(10)
        log.write(b"two\n")
        assert log.flush() is None
        order.append("written")
        gate.set()
        thread.join()
        assert order == ["written", "synced"]
        log.close()
        assert place.content() == {"log": b"one\ntwo\n"}


@pytest.mark.addon("remote")
class TestObjects:
    def test_it_is_written_as_a_whole_when_it_is_made_durable(self, tmp_path: Path) -> None:
        seen: list[str] = []
        place = Objects(tmp_path / "place")
        log = opened(place, lambda operation, path: seen.append(operation))
        log.write(b"one\n")
        assert log.flush() is None
        assert place.content() == {}
        log.sync()
        log.sync()
        assert seen == ["write"]
        log.close()
        assert seen == ["write"]

    def test_lines_that_come_during_a_sync_are_written_by_the_next(self, tmp_path: Path) -> None:
        place = Objects(tmp_path / "place")

        def before(operation: str, path: str) -> None:
            if log.size == 4:
                log.write(b"two\n")
                log.flush()

        log = opened(place, before)
        log.write(b"one\n")
        log.sync()
        log.sync()
        assert place.content() == {"log": b"one\ntwo\n"}
        log.close()
