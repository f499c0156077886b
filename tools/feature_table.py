"""Features and the tests that prove them, read from the marks of the tests.

The mark of the main test of a feature has its text, and the keys or the API:

    @pytest.mark.feature("optimizer.muon", "Muon for hidden matrices", "`OPTIMIZER.name=muon`")

Further tests have the name alone, `@pytest.mark.feature("optimizer.muon")`. Names that are numbers,
such as `14`, `29-33` or `B1`, are rows of the first table.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_MARK = "pytest.mark.feature"
_NUMBER = re.compile(r"(B?)(\d+)(-\d+)?")


@dataclass
class Feature:
    """A feature.

    Attributes:
        name: number or name.
        text: what the feature is.
        keys: keys of the config or names of the API, in Markdown.
        main: the test whose mark has the text.
        others: further tests.
    """

    name: str
    text: str = ""
    keys: str = ""
    main: str = ""
    others: list[str] = field(default_factory=list)

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Cells of the row: name, text, keys, tests."""
        tests = ", ".join(f"`{test}`" for test in (self.main, *self.others))
        return self.name, self.text, self.keys, tests

    @property
    def is_numbered(self) -> bool:
        """Whether the feature is a row of the first table."""
        return _NUMBER.fullmatch(self.name) is not None


def list_features(root: Path) -> list[Feature]:
    """Return the features of a tree in the order of the page: numbers first, then names.

    Raises:
        ValueError: a feature has no text or two, or a mark is not on a test function.
    """
    features: dict[str, Feature] = {}
    problems = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        source = path.read_text("utf-8")
        if "mark.feature(" not in source:
            continue
        file = path.relative_to(root).as_posix()
        module = ast.parse(source)
        marks = list(_list_marks(module))
        for test, name, text, keys in marks:
            feature = features.setdefault(name, Feature(name))
            if not text:
                feature.others.append(f"{file}::{test}")
            elif feature.main:
                problems.append(f"feature {name}: {feature.main} and {file}::{test} have a text")
            else:
                feature.main, feature.text, feature.keys = f"{file}::{test}", text, keys
        if len(marks) != sum(map(_is_mark, ast.walk(module))):
            problems.append(f"{file}: a mark `feature` is not on a test function")
    problems += [
        f"feature {feature.name}: no mark has a text, as {feature.others[0]} has none"
        for feature in features.values()
        if not feature.main
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return sorted(features.values(), key=_sort_key)


def _sort_key(feature: Feature) -> tuple[int, int, str]:
    number = _NUMBER.fullmatch(feature.name)
    if number is None:
        return 2, 0, feature.name
    return int(bool(number[1])), int(number[2]), ""


def list_test_functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the tests of a file, those of a class as `Class::test`."""
    # Read from the source: pytest would import every file, which takes minutes.
    for node in module.body:
        members = [(node, "")]
        if isinstance(node, ast.ClassDef):
            members = [(member, f"{node.name}::") for member in node.body]
        for member, prefix in members:
            if isinstance(member, ast.FunctionDef) and member.name.startswith("test"):
                yield f"{prefix}{member.name}", member


def _list_marks(module: ast.Module) -> Iterator[tuple[str, str, str, str]]:
    """Yield test, name, text and keys of each mark of a test function."""
    for test, function in list_test_functions(module):
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and _is_mark(decorator.func):
                arguments = [ast.literal_eval(argument) for argument in decorator.args]
                name, text, keys = (*arguments, "", "")[:3]
                yield test, name, text, keys


def _is_mark(node: ast.AST) -> bool:
    # The attribute first: this is asked of each node of each file.
    return isinstance(node, ast.Attribute) and node.attr == "feature" and ast.unparse(node) == _MARK
