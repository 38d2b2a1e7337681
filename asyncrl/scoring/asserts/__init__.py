"""Judging a program by tests with asserts: the tests run in one sandbox, the program in another that never sees them.

What passes between them is data (values.py): the program side (program.py) calls what the judge (judge.py) asks for, so
that the tests compare values and never the program's objects. The judge believes nothing that the program side says: an
answer can only be data, a handle to an object that stays there, or an exception. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parents[3]


def script(side: str, *arguments: object) -> str:
    """Python that calls the `main` of a side, in a sandbox, where asyncrl is not on the path."""
    path = f"sys.path.insert(0, {str(_ROOT)!r})"
    return f"import sys; {path}; from {__name__}.{side} import main; del sys.path[0]; main(*{arguments!r})"
