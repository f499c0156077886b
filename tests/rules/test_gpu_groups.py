"""`make gpu` keeps the result of each group, continues, and has a dry run without a GPU."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import gpu
import pytest
from emulated_cuda import why_not_emulated

ROOT = Path(__file__).parents[2]


def states(folder: Path) -> list[tuple[str, str]]:
    return [(row["group"], row["state"]) for row in gpu.read_results(folder)]


def test_results_are_kept_and_only_groups_that_failed_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    groups = (
        gpu.Group("good", 60, ("-c", "print('done')")),
        gpu.Group("bad", 60, ("-c", f"import pathlib; pathlib.Path({str(mark)!r}).read_text()")),
        gpu.Group("endless", 0.5, ("-c", "import time; time.sleep(60)")),
    )
    monkeypatch.setattr(gpu, "GROUPS", groups)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert states(tmp_path) == [("good", "passed"), ("bad", "exit 1"), ("endless", "timeout")]
    results = tmp_path / "results.jsonl"
    results.write_text(results.read_text() + '\n{"group": "bad", "sta')  # a lost machine
    mark.write_text("")
    assert gpu.main(["--out", str(tmp_path), "--only", "good", "bad"]) == 1
    assert states(tmp_path)[3:] == [("bad", "passed")]
    with tarfile.open(tmp_path / "results.tar.gz") as packed:
        assert packed.getnames() == ["bad.log", "endless.log", "good.log", "results.jsonl"]
    assert json.loads(results.read_text().splitlines()[0])["last"] == "done"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(why_not_emulated() is not None, reason=why_not_emulated() or "")
def test_dry_run_passes_without_a_gpu(tmp_path: Path) -> None:
    words = ["tools/gpu.py", "--emulated", "--minutes", "60", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    expected = [group.name for group in gpu.GROUPS if not group.needs_device]
    assert [name for name, _ in states(tmp_path)] == expected
