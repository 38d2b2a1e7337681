"""Groups of processes do not outlive the process that started them, however that and their guard end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.helpers import has_ended, until

ACTOR = """
import os, subprocess, time
from asyncrl.machine.group_guard import GroupGuard
guard, groups = GroupGuard(), []
for _ in range(2):
    groups.append(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True).pid)
    guard.watch(groups[-1])
    if len(groups) == 1:
        os.kill(guard._program.pid, 9)
        guard._program.wait()
print(*groups, flush=True)
time.sleep(600)
"""


def test_groups_end_with_their_process_also_if_their_guard_was_killed_before():
    actor = subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    groups = list(map(int, actor.stdout.readline().split()))
    actor.kill()
    actor.communicate()
    try:
        assert len(groups) == 2
        for group in groups:
            until(lambda group=group: has_ended(group))
    finally:
        for group in groups:
            if not has_ended(group):
                os.killpg(group, signal.SIGKILL)
