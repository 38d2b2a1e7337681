"""`asyncrl push-to-hub`: uploads an exported model with its card."""
