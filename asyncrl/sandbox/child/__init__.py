"""The process that `sandbox.run` starts: it confines a program, runs it, and ends every process that it started.

There are three processes, each a fork of the one before. The launcher enters the namespaces. The watcher is their
first process: it builds the root folder and waits until the program or the caller ends. When the watcher ends, the
kernel ends all processes of the namespaces.

The program has no rights over the other two processes. Without namespaces the launcher watches: orphans of the program
become the launcher's children, and it kills them.

Every call starts these processes, so they import little: the standard library alone, without pathlib and typing. For a
session, `server` forks the launcher, and the program's process runs `cells`.
"""
