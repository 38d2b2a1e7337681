"""Sandboxes for programs that the policy writes. A program runs in processes with namespaces, in a container, or on a
server.

This package keeps these promises (docs/security.md says on which machines each one holds):

- A program cannot see runs, keys, other processes or the network (`child/namespaces.py`, `child/rights.py`).
- Every process that a program starts ends with the call, or with the session, in which the program runs
  (`child/watching.py`).
- Promise 4 of docs/concepts.md, a failure is never a zero: if the machine is at fault, SandboxError is raised. If a
  program fails, takes too long or exceeds a limit, this is its result (`sandbox.py`).

Files in reading order: `sandbox.py` runs one program, and `child/` is the code of the processes that confine it.
`session.py` keeps an interpreter between calls. `containers.py` and `fusion.py` are the other kinds of sandbox, and
`sandboxes.py` opens the kind that `actor.sandbox` names.

Test a change of `child/` with `tests/sandbox` as an ordinary user and as root. This file and `child/` import only the
standard library, since each start of a program imports them. A container has no files of asyncrl: it gets only the text
of some files of `child/`.
"""
