"""The learner: fetches planned batches, trains them, publishes the weights, and saves checkpoints.

It keeps three of the promises:

- The learner's math is exact: any split of a batch into passes and ranks gives the same update (`trainer.py`, with
  `batch/` for the passes and their counts, and `ranks/ranks.py` for the sums).
- Same batch after a crash: a step depends on its recorded plan, the weights and the seed alone (`loop.py`), and the
  checkpoints give the weights back (`checkpoint/`).
- Bounded age, on its side: `publishing.py` counts the versions, and `reporting.py` logs the lag of each trajectory.

Read in this order:

1. `loop.py`: the story of a step, from its plan to its metrics.
2. `trainer.py`: the forward passes, losses and updates of a step, and `step_result.py` for its result.
3. `publishing.py`, `evaluating.py`, `checkpointing.py`, `reporting.py`, `stopping.py`: the parts of the loop.
4. `run.py` and `models.py`: the opening of all this, from the settings in `settings.py`.
5. `from_config.py`: the only file here that reads the whole configuration.

`ranks/`, `batch/`, `model/` and `checkpoint/` import only each other, in this order. Metrics, logs and the layout of
these files may change freely. The order of collectives, and the content of checkpoints, need care: all ranks must call
alike, and a run must resume.
"""
