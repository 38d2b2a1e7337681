"""Pages about finished and running runs: the report of one, and the comparison of several."""
