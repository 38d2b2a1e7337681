"""Converters of published data sets to tasks, one file per set. `asyncrl.data.command` runs them."""
