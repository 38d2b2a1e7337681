"""Formats some attempts of a finished evaluation with their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from asyncrl.data.from_config import run_tasks
from asyncrl.ids import held_out_row
from asyncrl.replay.store.records import TrajectoryState
from asyncrl.runs.from_config import read_config
from asyncrl.runs.run import Run


def samples(folder: Path, count: int) -> Iterator[str]:
    """The first `count` scored attempts of each data source as text, from the evaluation in `folder`."""
    if not count:
        return
    from asyncrl.modelling.tokenizer import open_tokenizer
    from asyncrl.scoring.samples import described

    config = read_config(folder)
    assert config.data.eval is not None
    tasks = run_tasks(config).usable(config.data.eval, held_out=True)
    tokenizer = open_tokenizer(config.model)
    shown: Counter[str] = Counter()
    with Run(folder).stored() as stored:
        for name, record in stored.records():
            if record.state is not TrajectoryState.EVALUATED or shown[record.data_source] == count:
                continue
            trajectory, labels = stored.trajectory(name), stored.labels(name)
            if trajectory is not None and labels is not None:
                shown[record.data_source] += 1
                yield described(tasks[held_out_row(record.group)], trajectory, labels, tokenizer)
