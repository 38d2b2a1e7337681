"""Programs that run beside asyncrl, in Pythons with the packages of others. No file here imports asyncrl."""
