"""The formats in which models write tool calls, one file a family. registry.py lists them."""
