"""The command `asyncrl inspect`: a run's status, its episodes, export, import and dead letters. It reads the stores
of a running replay without disturbing it, and asks the replay itself to make changes."""
