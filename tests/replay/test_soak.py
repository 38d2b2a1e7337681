"""Memory of a replay that lives long; `python -m benchmarks.soak` is the same with a million trajectories."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import GENEROUS_S

pytestmark = pytest.mark.slow

RUN = """
import sys
from pathlib import Path
from benchmarks.soak import Soak, samples
folder = Path(sys.argv[1])
soak = Soak(folder)
for row in samples(soak, folder, 10_000, 2_500):
    print(row["anonymous_mb"], row["store_mb"])
audit = soak.audit()
assert audit["states"] == {"trained": audit["planned"]} and not audit["lost"], audit
"""


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
def test_memory_stays_flat_and_the_store_small_over_ten_thousand_trajectories(tmp_path: Path) -> None:
    # A process of its own, so that no other test's memory counts.
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, timeout=GENEROUS_S
    )
    assert done.returncode == 0, done.stderr
    samples = [[float(value) for value in line.split()] for line in done.stdout.splitlines()]
    assert samples[-1][0] - samples[0][0] < 3.0
    assert samples[-1][1] < 10_000 * 300 / 1e6
