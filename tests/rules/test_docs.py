"""Code blocks of the docs run.

Every page is run in a folder of its own, its blocks in their order:
- ```python: blocks between two blocks of another kind make one program;
- ```bash: as written; `phasetrain` and `python` are those of the tests; blocks that call nothing else are run;
- ```yaml: must parse.
Programs are forked from one process that has imported torch (see warm.py), which saves two seconds
for each. A comment before a block says more: `<!-- file: NAME -->` writes it to NAME first,
`<!-- skip: reason -->` leaves it out, `<!-- exit: 2 -->` expects a bash block to end with that
code.
"""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_COMMENT = re.compile(r"^\s*<!-- (file|skip|exit): (.+?) -->\s*$")
_FENCE = re.compile(r"^(?P<indent>\s*)```(?P<kind>\w*)")
_COMMAND = re.compile(r"(phasetrain|python)(\s|$)")
_SET_UP = re.compile(
    r"(make|git|pip|cd|torchrun|\.ci/run|python3? -m (venv|pip)|\.venv/bin/\w+)(\s|$)"
)  # make does it

WARM = Path(__file__).with_name("warm.py")
SHELL = """set -eu -o pipefail
phasetrain() { "$PYTHON" -S "$WARM" run "$SOCKET" phasetrain "$@"; }
python() {
  if [ "${1-}" = tools/run.py ]; then shift; phasetrain "$@";
  elif [ "${1-} ${2-}" = "-m phasetrain" ]; then shift 2; phasetrain "$@";
  else "$PYTHON" "$@"; fi
}
"""


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a process from which programs are forked."""
    path = str(tmp_path_factory.mktemp("warm") / "socket")
    with subprocess.Popen(
        [sys.executable, str(WARM), "serve", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as server:
        assert server.stdin
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        yield path
        server.stdin.close()


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line in the page, from 1, what it is, and what the comment before
    it says."""

    line: int
    kind: str
    text: str
    file: str = ""
    skip: str = ""
    exit: int = 0

    @property
    def runs(self) -> bool:
        """Whether the block is to be run."""
        return not self.skip and self.kind in ("python", "bash", "yaml")


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    lines, notes = iter(enumerate(page.splitlines(), 1)), {}
    for number, line in lines:
        comment, fence = _COMMENT.match(line), _FENCE.match(line)
        if comment:
            notes[comment[1]] = comment[2]
        elif fence:
            indent = len(fence["indent"])
            inside = [
                text[indent:]
                for _, text in itertools.takewhile(lambda item: item[1].strip() != "```", lines)
            ]
            text = "\n".join(inside) + "\n"
            code = int(notes.get("exit", "0"))
            yield Block(
                number + 1, fence["kind"], text, notes.get("file", ""), notes.get("skip", ""), code
            )
            notes = {}
        elif line.strip():
            notes = {}


def run_page(name: str, page: str, folder: Path, socket: str) -> list[str]:
    """Run the blocks of a page in a folder and return a line for each that failed."""
    failures = []
    for kind, group in itertools.groupby(
        (block for block in blocks(page) if block.runs), lambda block: block.kind
    ):
        members = list(group)
        for block in members:
            if block.file:
                path = folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
        if kind == "python":
            failures += _run_python(name, members, folder, socket)
        for block in members if kind == "bash" else ():
            failures += _run_bash(name, block, folder, socket)
        for block in members if kind == "yaml" else ():
            failures += _parse_yaml(name, block)
    return failures


def _run_python(name: str, members: list[Block], folder: Path, socket: str) -> list[str]:
    """Run blocks as one program in which each stands on the line that it has in the page."""
    lines: list[str] = []
    for block in members:
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    program = folder / f"{Path(name).stem}-blocks.py"
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-S", str(WARM), "run", socket, program.name]
    return _failure(f"{name}:{members[0].line}", command, folder, socket, expected=0)


def _run_bash(name: str, block: Block, folder: Path, socket: str) -> list[str]:
    place, first = f"{name}:{block.line}", _first_command(block.text)
    if _SET_UP.match(first):
        return []
    if not _COMMAND.match(first):
        return [
            f"{place}: begins with {first!r}; only phasetrain and python are run, give it a `<!-- skip: reason -->`"
        ]
    return _failure(place, ["bash", "-c", SHELL + block.text], folder, socket, expected=block.exit)


def _parse_yaml(name: str, block: Block) -> list[str]:
    try:
        OmegaConf.create(block.text)
    except (OmegaConfBaseException, YAMLError) as error:
        return [f"{name}:{block.line}: {error}"]
    return []


def _first_command(text: str) -> str:
    return next(
        (line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")),
        "",
    )


def _failure(
    place: str, command: Iterable[str], folder: Path, socket: str, *, expected: int
) -> list[str]:
    ours = {"PYTHON": sys.executable, "WARM": str(WARM), "SOCKET": socket, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(command),
        cwd=folder,
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode == expected:
        return []
    return [
        f"{place}: exit code {done.returncode} instead of {expected}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    ]


QUICK = {"README.md"}
"""Pages that the default tests run; `make docs` and CI run the others."""


@pytest.mark.addon
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.name in QUICK else pytest.mark.slow) for path in PAGES],
    ids=[path.relative_to(ROOT).as_posix() for path in PAGES],
)
def test_code_blocks_of_page_run(path: Path, tmp_path: Path, socket: str) -> None:
    failures = run_page(
        path.relative_to(ROOT).as_posix(), path.read_text("utf-8"), tmp_path, socket
    )
    assert not failures, "\n".join(failures)


PAGE = """
<!-- file: mine.py -->
```python
VALUE = 3
```

Text.

```python
import mine
assert VALUE == mine.VALUE
```

```bash
python -c "import mine; assert mine.VALUE == 3"
```

```yaml
a: [1, 2]
```

<!-- skip: shows an error -->
```python
1 / 0
```

<!-- exit: 3 -->
```bash
python -c "raise SystemExit(3)"
```
"""


def test_blocks_run_in_order_in_one_folder(tmp_path: Path, socket: str) -> None:
    assert [block.line for block in blocks(PAGE)] == [4, 10, 15, 19, 24, 29]
    assert run_page("page.md", PAGE, tmp_path, socket) == []


@pytest.mark.parametrize(
    ("page", "failure"),
    [
        ("```python\n1 / 0\n```\n", "line 2, in <module>\n    1 / 0"),
        ("```bash\npython -c 'raise SystemExit(1)'\n```\n", "exit code 1 instead of 0"),
        ("```bash\nls\n```\n", "begins with 'ls'"),
        ("```yaml\na: [1\n```\n", "while parsing a flow sequence"),
    ],
)
def test_failing_block_is_reported(page: str, failure: str, tmp_path: Path, socket: str) -> None:
    (found,) = run_page("page.md", page, tmp_path, socket)
    assert failure in found
