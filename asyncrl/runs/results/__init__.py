"""What came of a run: its summary, its machine, and the card of its model."""
