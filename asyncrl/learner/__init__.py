"""The learner: fetches planned batches, trains them, publishes the weights, and saves checkpoints.

This package keeps three of the promises in docs/concepts.md:

- The learner's math is exact: a batch gives the same update however it is split into passes and over ranks.
  `trainer.py` has the math, `batch/` makes the passes and counts their tokens, and `ranks/ranks.py` sums over ranks.
- Same batch after a crash: a step depends only on its recorded plan, the weights and the seed (`loop.py`), and
  checkpoints restore the weights (`checkpoint/`).
- Nothing trained twice: `checkpointing.py` tells the replay which steps a complete checkpoint includes. The replay then
  counts the episodes of these steps as trained.

Files in reading order:

- `loop.py`: the story of a step, from its plan to its metrics.
- `trainer.py`: the forward passes, losses and updates of a step, with its result in `step_result.py`.
- `plans.py`, `publishing.py`, `evaluating.py`, `checkpointing.py`, `reporting.py`, `stopping.py`: parts of the loop.
- `run.py` and `models.py`: load the models and build the loop from the settings in `settings.py`.
- `from_config.py`: makes these settings from the whole configuration. Only it, `__main__.py` and the `from_config.py`
  of `batch/` and `ranks/` read the whole configuration.

Supporting files:

- `demonstrations.py`, `imitating.py`: the demonstrations of a step, and their gradient.
- `memory.py`, `colocation.py`, `compiling.py`: models in the memory of a GPU, GPUs that engines use in turns with the
  learner, and compiled layers.
- `step_metrics.py`, `profiling.py`: the metrics of a step, and records of chosen steps.
- `stop_request.py`: the request to stop, for all ranks.

The folders are `ranks/`, `batch/`, `model/` and `checkpoint/`: each imports only from the folders before it. You may
change metrics and logs freely. All ranks must call collectives in the same order.
"""
