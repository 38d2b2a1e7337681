"""`asyncrl from-verl`: a verl PPO configuration becomes an experiment file. `table.py` has a row for each key."""
