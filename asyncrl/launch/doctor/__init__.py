"""`asyncrl doctor`: finds the faults of a host before a run meets them."""
