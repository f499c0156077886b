"""Test phasetrain with other versions of Python and of its dependencies; writes docs/versions.md.

    make matrix [ARGS="--only lowest-3.11 newest-3.13"]

Each environment is built from a wheel of this checkout with uv, in a temporary folder that is
deleted afterwards, one at a time: `matrix_proof.py` in an empty folder, then in some of them `TESTS`
of the suite.
Results go into docs/versions.json after each environment, and docs/versions.md is written from it.
`make matrix` installs uv in the version of constraints.txt. uv needs to find the Pythons (`uv python
find 3.13`), and several GB of disk for CUDA builds of
torch. `--page` only writes the page.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"

TESTS = (
    "tests/data/loading/test_custom_loader.py",
    "tests/distributed/strategies",
    "tests/end_to_end/test_releases.py",
    "tests/addons/observe/profiling/test_profiler.py",
    "tests/addons/sharding/test_fsdp.py",
    "tests/addons/sharding/test_sharded_ddp.py",
    "tests/addons/sharding/test_zero.py",
)
"""What uses private parts of torch, or has failed with another version of it before."""

TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "setuptools", "cloudpickle")
SHOWN = ("torch", "numpy", "hydra-core", "omegaconf")

# Runs in the environment. Names of distributions differ in case and dashes from those in pyproject.
LIST_PACKAGES = """
import importlib.metadata, json, re
names = {re.sub("[-_.]+", "-", one.name).lower(): one.version for one in importlib.metadata.distributions()}
print(json.dumps(names))
"""


@dataclass(frozen=True)
class Environment:
    """An environment to test in.

    Attributes:
        python: version of Python, for uv.
        versions: `pinned` for those of constraints.txt, or uv's resolution: `highest`, or
            `lowest-direct` for the lower bounds of pyproject.toml.
        instead: versions that replace pinned ones.
        runs_tests: whether `TESTS` run here as well; others differ in few versions from these.
    """

    python: str
    versions: str = "pinned"
    instead: Mapping[str, str] = field(default_factory=dict)
    runs_tests: bool = False


ENVIRONMENTS: Mapping[str, Environment] = {
    "lowest-3.11": Environment("3.11", "lowest-direct", runs_tests=True),
    "pinned-3.11": Environment("3.11", runs_tests=True),
    "pinned-3.12": Environment("3.12"),
    "pinned-3.13": Environment("3.13"),
    "numpy-1.26": Environment("3.11", instead={"numpy": "1.26.4"}),
    "torch-2.14.0": Environment("3.11", instead={"torch": "2.14.0"}),
    "torch-2.14.1": Environment("3.12", instead={"torch": "2.14.1"}),
    "newest-3.11": Environment("3.11", "highest"),
    "newest-3.13": Environment("3.13", "highest", runs_tests=True),
}
"""The order of the page. Each torch from the lower bound on, each Python, both NumPy 1.26 and 2."""


def run(*words: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a program and return its standard output.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{words[0]}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Return a wheel of this checkout, built without leaving files in it."""
    (source := folder / "source").mkdir()
    for name in ("phasetrain", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run("uv", "build", "--wheel", "--quiet", "--out-dir", folder / "wheel", source)
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def find_pin(name: str) -> str:
    """Return the line of constraints.txt about a package."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return next(line for line in lines if line.partition("==")[0] == name)


def pins(environment: Environment) -> str:
    """Return the constraints of an environment."""
    if environment.versions != "pinned":
        return ""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in environment.instead]
    return "\n".join([*kept, *(f"{name}=={one}" for name, one in environment.instead.items())])


def install(environment: Environment, wheel: Path, folder: Path) -> Path:
    """Build an environment in a folder and return its Python."""
    room = folder / "environment"
    run("uv", "venv", "--quiet", "--python", environment.python, room)
    python = room / "bin" / "python"
    (folder / "constraints.txt").write_text(pins(environment))
    install = ("uv", "pip", "install", "--quiet", "--python", python)
    chosen = ["--constraint", folder / "constraints.txt"]
    if environment.versions != "pinned":
        chosen += ["--resolution", environment.versions]
    # The dependencies first: of a wheel, they would not be direct ones, whose lower bounds count.
    run(*install, *chosen, "--requirement", ROOT / "pyproject.toml")
    run(*install, "--no-deps", wheel)
    run(*install, "--constraint", ROOT / "constraints.txt", *TEST_PACKAGES)
    return python


def run_tests(python: Path, folder: Path) -> dict[str, Any]:
    """Run `TESTS` and return the number that passed and the names of those that failed."""
    report = folder / "tests.txt"
    with report.open("w") as file:
        # Not `python -m pytest`, which would import phasetrain from the working directory.
        subprocess.run(
            [python.with_name("pytest"), "-q", "-p", "no:cacheprovider", "-rfE", *TESTS],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        )
    text = report.read_text()
    passed = re.search(r"(\d+) passed", text)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if not passed:
        failed.append(text[-1000:])
    return {"passed": int(passed[1]) if passed else 0, "failed": failed}


def test(environment: Environment, wheel: Path) -> dict[str, Any]:
    """Build an environment, test in it, delete it, and return what was found."""
    with tempfile.TemporaryDirectory(prefix="phasetrain-matrix-") as name:
        folder = Path(name)
        found: dict[str, Any] = {
            "date": date.today().isoformat(),
            "versions": environment.versions,
        }
        try:
            python = install(environment, wheel, folder)
            found["packages"] = select_packages(json.loads(run(python, "-c", LIST_PACKAGES)))
            version = "import platform; print(platform.python_version())"
            found["packages"]["python"] = run(python, "-c", version).strip()
            where = "import phasetrain; print(phasetrain.__file__)"
            assert str(folder) in run(python, "-c", where, cwd=folder), "not the wheel"
            proof = ROOT / "benchmarks" / "matrix_proof.py"
            found["cases"] = json.loads(run(python, proof, folder / "runs", cwd=folder))
            if environment.runs_tests:
                found["tests"] = run_tests(python, folder)
        except RuntimeError as error:
            found["error"] = str(error)[-1500:]
        return {**found, "works": does_work(found)}


def does_work(found: Mapping[str, Any]) -> bool:
    """Return whether everything passed in an environment."""
    return (
        "error" not in found
        and not found.get("tests", {}).get("failed")
        and not any(case["problems"] for case in found["cases"].values())
    )


def direct_dependencies() -> dict[str, str]:
    """Return the dependencies of pyproject.toml and their lower bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return dict(one.split(">=") for one in project["dependencies"])


def select_packages(installed: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of the direct dependencies."""
    return {name: installed[name] for name in direct_dependencies()}


def equal_digests(environments: Mapping[str, Any], case: str) -> dict[str, list[str]]:
    """Return digest -> environments in which a case has it; failed cases have none."""
    groups: dict[str, list[str]] = {}
    for name, found in environments.items():
        digest = found.get("cases", {}).get(case, {}).get("digest")
        if digest:
            groups.setdefault(digest, []).append(name)
    return groups


def verdict(found: Mapping[str, Any]) -> str:
    """Return a cell of the table."""
    if found["works"]:
        return "works"
    if "error" in found:
        return "cannot be installed or started"
    cases = [name for name, case in found["cases"].items() if case["problems"]]
    tests = [f"`{name}`" for name in found.get("tests", {}).get("failed", ())]
    return "fails: " + ", ".join([*cases, *tests])


def render(results: Mapping[str, Any]) -> str:
    """Return docs/versions.md."""
    environments = results["environments"]
    lines = [
        "# Versions",
        "",
        "<!-- Written by `make matrix` from versions.json. -->",
        "",
        f"Tested on {results['machine']}. In each environment a run of each case is killed with SIGKILL",
        "and resumed, and weights, metrics and ledger are compared with an uninterrupted run; in",
        "some of them a part of the test suite runs. `pinned` has the versions of",
        "`constraints.txt`, `lowest` the lower bounds of `pyproject.toml`, `newest` the newest on PyPI.",
        "Linux and macOS are supported; macOS is not tested here, Windows is not supported. Extras are",
        "tested with the versions of `constraints.txt` only. `make matrix` repeats all of it.",
        "",
        "| environment | Python | torch | NumPy | Hydra | OmegaConf | tests passed | verdict | date |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in environments.items():
        packages = found.get("packages", {})
        cells = [name, *(packages.get(one, "") for one in ("python", *SHOWN))]
        cells += [str(found.get("tests", {}).get("passed", "")), verdict(found), found["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Equal digests",
        "Environments in one row train to the same bits. The promise is made for one environment; between",
        "rows, weights differ.",
        "",
        "| case | digest of the weights | environments |",
        "|---|---|---|",
    ]
    cases = {case: None for found in environments.values() for case in found.get("cases", {})}
    for case in cases:
        for digest, names in equal_digests(environments, case).items():
            lines.append(f"| {case} | `{digest[:12]}` | {', '.join(names)} |")
    return "\n".join([*lines, ""])


def describe_machine() -> str:
    """Return the operating system and the processor."""
    cpu = platform.processor()
    with Path("/proc/cpuinfo").open() as file:
        cpu = next((line.partition(":")[2].strip() for line in file if "model name" in line), cpu)
    return f"{platform.system()} {platform.machine()}, {cpu}"


def main(given: Sequence[str] | None = None) -> int:
    """Test and write the results; return 1 if an environment does not work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--page", action="store_true", help="only write the page")
    chosen = parser.parse_args(given)
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"environments": {}}
    if not chosen.page:
        if shutil.which("uv") is None:
            parser.error(f"uv is not on PATH; `make matrix` installs {find_pin('uv')}")
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(Path(folder))
            for name in chosen.only:
                found = test(ENVIRONMENTS[name], wheel)
                results["environments"][name] = found
                print(name, verdict(found), flush=True)
                write_results(results)
    PAGE.write_text(render(results), "utf-8")
    return int(not all(found["works"] for found in results["environments"].values()))


def write_results(results: dict[str, Any]) -> None:
    """Write versions.json, with this machine."""
    known = results["environments"]
    content = {
        "machine": describe_machine(),
        "environments": {name: known[name] for name in ENVIRONMENTS if name in known},
    }
    results.update(content)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
