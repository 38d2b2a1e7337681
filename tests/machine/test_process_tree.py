from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from asyncrl.machine.process_tree import CHILDREN_S, ProcessTree

pytestmark = pytest.mark.slow

BUSY = "import os, sys; kept = bytearray(30 << 20); sum(range(3_000_000)); print('done', flush=True); sys.stdin.read()"


def test_a_process_counts_its_children_while_they_run_and_after_their_end() -> None:
    gc.collect()  # What earlier tests have left is not freed meanwhile.
    now = 0.0
    tree = ProcessTree(clock=lambda: now)
    before = tree.read()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        assert tree.read().resident < before.resident + (30 << 20), "children are looked for now and then"
        now = CHILDREN_S
        during = tree.read()
        assert during.resident > before.resident + (30 << 20)
        assert during.cpu_s > before.cpu_s
    after = tree.read()
    # The system counts hundredths; what is added in another order differs by less.
    assert round(after.cpu_s, 2) >= round(during.cpu_s, 2)
    assert after.resident < during.resident - (20 << 20)
