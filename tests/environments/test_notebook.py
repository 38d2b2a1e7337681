"""asyncrl in cells of a real kernel of Jupyter, whose own thread has an event loop that runs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.compose import parsed
from tests.chaos.world import World
from tests.end_to_end.support import ROOT

KERNEL = Path(__file__).with_name("kernel.py")


def test_cells_train_evaluate_read_tables_and_are_interrupted_cleanly(
    python_with: Callable[[str], Path], tmp_path: Path
) -> None:
    python, world = python_with("notebook"), World.make(tmp_path)
    single = ("cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1", "replay.filter.zero_variance=false")
    values = {word.key_or_group: word.value() for word in map(parsed, (*world.overrides(1), *single))}
    values |= {"run.dir": str(tmp_path), "learner.eval_every": 0, "learner.export": False}
    values |= {"network.replay_port": 0, "network.weights_port": 0}
    plan = tmp_path / "long" / "metrics" / "learner.jsonl"
    cells = [
        {"code": f"import asyncrl\nvalues = {values!r}"},
        {"code": "asyncrl.train({**values, 'learner.lr': 0})"},
        {"code": "run = asyncrl.train(values, 'run.name=short', 'learner.steps=2')\nprint(run)"},
        {"code": "print(run.metrics()['step'].to_pylist(), run.episodes({'trained'}).num_rows > 0)"},
        {"code": "measured = asyncrl.evaluate(run.folder, data=values['data.train'], n=2)\nprint(measured)"},
        {"code": "row = measured.table().to_pylist()[-1]\nprint(row['scored'] == measured.episodes().num_rows > 0)"},
        {"code": "asyncrl.train(values, 'run.name=long', 'learner.steps=100000')", "interrupt": str(plan)},
        {"code": f"run = asyncrl.Run({str(tmp_path / 'long')!r})\nprint(run.result, run.is_running)"},
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [python, KERNEL],
        input="".join(json.dumps(cell) + "\n" for cell in cells),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0] == {"printed": "", "error": ""}
    assert answers[1]["error"].startswith("ConfigError: learner.lr=0.0: it must be a number in (0, inf)")
    assert answers[2] == {"printed": f"Run('{tmp_path}/short': done)\n", "error": ""}
    assert answers[3] == {"printed": "[0, 1] True\n", "error": ""}
    assert answers[4]["printed"].startswith(f"Evaluation('{tmp_path}/short/evaluations/")
    assert answers[5] == {"printed": "True\n", "error": ""}
    assert answers[6]["error"].startswith("KeyboardInterrupt")
    assert answers[7] == {"printed": "stopped False\n", "error": ""}
