"""Reads files that strangers may have written. A file must be small, also after its YAML aliases are expanded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

MAX_BYTES = 256 << 10
MAX_VALUES = 20_000
SHORT = 16
"""A long text counts as one more value for each 16 characters."""


def read_small(path: Path) -> str:
    """The text of a file. Raises ValueError: it is too large or not UTF-8. Raises OSError: it cannot be read."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return content.decode()


def read_yaml(path: Path) -> Any:
    """The values of a file. References such as `${a.b}` stay text.

    Raises the errors in `config.group_files.FAILURES`.
    """
    return OmegaConf.to_container(read_nodes(path), resolve=False)


def read_nodes(path: Path) -> DictConfig | ListConfig:
    """The content of a file. A reference in it is resolved only when it is used. Raises: see `read_yaml`."""
    text = read_small(path)
    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    if tree is not None and _count(tree, {}) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values after its aliases are expanded")
    return OmegaConf.load(io.StringIO(text))


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values of a node after its aliases are expanded. Raises ValueError: the node contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value) // SHORT
    if (before := known.get(id(node))) is not None:
        if not before:
            raise ValueError("a value contains itself")
        return before
    known[id(node)] = 0
    inner = node.value if isinstance(node, yaml.SequenceNode) else [each for pair in node.value for each in pair]
    known[id(node)] = 1 + sum(_count(each, known) for each in inner)
    return known[id(node)]
