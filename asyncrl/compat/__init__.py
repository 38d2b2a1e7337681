"""Data types and classes of other trainers, so that code written for them works here.

Today this is verl: verl/ has its batch type, trajectories in its layout, reward managers, interactions, the translation
of its configurations (configuration/) and its single controller with operators (controller/). docs/verl.md lists the
differences.

This room is above the others and hooks in by names: a room finds a program or a class of verl in `config/extensions.py`
when an option asks for it. No room imports this one, and a run without verl's words loads nothing of it. It keeps no
promise of its own. The operators run on the learner, the engine and the scorers, which keep theirs.

In reading order:
- verl/protocol.py, tensors.py: the batch type `DataProto`; verl/trajectories.py: trajectories in verl's layout
- verl/rewarding.py, reward_managers.py, judging.py: reward managers, and the process that runs them for the scorers
- verl/configuration/table.py, translation.py: `asyncrl from-verl`
- verl/controller/group.py, modes.py: worker groups; controller/operators/from_config.py: verl's workers

A new row of the table or a new manager needs no one's consent. Names, parameters and results are verl's, and change
only when verl's do.
"""
