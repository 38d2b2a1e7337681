"""Runs the cells of a session one after another, as a notebook does, in the program's process.

A request is a line of JSON with the cell's code. When the cell is done or has raised an exception, the reply is a line
with the cell's number. This file imports only the standard library, because a container gets only its text.
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
"""The output is cut when fewer than ROOM / 2 bytes are left before its limit. After the cut, ROOM bytes are left."""


def reply_to(number: int) -> bytes:
    """Return the reply that cell `number` is done. The reply for number 0 says that the session can run cells."""
    return b'{"cell": %d}\n' % number


def serve(requests: int, replies: int) -> None:
    """Run the cells in the file `requests`, until it ends."""
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
                # The cell may have replaced the stream by any object.
                with suppress(Exception):
                    stream.flush()
            if os.getpid() != own:
                # This process is a fork that the cell made. It has reached the end of the cell, and must not run the
                # next one.
                os._exit(0)
            os.write(replies, reply_to(number))


def run_cell(code: str, name: str, names: "dict[str, object]") -> None:
    """Run the cell, and print the value of its last expression, or its exception."""
    # The cell's lines are put into `linecache`, from which tracebacks read them.
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    try:
        tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST)  # type: ignore[assignment]
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            exec(compile(tree, name, "exec"), names)
        if last is not None:
            # The last expression is compiled as interactive input, so that Python prints its value.
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
    """Drop the end of the output if the output has almost reached its limit."""
    # There are two reasons for this. The session itself must be able to print. And text that a stream could not write
    # for lack of room stays in the stream, so the next cell would print it.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and os.fstat(1).st_size > limit - ROOM // 2:
        os.ftruncate(1, limit - ROOM)
