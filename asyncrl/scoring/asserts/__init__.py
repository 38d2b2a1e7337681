"""Judging a program by tests with asserts: the tests run in one process, the program in another that never sees them.

Standard library only, for both run in the sandbox. What passes between them is data (values.py): the program side
(program.py) calls what the judge (judge.py) asks for, so that the tests compare values and never the program's objects.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parents[3]


def importing(side: str) -> str:
    """Python that imports the `main` of a side in a process that is isolated from the caller's paths."""
    return f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {__name__}.{side} import main; del sys.path[0]"
