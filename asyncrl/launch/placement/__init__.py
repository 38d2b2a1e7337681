"""Places a run's processes on hosts, GPUs and CPUs.

In reading order: `placement.py`, `pools.py`, `demand.py`, `dealing.py`, `sharing.py`.
"""
