"""How code uses attributes and global variables: which it reads, and which it updates from their
earlier value."""

import ast
import linecache
from collections.abc import Iterable
from types import ModuleType

SKIPPED = frozenset(
    {"__init__", "state_dict", "load_state_dict", "get_extra_state", "set_extra_state", "__repr__"}
)
"""Functions that no step calls."""

LATE = frozenset(
    f"on_{event}"
    for event in ("forward", "backward", "skip", "update", "step", "metrics", "phase_end", "save")
)
"""Events of hooks that come after the parts have computed."""

GROWING = frozenset({"append", "appendleft", "extend", "add", "update", "insert", "setdefault"})
"""Methods that change a container; as a statement they do not read it."""


class Uses(ast.NodeVisitor):
    """The names that functions read and write: `.NAME` for attributes, `NAME` for variables.

    Only classes and functions of these names count, and others that their code mentions, directly
    or not. A script that reads a hook after the run does not use it in a step.

    Args:
        modules: modules with source.
        names: names of classes and functions.

    Attributes:
        read: names whose value a function may have from an earlier call.
        written: names that a function assigns.
        grown: names that a function updates from their earlier value, or that only hooks assign
            after a step, as an attribute of a part, so that the next step reads it.
        kept: names that a function assigns in some calls only.
        late: attributes that only hooks assign, after a step.
        entries: names of which a function assigns an entry with a constant key.
        is_complete: whether the source of all modules was found.
    """

    def __init__(self, modules: Iterable[ModuleType], names: Iterable[str]) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.grown: set[str] = set()
        self.kept: set[str] = set()
        self.entries: set[str] = set()
        self._aliases: dict[str, str] = {}
        self.is_complete = True
        self._fresh: set[str] | None = None
        self._read_here: set[str] = set()
        self._is_conditional = False
        self._cached: set[str] = set()
        self._function = ""
        self.late: set[str] = set()
        self._early: set[str] = set()
        self._read_early: set[str] = set()
        definitions: dict[str, list[ast.stmt]] = {}
        for module in modules:
            text = "".join(linecache.getlines(getattr(module, "__file__", None) or ""))
            self.is_complete &= bool(text)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    definitions.setdefault(node.name, []).append(node)
        left = set(names)
        while left:
            for node in definitions.pop(left.pop(), ()):
                self.visit(node)
                left |= {_name(part).removeprefix(".") for part in ast.walk(node)}
                left &= definitions.keys()
        self.late -= self._early
        self.grown |= self.late & self._read_early

    def may_matter(self, name: str, *, in_place: bool) -> bool:
        """Return whether a changed value may affect later steps.

        Args:
            name: see the class.
            in_place: the object has changed, and no other one was assigned.
        """
        if not self.is_complete or name == ".":
            return True
        is_rewritten = name in self.written - self.grown - self.kept
        return name in self.read and (in_place or not is_rewritten)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Read a function; the values that it has assigned itself are fresh from there on."""
        if node.name in SKIPPED:
            return
        outer = self._fresh, self._read_here, self._is_conditional, self._function, self._aliases
        self._fresh, self._read_here, self._is_conditional = set(), set(), False
        self._function, self._aliases = self._function or _find_event(node), {}
        self.generic_visit(node)
        self._fresh, self._read_here, self._is_conditional, self._function, self._aliases = outer

    def visit(self, node: ast.AST) -> None:
        """Visit a node; names that a branch assigns are assigned in some calls only."""
        outer = self._is_conditional, self._cached
        fresh = None if self._fresh is None else set(self._fresh)
        is_branch = isinstance(node, ast.If | ast.While | ast.Try | ast.Match)
        self._is_conditional |= is_branch
        if isinstance(node, ast.If):
            self._cached = self._cached | _list_absent(node.test)
        super().visit(node)
        if is_branch:
            self._fresh = fresh  # what the branch has assigned is fresh within it
        self._is_conditional, self._cached = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note the names that are assigned."""
        self.visit(node.value)
        for target in node.targets:
            self._write(target)
            if isinstance(target, ast.Name):  # a container may be changed by a local name
                self._aliases.pop(target.id, None)
                if isinstance(node.value, ast.Attribute):
                    self._aliases[target.id] = _name(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Note the name that is updated; that alone does not read it."""
        self.visit(node.value)
        self._grow(node.target)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Note a call that changes a container or tensor."""
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            method = call.func.attr
            if method in GROWING or (method.endswith("_") and not method.endswith("__")):
                self._grow(call.func.value)
                for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                    self.visit(argument)
                return
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note an attribute that is read."""
        self._note_read(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Note a variable that is read."""
        self._note_read(node)

    def _note_read(self, node: ast.AST) -> None:
        name = _name(node)
        if self._fresh is not None and name not in self._fresh:
            self.read.add(name)
            self._read_here.add(name)
            if not self._function.startswith("on_"):
                self._read_early.add(name)

    def _write(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._write(item)
            return
        if isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant):
            self._grow(target)
            return
        is_entry = isinstance(target, ast.Subscript)
        while isinstance(target, ast.Subscript):
            target = target.value
        if is_entry:
            self.entries.add(self._aliases.get(_name(target), _name(target)))
        if isinstance(target, ast.Attribute):
            self.visit(target.value)
            if self._function not in LATE:
                self._early.add(_name(target))
            elif _name(target.value) != "self":
                self.late.add(_name(target))
        if self._fresh is not None:
            self._note_write(_name(target), self._fresh, is_entry=is_entry)

    def _note_write(self, name: str, fresh: set[str], *, is_entry: bool) -> None:
        self.written.add(name)
        if name in self._cached:
            return
        if name in self._read_here:
            self.grown.add(name)
            return
        if self._is_conditional:
            self.kept.add(name)
        if not is_entry:
            fresh.add(name)

    def _grow(self, target: ast.expr) -> None:
        while isinstance(target, ast.Subscript):
            self.visit(target.slice)
            target = target.value
        name = self._aliases.get(_name(target), _name(target))
        if not name:
            self.visit(target)
        elif self._fresh is not None and name not in self._fresh:
            self.written.add(name)
            self.grown.add(name)
        if isinstance(target, ast.Attribute):
            self.visit(target.value)


def _find_event(node: ast.FunctionDef) -> str:
    """Return the name of a function, or of the event that `@on` makes it a hook for."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and _name(call.func) in ("on", ".on") and call.args:
            return f"on_{getattr(call.args[0], 'value', '')}"
    return node.name


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _list_absent(test: ast.expr) -> set[str]:
    """Return the names that a condition asks for, so that a branch fills a cache: `x is None`, or
    `not x`."""
    names = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            return set()
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is):
            names.add(_name(node.left))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            names.add(_name(node.operand))
    return names
