"""What the program's process of a session does: it runs cells one after another, as a notebook does.

A request is a line of JSON with the cell's code, a reply a line that says that the cell is done. A cell that raises is
done, too. Standard library only, and nothing of this package: a container gets the text of this file alone.
"""

import ast
import json
import linecache
import os
import resource
import sys
import traceback
from contextlib import suppress

ROOM = 1 << 16
"""Bytes that are left for what the session adds to the output."""


def reply_to(number: int) -> bytes:
    """The reply when cell `number` is done; before any request comes the reply to 0."""
    return b'{"cell": %d}\n' % number


def serve(requests: int, replies: int) -> None:
    """Run the cells that the file `requests` brings, until it ends."""
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    own = os.getpid()
    sys.modules["__main__"] = module = type(sys)("__main__")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    streams = sys.stdout, sys.stderr
    os.write(replies, reply_to(0))
    with os.fdopen(requests, "rb", closefd=False) as lines:
        for number, line in enumerate(lines, 1):
            run_cell(json.loads(line)["code"], f"<cell {number}>", vars(module))
            make_room()
            for stream in (sys.stdout, sys.stderr, *streams):
                # The cell may have put anything there.
                with suppress(Exception):
                    stream.flush()
            if os.getpid() != own:
                # A process that the cell has forked, and that has come to the cell's end.
                os._exit(0)
            os.write(replies, reply_to(number))


def run_cell(code: str, name: str, names: "dict[str, object]") -> None:
    """Run the cell, and print the value of its last expression, or what it raised."""
    # Tracebacks show lines of cells.
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    try:
        tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST)  # type: ignore[assignment]
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            exec(compile(tree, name, "exec"), names)
        if last is not None:
            # Compiled as what is typed at a prompt, so that it prints its value.
            exec(compile(ast.Interactive([last]), name, "single"), names)
    except BaseException as error:  # noqa: BLE001 - printed, as a notebook does
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != name:
            frames = frames.tb_next
        make_room()
        with suppress(Exception):
            sys.stdout.flush()
        traceback.print_exception(type(error), error, frames)


def make_room() -> None:
    """Where the output has its largest size, drop its end: the session has something to add, and streams hold what
    they could not write, which the next cell would print."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and os.fstat(1).st_size > limit - ROOM // 2:
        os.ftruncate(1, limit - ROOM)
