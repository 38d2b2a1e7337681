"""Data types and classes of other trainers, so that code written for them works here.

verl/ has verl's batch type, reward managers, interactions, tools and agent loops, the conversion of trajectories to
verl's layout, the translation of verl's configurations (configuration/), and verl's single controller (controller/).
trl/ translates configurations of TRL. docs/verl.md and docs/trl.md list the differences.

No other package imports this one. Some options need a class or a program of this package; `config/extensions.py` has
the path of each. A run without such an option loads nothing from here. This package itself keeps none of the promises
in docs/concepts.md: it calls the learner, the engine and the scorers, which keep them.

In reading order:
- verl/batches/protocol.py: the batch type `DataProto`
- verl/batches/to_batch.py, from_batch.py: trajectories and labels to a batch in verl's layout, and back
- verl/rewards/rewarding.py, reward_managers.py, judging.py: reward managers, and the process that runs them
- rows.py, report.py: the translation of a configuration by a table; yaml_files.py: YAML that strangers wrote
- verl/configuration/table.py, translation.py: `asyncrl from-verl`; trl/table.py, command.py: `asyncrl from-trl`
- verl/controller/group.py, modes.py: worker groups; controller/operators/from_config.py: verl's workers

Names, parameters and results are those of the other trainer, and change only when it changes them.
"""
