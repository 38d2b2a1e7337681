"""Policy losses, one file each. All run on the kept policy tokens of one forward pass of whole sequences."""
