"""The tasks of a run: read from files in verl's layout; and published data sets made into such files."""
