"""The process that `sandbox.run` starts. It confines a program, runs it, and kills every process that is left when the
program ends.

There are three processes, each a fork of the one before:

- The launcher enters the namespaces.
- The watcher is the first process of the namespaces. It builds the root folder and waits until the program or the
  caller ends. When the watcher ends, the kernel ends all processes of the namespaces.
- The third process becomes the program, which has no rights over the other two.

Without namespaces the launcher is also the watcher. If a process of the program loses its parent, it becomes a child of
the launcher, which kills it.

Every call starts these processes, so they import only small parts of the standard library, without pathlib and typing.
In a session, which runs one cell of code after another, `server.py` forks the launcher, and the program's process runs
`cells.py`. `pausing.py` stops a session between two cells.

`main.py` is the launcher, which reads its options in `options.py`. `container.py` runs programs inside a container, in
which none of the processes above exists. It may import more. `system.py` calls the C library.
"""
