"""Data types and classes of other trainers, so that code written for them works here.

The only other trainer today is verl: verl/ has its batch type, trajectories in its layout, reward managers,
interactions, the translation of its configurations (configuration/) and its single controller with operators
(controller/). docs/verl.md lists the differences.

No other package imports this one. Some options need a class or a program of this package; `config/extensions.py` has
their names. A run without such an option loads nothing from here. This package keeps no promise of its own: the
operators run on the learner, the engine and the scorers, which keep the promises.

In reading order:
- verl/protocol.py, tensors.py: the batch type `DataProto`; verl/trajectories.py: trajectories in verl's layout
- verl/rewarding.py, reward_managers.py, judging.py: reward managers, and the process that runs them for the scorers
- verl/configuration/table.py, translation.py: `asyncrl from-verl`
- verl/controller/group.py, modes.py: worker groups; controller/operators/from_config.py: verl's workers

Names, parameters and results are verl's, and change only when verl changes them.
"""
