"""How many GPUs a run needs, and for what: a simulation of runs at measured rates."""
