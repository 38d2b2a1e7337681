"""Places a run's processes on hosts, GPUs and CPUs.

In reading order: `placement.py`, `pools.py`, `demand.py`, `dealing.py`, `sharing.py`. `actors.py` and `together.py`
decide numbers that the configuration leaves open: actors on a node, and servers on a GPU. `table.py` shows a placement.
"""
