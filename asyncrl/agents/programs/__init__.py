"""Agent programs for the Pythons of other projects, which have their packages. No file here imports asyncrl."""
