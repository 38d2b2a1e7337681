"""The scoring pool: leases unlabelled trajectories, verifies and scores them, returns labels."""
