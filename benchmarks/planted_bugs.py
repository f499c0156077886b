"""Plants bugs one at a time in a copy of the repository, and records which test catches each.

    python benchmarks/planted_bugs.py [--only TEXT ...] [--jobs 1] [--timeout 120] [--out FILE.json]
    python benchmarks/planted_bugs.py --check

The bugs are in planted_bugs.json. Each has

- name: what is broken,
- module, old, new: the file, a text that occurs in it once, and what replaces the text,
- tests: the files or node ids that are run to catch it, cheap ones first,
- caught_by: the first test that failed when the bug was planted last,
- survives: only of a bug that no test catches, why that is known.

After code or tests have moved, only the paths in planted_bugs.json have to be edited; `--check`
says within a second which entries do not apply any more.

Nothing is planted in the working tree: the files that git tracks, as they are now, and new files
that it does not ignore are copied to a temporary folder, and tests and the processes that they
start import the package from there. There are two controls: a module that cannot be imported has
to be noticed, and the tests that have failed have to pass without a bug. The exit code is 0 if
exactly the bugs with `survives` have survived. All bugs take about 30 minutes of one CPU.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".json")

CAUGHT = "caught"
SURVIVED = "survived"
UNDECIDED = "no result"  # the tests could not be run, or took too long
STALE = "does not apply"

TESTS_PER_BUG = 5
"""A bug gets as many times the limit of one test."""

POLL_SECONDS = 0.2
EXIT_SECONDS = 2.0
"""How often the output of pytest is read, and how long it may take to exit after its summary."""

# A failed test, or a file of tests that cannot be collected, in the summary of pytest.
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?\n", re.MULTILINE)


@dataclass(frozen=True)
class Bug:
    """An entry of planted_bugs.json, see the docstring of the module."""

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    caught_by: str = ""
    survives: str = ""

    def find_obstacle(self, root: Path) -> str:
        """Return why the entry does not apply to a tree; empty if it does."""
        path = root / self.module
        if not path.is_file():
            return f"there is no file {self.module}"
        count = path.read_text("utf-8").count(self.old)
        if count != 1 or self.old == self.new:
            return f"its old text occurs {count} times in {self.module}, expected once"
        try:
            compile(path.read_text("utf-8").replace(self.old, self.new), self.module, "exec")
        except SyntaxError as error:
            return f"it is no Python: {error}"
        missing = [test for test in self.tests if not (root / test.partition("::")[0]).is_file()]
        if missing or not self.tests:
            return f"there is no test {', '.join(missing)}"
        return ""

    @contextmanager
    def plant(self, root: Path) -> Iterator[None]:
        """Put the bug into a tree, and take it out on exit."""
        path = root / self.module
        sound = path.read_text("utf-8")
        _write_module(path, sound.replace(self.old, self.new))
        try:
            yield
        finally:
            _write_module(path, sound)


@dataclass(frozen=True)
class Result:
    """What became of a planted bug.

    Attributes:
        bug: name of the bug.
        outcome: CAUGHT, SURVIVED, UNDECIDED or STALE.
        test: node id of the first test that failed.
        seconds: wall time of the tests.
        reason: why there is no result.
    """

    bug: str
    outcome: str
    test: str = ""
    seconds: float = 0.0
    reason: str = ""


# A module that tests/conftest.py does not import: without it, no test would fail by name.
BROKEN = Bug(
    "control: a module cannot be imported",
    "phasetrain/runtime/clock.py",
    "import time\n",
    "import time\n\nraise ImportError\n",
    ("tests/runtime/test_clock.py",),
)


def read_bugs() -> list[Bug]:
    """Return the entries of planted_bugs.json."""
    entries = json.loads(TABLE.read_text("utf-8"))
    return [Bug(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def list_obstacles(bugs: Sequence[Bug], root: Path = ROOT) -> list[str]:
    """Return a line for each entry that does not apply to a tree, or that says nothing."""
    counts = Counter(bug.name for bug in bugs)
    lines = [
        f"{name}: {count} entries have this name" for name, count in counts.items() if count > 1
    ]
    for bug in bugs:
        if obstacle := bug.find_obstacle(root):
            lines.append(f"{bug.name}: {obstacle}")
        if bool(bug.caught_by) == bool(bug.survives):
            lines.append(f"{bug.name}: expected either caught_by or survives")
    return lines


class Tree:
    """A tree of files in which tests are run, one after another.

    Args:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def copy_repository(cls, path: Path) -> "Tree":
        """Return a tree with the tracked and new files of the repository, as they are now."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():  # a tracked file may have been deleted
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path / name)
        return cls(path)

    def run_tests(
        self, tests: Sequence[str], timeout: float, *options: str
    ) -> tuple[int | None, str]:
        """Run tests.

        Args:
            tests: files and node ids.
            timeout: seconds for all of them.
            options: options of pytest.

        Returns:
            The exit code of pytest, None if it did not end by itself, and its output.
        """
        # Before the installed package, which is imported through a hook at the end of
        # sys.meta_path.
        environment = {**os.environ, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        # Garbage of pytest itself would fail a run whose tests have all passed.
        command += ["-p", "no:unraisableexception", "--tb=short", "-rfE"]
        # Random tests have the same cases in each run, and no deadline, which a busy machine misses.
        command += ["--hypothesis-profile=ci"]
        end = time.monotonic() + timeout
        with tempfile.NamedTemporaryFile() as output:
            log = Path(output.name)  # read through a handle of its own: positions are shared
            process = self._process = subprocess.Popen(
                [*command, *options, *tests],
                cwd=self.path,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            text = ""
            # A test that fails may leave workers, for which pytest waits after its summary.
            while process.poll() is None and time.monotonic() < end and not FAILED.search(text):
                time.sleep(POLL_SECONDS)
                text = log.read_text("utf-8", "replace")
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
            code = process.poll()
            self.stop()
            return code, log.read_text("utf-8", "replace")

    def stop(self) -> None:
        """Kill pytest and all processes that a test has started, if there are any."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def try_bug(bug: Bug, tree: Tree, timeout: float) -> Result:
    """Plant a bug in a tree, run its tests, and take it out again."""
    if obstacle := bug.find_obstacle(tree.path):
        return Result(bug.name, STALE, reason=obstacle)
    began = time.perf_counter()
    with bug.plant(tree.path):
        # A test that hangs fails; the limit of the process is for hangs outside of tests.
        limit = f"--timeout={timeout:g}"
        code, output = tree.run_tests(bug.tests, TESTS_PER_BUG * timeout, "-x", limit)
    result = Result(bug.name, UNDECIDED, seconds=round(time.perf_counter() - began, 1))
    if code == 0:
        return replace(result, outcome=SURVIVED)
    failed = FAILED.search(output)
    if failed is not None:
        return replace(result, outcome=CAUGHT, test=failed[1])
    if code is None:
        return replace(result, reason=f"the tests took more than {TESTS_PER_BUG * timeout:g} s")
    return replace(result, reason=f"pytest ended with {code}:\n{output[-2000:]}")


def recheck(results: Sequence[Result], tree: Tree, timeout: float) -> list[Result]:
    """Return the results, without those whose test fails in a tree without a bug as well."""
    tests = sorted({result.test for result in results if result.test})
    if not tests:
        return list(results)
    limit = f"--timeout={timeout:g}"
    code, output = tree.run_tests(tests, timeout * len(tests), limit)
    failing = set(FAILED.findall(output))
    reason = "its test fails without the bug as well"
    if code != 0 and not failing:
        failing = set(tests)
        reason = (
            f"its test was not run without the bug; pytest ended with {code}:\n{output[-2000:]}"
        )
    return [
        replace(result, outcome=UNDECIDED, reason=reason) if result.test in failing else result
        for result in results
    ]


def try_bugs(bugs: Sequence[Bug], jobs: int, timeout: float) -> list[Result]:
    """Try each bug, in as many copies of the tree as there are jobs, and print the results."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as folder:
        trees = [Tree.copy_repository(Path(folder, str(number))) for number in range(jobs)]
        free: SimpleQueue[Tree] = SimpleQueue()
        for tree in trees:
            free.put(tree)

        def run_in_free_tree(bug: Bug) -> Result:
            tree = free.get()
            try:
                return try_bug(bug, tree, timeout)
            finally:
                free.put(tree)

        pool = ThreadPoolExecutor(jobs)
        try:
            control = run_in_free_tree(BROKEN)
            if control.outcome != CAUGHT:
                sys.exit(f"{control.bug}: {control.outcome} {control.reason}")
            for bug, result in zip(bugs, pool.map(run_in_free_tree, bugs), strict=True):
                known = f" (known: {bug.survives})" if bug.survives else ""
                line = f"{result.outcome:9} {result.seconds:5.1f} s  {bug.name}"
                print(f"{line}: {result.test or result.reason}{known}", flush=True)
                results.append(result)
            checked = recheck(results, trees[0], timeout)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:  # after Ctrl-C: pytest has a session of its own, and goes on
                tree.stop()
        for before, after in zip(results, checked, strict=True):
            if before != after:
                print(f"{after.bug}: {after.reason}")
    return checked


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="parts of names")
    parser.add_argument("--jobs", type=int, default=1, help="bugs that are tried at the same time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one test")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--check", action="store_true", help="only check that all entries apply")
    arguments = parser.parse_args()
    bugs = read_bugs()
    if arguments.check:
        obstacles = list_obstacles(bugs)
        print("\n".join(obstacles) or f"all {len(bugs)} bugs can be planted")
        return int(bool(obstacles))
    bugs = [bug for bug in bugs if any(text in bug.name for text in arguments.only)]
    results = try_bugs(bugs, arguments.jobs, arguments.timeout)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    expected = [SURVIVED if bug.survives else CAUGHT for bug in bugs]
    return int([result.outcome for result in results] != expected)


def _write_module(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    # Python would take a cached module of the same size and second for the one that was written.
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        cached.unlink()


if __name__ == "__main__":
    sys.exit(main())
