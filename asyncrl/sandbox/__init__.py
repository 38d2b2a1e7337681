"""Sandboxes for programs that the policy writes: processes with namespaces, sessions, containers, a server.

This package keeps these promises (docs/security.md says on which machines each one holds):

- A program cannot see runs, keys, other processes or the network (`child/namespaces.py`, `child/rights.py`).
- Every process that a program starts ends with the call, or with the session, in which the program runs
  (`child/watching.py`).
- Promise 4 of docs/concepts.md, a failure is never a zero: SandboxError is a fault of the machine. A program's own
  error, timeout or exceeded limit is a result (`sandbox.py`).

Files in reading order: `sandbox.py` runs one program, and `child/` is the code of the processes that confine it.
`session.py` keeps an interpreter between calls. `containers.py` and `fusion.py` are the other kinds of sandbox, and
`sandboxes.py` opens the kind that `actor.sandbox` names.

Test a change of `child/` with `tests/sandbox` as an ordinary user and as root. This file and `child/` import only the
standard library, since each start of a program imports them. A container gets only the text of some files of `child/`.
"""
