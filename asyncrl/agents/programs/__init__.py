"""Agent programs that run with the Python and the packages of other projects. No file here imports asyncrl."""
