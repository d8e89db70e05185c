"""Reads YAML and refuses what a matrix of trials never needs: doubled keys, and aliases that expand without bound."""

from typing import Any

import yaml

MOST_VALUES = 1_000_000
"""More values than any matrix has. Eight levels of aliases, each used nine times, stand for 43 million."""


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document; raise a YAMLError that names the line if it is refused."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many values the node has once all aliases in it are expanded; `sizes` has those of earlier nodes."""
    if id(node) in sizes:
        if sizes[id(node)] == 0:  # its children are being counted
            raise _refusal("an alias that contains itself", node)
        return sizes[id(node)]
    sizes[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_check(child, sizes) for child in children)
    if size > MOST_VALUES:
        raise _refusal(f"aliases that stand for more than {MOST_VALUES:,} values", node)
    sizes[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    seen: dict[tuple[str, str], yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        first = seen.setdefault((key.tag, key.value), key)
        if first is not key:
            raise _refusal(
                f"the key {key.value!r} is given twice, first in line {first.start_mark.line + 1} and again", key
            )


def _refusal(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
