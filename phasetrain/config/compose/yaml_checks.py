"""Rejects YAML that is read as something else than what it looks like, or that never ends."""

import yaml

_TAG = "tag:yaml.org,2002:"
_MOST_LEVELS = 64
_MOST_VALUES = 100_000


def check_yaml(text: str) -> None:
    """Reject values that contain themselves, too many or too deeply nested values, keys without a
    name, and numbers with another base than their digits suggest.

    Raises:
        ValueError: names the line.
        yaml.YAMLError: the text is not valid YAML.
    """
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    # The parser calls itself for each level.
    except RecursionError:
        raise ValueError(f"its values are nested more than {_MOST_LEVELS} levels deep") from None
    if root is not None:
        _count_values(root, {}, 1)


def _count_values(node: yaml.Node, counts: dict[int, int], level: int) -> int:
    """Return how many values a node has with all aliases in it resolved.

    Args:
        node: the node.
        counts: id of a node -> its count; 0 while it is being counted. An alias is the same node.
        level: number of nodes around it.

    Raises:
        ValueError: see `check_yaml`.
    """
    where = f"line {node.start_mark.line + 1}"
    if counts.get(id(node), 1) == 0:
        raise ValueError(f"{where}: a value contains an alias (*) to itself; remove it")
    if level > _MOST_LEVELS:
        raise ValueError(f"{where}: values are nested more than {_MOST_LEVELS} levels deep")
    if isinstance(node, yaml.ScalarNode):
        _check_number(node, where)
        return 1
    if id(node) not in counts:
        counts[id(node)] = 0
        children = node.value
        if isinstance(node, yaml.MappingNode):
            for name, _ in children:
                if name.tag == f"{_TAG}null":
                    raise ValueError(
                        f"line {name.start_mark.line + 1}: a key is null "
                        f"({name.value!r}); write its name in quotes, or remove the line"
                    )
            children = [child for pair in children for child in pair]
        counts[id(node)] = 1 + sum(_count_values(child, counts, level + 1) for child in children)
    if counts[id(node)] > _MOST_VALUES:
        raise ValueError(
            f"{where}: more than {_MOST_VALUES:,} values, with aliases (*) resolved; write large "
            "tables into a file of their own, which a custom part reads"
        )
    return counts[id(node)]


def _check_number(node: yaml.ScalarNode, where: str) -> None:
    """Reject octal numbers such as 010, and numbers to the base of 60 such as 1:30."""
    digits = node.value.lstrip("+-")
    is_number = node.tag in (f"{_TAG}int", f"{_TAG}float")
    if is_number and (":" in digits or (digits[:1] == "0" and digits[1:2].isdigit())):
        if node.tag == f"{_TAG}float" and ":" not in digits:
            return  # 00.5 is one half
        value = yaml.safe_load(node.value)
        raise ValueError(
            f"{where}: YAML reads {node.value} as {value}; write {value}, or the text in quotes"
        )
