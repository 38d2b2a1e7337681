"""Policy losses, one per file. They run on the kept policy tokens of one forward pass of whole sequences."""
