"""Published data sets as tasks, one set a file; see `asyncrl.data.command`."""
