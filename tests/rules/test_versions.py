"""The page of tested versions is that of its results, and the bounds of pyproject.toml are tested."""

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import phasetrain

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
RESULTS = json.loads((ROOT / "docs" / "versions.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def matrix() -> Any:
    """Return the module benchmarks/matrix.py."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "benchmarks" / "matrix.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare; local parts such as `+cpu` are left out."""
    public = version.partition("+")[0]
    return tuple(int(part) for part in public.replace("post", "").split("."))


@pytest.mark.feature("versions")
def test_page_is_that_of_the_results(matrix: Any) -> None:
    assert (ROOT / "docs" / "versions.md").read_text("utf-8") == matrix.render(RESULTS)


@pytest.mark.feature(
    "versions",
    "tested with the lower bounds and the newest versions of Python and the dependencies",
    "`make matrix`",
)
def test_lower_bounds_are_the_lowest_versions_that_work(matrix: Any) -> None:
    working = [found["packages"] for found in RESULTS["environments"].values() if found["works"]]
    for name, bound in matrix.direct_dependencies().items():
        lowest = min((packages[name] for packages in working), key=as_numbers)
        expected = as_numbers(bound)
        assert as_numbers(lowest)[: len(expected)] == expected, name
    lowest = min((packages["python"] for packages in working), key=as_numbers)
    assert PROJECT["requires-python"] == f">={'.'.join(lowest.split('.')[:2])}"


def test_failures_and_groups_of_digests_are_shown(matrix: Any) -> None:
    packages = {"python": "3.11.7", "torch": "9.9"}
    case = {"digest": "ab" * 32, "problems": []}
    found = {"date": "2026-01-02", "works": True, "packages": packages, "cases": {"digits": case}}
    broken = {**found, "works": False, "tests": {"passed": 3, "failed": ["tests/a.py::b"]}}
    absent = {"date": "2026-01-03", "works": False, "error": "no wheel"}
    page = matrix.render(
        {
            "machine": "m",
            "environments": {"good": found, "bad": broken, "gone": absent},
        }
    )
    assert "| good | 3.11.7 | 9.9 |  |  |  |  | works | 2026-01-02 |" in page
    assert "| bad | 3.11.7 | 9.9 |  |  |  | 3 | fails: `tests/a.py::b` | 2026-01-02 |" in page
    assert "| gone |  |  |  |  |  |  | cannot be installed or started | 2026-01-03 |" in page
    assert "| digits | `abababababab` | good, bad |" in page


def test_matrix_without_uv_names_the_pinned_version(
    matrix: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        matrix.main(["--only", "pinned-3.11"])
    assert ended.value.code == 2
    assert "`make matrix` installs uv==" in capsys.readouterr().err


def test_project_has_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert PROJECT["version"] == phasetrain.__version__ == citation["version"]
