"""Where reports are written, and what is said when they cannot be."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from failpoints import Refusing
from raising import raises

from phasetrain.addons.report.page import write_report
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import Storage

TOOL = Path(__file__).parents[4] / "tools" / "report.py"


def test_of_one_run_into_its_folder(run_folder: Path) -> None:
    before = set(run_folder.iterdir())
    assert write_report([f"{run_folder}/"]) == f"{run_folder}/report.html"
    assert set(run_folder.iterdir()) - before <= {run_folder / "report.html"}
    assert (run_folder / "report.html").read_text().startswith("<!doctype html>")


def test_of_several_runs_into_the_current_folder(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder.parent)
    assert write_report([str(run_folder)] * 2) == "comparison.html"
    assert "2 runs compared" in Path("comparison.html").read_text()


def test_a_full_disk_leaves_the_old_report_and_says_so(run_folder: Path) -> None:
    old = (run_folder / "report.html").read_bytes()
    full = Storage(Refusing("rename", ".html", errno.ENOSPC))
    with raises(ConfigError, code="report.not_writable"):
        write_report([str(run_folder)], storage=full)
    assert (run_folder / "report.html").read_bytes() == old
    assert not list(run_folder.glob("*.tmp-*"))


def test_the_folder_of_the_page_is_made(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "reports" / "today" / "page.html"
    assert write_report([str(run_folder)], str(out)) == str(out)
    assert out.read_text().startswith("<!doctype html>")


def test_advice_fits_what_is_wrong(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(ConfigError, code="report.not_writable"):
        write_report([str(run_folder)], str(tmp_path / "file" / "page.html"))
    full = Storage(Refusing("rename", ".html", errno.ENOSPC))
    with raises(ConfigError, code="report.not_writable"):
        write_report([str(run_folder)], storage=full)


def test_no_folder() -> None:
    with pytest.raises(ConfigError):
        write_report([])


def test_the_tool(run_folder: Path, tmp_path: Path) -> None:
    words = [sys.executable, str(TOOL), str(run_folder), "nowhere"]
    refused = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("'nowhere' ")
    made = subprocess.run(words[:-1], capture_output=True, text=True, cwd=tmp_path)
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{run_folder}/report.html\n", "")
