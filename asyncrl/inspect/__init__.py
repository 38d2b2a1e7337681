"""The command `asyncrl inspect`: a run's status, its episodes, export, import and dead letters. It reads the stores
beside a replay at work, and asks that replay for changes."""
