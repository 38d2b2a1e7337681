"""The way to a replay for all other processes. It keeps its part of promise 1: requests are repeated until they are
answered.

In reading order: `client.py` has a method for each request, `link.py` sends a request again until it is answered, and
`shards.py` makes all shards look like one replay. `leaving.py` tells the replay that a worker ends, and
`clock_probe.py` compares the clocks.
"""
