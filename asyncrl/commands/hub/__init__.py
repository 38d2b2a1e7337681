"""`asyncrl push-to-hub`: upload an exported model with its card."""
