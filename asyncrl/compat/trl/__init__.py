"""`asyncrl from-trl`: a GRPOConfig of TRL becomes an experiment file. `table.py` has a row for each key."""
