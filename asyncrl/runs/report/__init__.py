"""Pages about finished and running runs: the report of one, the comparison of several, and models for the hub."""
