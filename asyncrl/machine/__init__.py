"""A process and its machine: files on full disks, ports, GPUs, CPUs, heartbeats, and child processes.

Promise 1 (nothing lost, nothing trained twice) rests on this package when a process dies or hangs. `guard.py` ends the
children of a process that has died, and `activity.py` finds out that a process hangs. `gpu_lock.py` holds locks that
the kernel frees when a process ends, and `owner.py` tests such a lock. `files.py` writes a file atomically.

In reading order:

- `process.py`: names, signals and threads of a role. `activity.py`: its heartbeat. `doing.py`: its phase.
- `child.py` and `guard.py`: children that end with their parent. `identity.py`: the identity of a process, even if its
  pid is used again.
- `files.py`, `shared_folder.py`, `remote_folder.py`, `temporary_folder.py`, `owner.py`: disks.
- `ports.py`, `numa.py`, `gpus.py`, `gpu_use.py`, `gpu_lock.py`, `host_memory.py`: the machine's other resources.
- `blocked_loop.py`, `slow_code.py`, `own_exits.py`: the user's own code that blocks, takes long, or ends the process.
- `long_work.py`, `process_tree.py`: progress of long work, use of the machine. `program.py`: programs with pipes.
  `finishing.py`: work that a cancellation does not interrupt.

Time limits and the texts of log lines may change freely. Promises depend on the order in which locks are taken
(`gpu_lock.py`) and files are written (`files.py`).
"""
