"""The formats in which models write tool calls, one file per family. registry.py lists them."""
