"""How a weight update travels: one file a channel."""
