"""Results that are kept until the code changes."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from phasetrain.addons.authoring import code_cache
from phasetrain.addons.authoring.code_cache import compute_once


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small package in the place of phasetrain, with an empty cache."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "parts.py").write_text("one = 1\n")
    monkeypatch.setattr(code_cache, "PACKAGE", folder)
    monkeypatch.setattr(code_cache, "entry_points", lambda group: ())
    monkeypatch.setenv("PHASETRAIN_CACHE", str(tmp_path / "cache"))
    return folder


def count_computations(name: str = "help LOSS", times: int = 2) -> int:
    calls: list[None] = []

    def compute() -> dict[str, list[int]]:
        calls.append(None)
        return {"words": [1, 2]}

    for _ in range(times):
        assert compute_once(name, compute) == {"words": [1, 2]}
    return len(calls)


@pytest.mark.usefixtures("package")
def test_result_is_computed_once_per_name() -> None:
    assert count_computations() == 1
    assert count_computations() == 0
    assert count_computations("help MODEL") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "parts.py").write_text("one = 11\n"),
        lambda folder: (folder / "more.py").write_text(""),
        lambda folder: (folder / "parts.py").unlink(),
    ],
    ids=["changed", "added", "removed"],
)
def test_changed_code_computes_again(package: Path, change: object) -> None:
    assert count_computations() == 1
    assert callable(change)
    change(package)
    assert count_computations() == 1


def test_compiled_files_do_not_count(package: Path) -> None:
    assert count_computations() == 1
    (package / "parts.cpython-311.pyc").write_bytes(b"")
    assert count_computations() == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"code": "0"}'])
@pytest.mark.usefixtures("package")
def test_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    assert count_computations() == 1
    (path,) = (tmp_path / "cache" / "results").iterdir()
    path.write_text(content)
    assert count_computations() == 1
    assert count_computations() == 0


@pytest.mark.usefixtures("package")
def test_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PHASETRAIN_CACHE", str(tmp_path / "file"))
    assert count_computations() == 2


@pytest.mark.parametrize("group", [code_cache.GROUP, code_cache.PLUGINS])
@pytest.mark.usefixtures("package")
def test_parts_of_other_packages_are_not_cached(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {group: (EntryPoint("mine", "my_parts:register", group),)}
    monkeypatch.setattr(code_cache, "entry_points", lambda group: points.get(group, ()))
    assert count_computations() == 2
