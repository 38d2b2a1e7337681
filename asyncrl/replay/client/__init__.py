"""The way to a replay for all other processes. It keeps its part of promise 1: requests are repeated until they are
answered.

In reading order: `client.py` has a call for each request, `link.py` sends it again and again, and `shards.py` makes all
shards look like one replay. `leaving.py` says that a worker ends, and `clock_probe.py` compares the clocks.
"""
