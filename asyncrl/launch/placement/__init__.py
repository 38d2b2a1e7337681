"""Which process of a run is where."""
