"""The Python program in an answer.

The program is the last fenced block that is marked as Python and is valid; if none is valid, the last that is marked.
If no block is marked, it is the last block that can be a program, so that a sample output after it does not count.
Without any block it is the whole answer. Earlier blocks that define names used by the program are put before it.
"""

from __future__ import annotations

import ast
import builtins
import textwrap
from dataclasses import dataclass

from asyncrl.scoring.rules.text import fenced_blocks

_PYTHON = frozenset({"python", "py", "python3", "py3", "python2", "ipython", "sage"})
_TRANSCRIPTS = frozenset({"pycon", "output", "text", "console", "json", "bash", "sh", "shell", "txt", "plaintext"})
_DATA = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.Compare)


def program(answer: str) -> str:
    """The program's source, which may be invalid Python."""
    blocks = list(fenced_blocks(answer))
    if not blocks:
        return answer
    marked = [_read(each.body) for each in blocks if each.language in _PYTHON]
    others = [_read(each.body) for each in blocks if each.language not in _TRANSCRIPTS]
    candidates = marked or [each for each in others if each.is_program] or [_read(blocks[-1].body)]
    chosen = max((index for index, each in enumerate(candidates) if each.is_valid), default=len(candidates) - 1)
    return _with_needs(candidates[: chosen + 1])


@dataclass(frozen=True, slots=True)
class _Source:
    text: str
    is_valid: bool = False
    is_program: bool = False
    defines: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()


def _read(body: str) -> _Source:
    text = textwrap.dedent(body)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Source(text)
    bound, used = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
    program = any(not isinstance(each, ast.AnnAssign) and not _is_data(each) for each in tree.body)
    return _Source(text, True, program, frozenset(bound), frozenset(used - bound - set(dir(builtins))))


def _is_data(statement: ast.stmt) -> bool:
    """True if the statement looks like the output of a program."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, _DATA)


def _with_needs(sources: list[_Source]) -> str:
    """The last source, preceded by the earlier sources that define names it uses."""
    *earlier, last = sources
    parts, needs = [last.text], set(last.needs)
    for source in reversed(earlier):
        if source.is_valid and source.defines & needs:
            parts.append(source.text)
            needs = (needs - source.defines) | source.needs
    return "\n\n".join(reversed(parts))
