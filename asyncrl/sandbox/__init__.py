"""Sandboxes for programs that the policy writes: processes with namespaces, sessions, containers, a server.

Promises that this room keeps (docs/security.md says how far they hold on which machine):

- A program sees no run, no keys, no other process and no network (`child/namespaces.py`, `child/rights.py`).
- Every process that a program starts ends with its call, or with its session (`child/watching.py`).
- 4 of docs/concepts.md, a failure is never a zero: SandboxError is a fault of the machine. A program's own error,
  timeout or exceeded limit is a result (`sandbox.py`).

Files in reading order: `sandbox.py` runs one program, `child/` is the code of the processes that confine it.
`session.py` keeps an interpreter between calls. `containers.py` and `fusion.py` are the other kinds of sandbox, and
`sandboxes.py` opens the one that `actor.sandbox` names.

Free to change: how containers and servers are called. A change of `child/` needs `tests/sandbox` as an ordinary user
and as root. This file and `child/` import the standard library alone, since each start of a program imports them. A
container gets only the text of some files of `child/`.
"""
