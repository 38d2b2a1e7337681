"""verl's reward managers: their base classes, verl's own managers, and the process that scores groups by them.

In reading order:
- `rewarding.py`, `reward_managers.py`: managers that score a whole batch
- `reward_loop.py`, `loop_managers.py`, `rate_limits.py`: managers that score one row in a coroutine
- `process_rewards.py`, `process_keys.py`: managers of process rewards, and their keys
- `processes.py`: a user's function in parallel processes
- `loading.py`, `judging.py`: managers by name, and the process that scores whole groups of a run
"""
