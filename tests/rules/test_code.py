"""Habits that the source keeps: no probing, no hidden state, no swallowed errors, no drawer for
leftovers."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("phasetrain", "configs", "tools", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)

# Replaces methods of torch's ProcessGroup by name, and puts them back.
PROBING = {
    "benchmarks/hidden_state.py",
    "phasetrain/addons/observe/collective_check.py",
    "phasetrain/addons/observe/state_watch.py",  # reads whatever attributes a part has
    "phasetrain/proof/held.py",
}
PROBES = {"hasattr": 2, "getattr": 3, "setattr": 0, "delattr": 0}
"""Function -> number of arguments with which it may ask for an attribute by its literal name."""

MOST_RUNTIME_PROTOCOLS = 12
"""Protocols that `isinstance` may ask for. One attribute is a `getattr` with a default instead."""

MAKES_MUTABLE = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
}
MUTATES = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "remove",
    "discard",
}
MUTATES |= {"sort", "reverse", "appendleft", "popleft"}
DRAWERS = {"utils", "util", "helpers", "misc", "common"}

Rule = Callable[[ast.Module], Iterator[str]]


def probing(tree: ast.Module) -> Iterator[str]:
    """Yield each access to an attribute by a name that a search for it does not find, and each
    attribute whose absence is only noticed by an error.

    What a custom part may have is read by `getattr(x, "name", default)` or `hasattr(x, "name")`.
    """
    for node in _walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in PROBES
            and not _asks_by_literal_name(node, PROBES[node.func.id])
        ):
            yield f"{node.lineno}: {node.func.id}()"
        if isinstance(node, ast.Try) and not any(
            isinstance(inner, ast.Call) for inner in _within(node.body)
        ):
            yield from (
                f"{h.lineno}: except AttributeError"
                for h in node.handlers
                if "AttributeError" in _names(h.type)
            )


def mutable_globals(tree: ast.Module) -> Iterator[str]:
    """Yield module variables that change: containers without a constant's name, changed constants,
    `global`."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and _mutable(node.value)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in _names(target)]
            yield from (
                f"{node.lineno}: {name}"
                for name in names
                if not name.isupper() and name != "__all__"
            )
    for inner in _walk(tree):
        if isinstance(inner, ast.Global):
            yield f"{inner.lineno}: global {', '.join(inner.names)}"
        yield from (
            f"{line}: {name} is changed" for line, name in _changes(inner) if name.isupper()
        )


def swallowed_errors(tree: ast.Module) -> Iterator[str]:
    """Yield handlers of every error that neither raise nor look at what they caught."""
    for node in _walk(tree):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or _broad(node.type)):
            raises = any(isinstance(inner, ast.Raise) for inner in _within(node.body))
            looks = any(
                isinstance(inner, ast.Name) and inner.id == node.name
                for inner in _within(node.body)
            )
            if not raises and not looks:
                yield f"{node.lineno}: swallows every error"
        if (
            isinstance(node, ast.Call)
            and "suppress" in _names(node.func)
            and any(map(_broad, node.args))
        ):
            yield f"{node.lineno}: suppresses every error"


def _asks_by_literal_name(call: ast.Call, arguments: int) -> bool:
    return (
        len(call.args) == arguments
        and isinstance(call.args[1], ast.Constant)
        and isinstance(call.args[1].value, str)
    )


@functools.lru_cache(maxsize=1)
def _walk(tree: ast.Module) -> list[ast.AST]:
    """Walk a module once for all rules that look at it in turn."""
    return list(ast.walk(tree))


def _within(body: list[ast.stmt]) -> Iterator[ast.AST]:
    return (inner for statement in body for inner in ast.walk(statement))


def _names(node: ast.AST | None) -> list[str]:
    if isinstance(node, ast.Tuple | ast.List):
        return [name for item in node.elts for name in _names(item)]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def _broad(node: ast.AST) -> bool:
    return bool({"Exception", "BaseException"} & set(_names(node)))


def _mutable(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return bool(MAKES_MUTABLE & set(_names(node.func)))
    return isinstance(
        node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def _changes(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each plain name whose content a node changes."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATES
    ):
        yield from ((node.lineno, name) for name in _plain(node.func.value))
    if isinstance(node, ast.AugAssign):
        yield from ((node.lineno, name) for name in _plain(node.target))
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                yield from ((node.lineno, name) for name in _plain(target.value))


def _plain(node: ast.AST) -> list[str]:
    return [node.id] if isinstance(node, ast.Name) else []


RULES: tuple[Rule, ...] = (probing, mutable_globals, swallowed_errors)


def broken(path: Path) -> list[str]:
    """Return the places of a file that break a rule."""
    tree, name = ast.parse(path.read_text("utf-8")), path.relative_to(ROOT).as_posix()
    rules = [rule for rule in RULES if rule is not probing or name not in PROBING]
    return [f"{name}:{line}" for rule in rules for line in rule(tree)]


@pytest.mark.addon("observe")
def test_exceptions_exist() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in SOURCES} >= PROBING


def test_no_source_breaks_a_rule() -> None:
    assert [line for path in SOURCES for line in broken(path)] == []


def test_linter_forbids_the_rest() -> None:
    """Prints, wildcard imports and missing docstrings are errors of ruff, without exceptions."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    assert {"T20", "F", "D1"} <= set(settings["select"])
    ignored = set(settings["ignore"])
    for pattern, codes in settings["per-file-ignores"].items():
        ignored |= set(codes) if pattern.startswith("phasetrain") else set()
    ignored = {code for code in ignored if code.startswith(("T20", "F", "D"))}
    assert ignored == {"D105", "D107"}  # methods with underscores
    exempt = re.compile(r"# noqa(?!: [A-Z])|# noqa: .*\b(T20|F403|D10)")
    package = [path for path in SOURCES if path.is_relative_to(ROOT / "phasetrain")]
    assert [path for path in package if exempt.search(path.read_text("utf-8"))] == []


def test_runtime_checkable_protocols_are_few() -> None:
    package = [path for path in SOURCES if path.is_relative_to(ROOT / "phasetrain")]
    protocols = sum(path.read_text("utf-8").count("@runtime_checkable") for path in package)
    assert 0 < protocols <= MOST_RUNTIME_PROTOCOLS


def test_no_module_is_called_utils() -> None:
    named = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if DRAWERS & set(path.with_suffix("").parts)
    ]
    assert named == []


BAD = [
    (probing, "if hasattr(x, name):\n    pass", "1: hasattr()"),
    (probing, "y = getattr(x, name, None)", "1: getattr()"),
    (probing, "y = getattr(x, 'y')", "1: getattr()"),
    (probing, "setattr(x, 'y', 1)", "1: setattr()"),
    (probing, "delattr(x, 'y')", "1: delattr()"),
    (
        probing,
        "try:\n    x.y\nexcept (KeyError, AttributeError):\n    raise",
        "3: except AttributeError",
    ),
    (mutable_globals, "found = []", "1: found"),
    (mutable_globals, "found: dict[str, int] = {}", "1: found"),
    (mutable_globals, "cache = collections.defaultdict(list)", "1: cache"),
    (mutable_globals, "SEEN = set()\ndef see(x):\n    SEEN.add(x)", "3: SEEN is changed"),
    (mutable_globals, "SEEN = {}\ndef see(x):\n    SEEN[x] = 1", "3: SEEN is changed"),
    (
        mutable_globals,
        "COUNT = 0\ndef count():\n    global COUNT\n    COUNT += 1",
        "3: global COUNT",
    ),
    (swallowed_errors, "try:\n    f()\nexcept:\n    pass", "3: swallows every error"),
    (
        swallowed_errors,
        "try:\n    f()\nexcept Exception as error:\n    log()",
        "3: swallows every error",
    ),
    (
        swallowed_errors,
        "with contextlib.suppress(Exception):\n    f()",
        "1: suppresses every error",
    ),
]


@pytest.mark.parametrize(("rule", "source", "line"), BAD)
def test_rule_reports_what_it_forbids(rule: Rule, source: str, line: str) -> None:
    assert line in list(rule(ast.parse(source)))


GOOD = """
LOSSES = Registry("loss", "LOSS")
WORDS = ["a", "b"]
__all__ = ["LOSSES"]
object.__setattr__(plan, "rest", 1)
is_coupled = hasattr(LOSSES, "coupled") and getattr(LOSSES, "coupled", False)
def f(config):
    found = []
    found.append(config.METERS)
    try:
        f(config)
    except Exception as error:
        found.append(error)
    except BaseException:
        raise
    return sorted(found)
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_good_code(rule: Rule) -> None:
    assert list(rule(ast.parse(GOOD))) == []


def test_linter_sees_every_file() -> None:
    """`build` is excluded by default, and is the name of a folder of the package."""
    words = [sys.executable, "-m", "ruff", "check", "--show-files", "phasetrain", "tests"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    seen = {Path(line) for line in done.stdout.splitlines()}
    assert {*(ROOT / "phasetrain").rglob("*.py"), *(ROOT / "tests").rglob("*.py")} - seen == set()
