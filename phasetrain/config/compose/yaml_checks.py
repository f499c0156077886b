"""Rejects ambiguous and endless YAML before it is read."""

import re

import yaml

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OTHER_BASE = re.compile(r"[+-]?0\d[\d_]*|.*:.*")
_MOST_VALUES = 100_000


def check_yaml(text: str) -> None:
    """Reject keys that are null, octal numbers such as 010, numbers to the base of 60 such as 1:30,
    and more values than a config can have.

    Raises:
        ValueError: names the line.
        RecursionError: a value contains itself, or there are too many levels.
        yaml.YAMLError: the text is not valid YAML.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    if root is not None:
        _count_values(root, {})


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Check a node, and return how many values it has with aliases resolved.

    Args:
        node: the node.
        counts: id of a node -> its count; an alias is the same node.
    """
    if id(node) in counts:
        return counts[id(node)]
    where = f"line {node.start_mark.line + 1}"
    children = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        for name, _ in children:
            if name.tag == "tag:yaml.org,2002:null":
                raise ValueError(
                    f"line {name.start_mark.line + 1}: a key is null; quote it, or remove the line"
                )
        children = [child for pair in children for child in pair]
    elif node.tag in _NUMBERS and _OTHER_BASE.fullmatch(node.value):
        value = yaml.safe_load(node.value)
        raise ValueError(
            f"{where}: YAML reads {node.value} as {value}; write {value}, or quote the text"
        )
    count = 1 + sum(_count_values(child, counts) for child in children)
    if count > _MOST_VALUES:
        raise ValueError(
            f"{where}: more than {_MOST_VALUES:,} values, with aliases (*) resolved; write large "
            "tables into a file that a custom part reads"
        )
    counts[id(node)] = count
    return count
