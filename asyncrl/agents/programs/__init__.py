"""Agent programs that run in the Pythons of other projects, with their packages. No file here imports asyncrl."""
