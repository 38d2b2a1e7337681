"""What people see of a run's replay, and do with it: status, show, export, import, dead letters. It reads the stores
beside a replay at work; what changes something is asked of the replay that runs."""
