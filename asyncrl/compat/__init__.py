"""Data types and classes of other trainers, so that code written for them works here.

verl/ has verl's batch type, trajectories in its layout, reward managers, interactions, the translation of its
configurations (configuration/), and its single controller: one program that calls the workers (controller/). trl/
translates configurations of TRL. docs/verl.md and docs/trl.md list what asyncrl does in another way.

No other package imports this one. Some options need a class or a program of this package; `config/extensions.py` maps
these options to its name. A run without such an option loads nothing from here. This package keeps none of the promises
in docs/concepts.md itself: verl's workers run on the learner, the engine and the scorers, which keep them.

In reading order:
- verl/protocol.py, rows.py, tensors.py: the batch type `DataProto`
- verl/to_batch.py, from_batch.py: trajectories and labels to a batch in verl's layout, and back
- verl/rewarding.py, reward_managers.py, judging.py: reward managers, and the process that runs them for the scorers
- rows.py, report.py: the translation of a configuration by a table
- verl/configuration/table.py, translation.py: `asyncrl from-verl`; trl/table.py, command.py: `asyncrl from-trl`
- verl/controller/group.py, modes.py: worker groups; controller/operators/from_config.py: verl's workers

Names, parameters and results are those of the other trainer, and change only when it changes them.
"""
