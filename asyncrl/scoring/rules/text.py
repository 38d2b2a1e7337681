"""What several rules read out of an answer."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)


def last_block(answer: str) -> str:
    """The contents of the last fenced block, or the whole answer where there is none."""
    blocks = _BLOCK.findall(answer)
    return str(blocks[-1]) if blocks else answer
