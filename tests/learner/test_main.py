from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from asyncrl.data.writing import write_tasks
from tests.helpers import make_task


def test_torchrun_is_refused_with_what_to_do_instead(tmp_path: Path):
    tasks = tmp_path / "tasks.parquet"
    write_tasks(tasks, [make_task()])
    command = [sys.executable, "-m", "asyncrl.learner", "model.path=none", f"data.train={tasks}", f"run.dir={tmp_path}"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "cluster.learner_ranks" in done.stderr
