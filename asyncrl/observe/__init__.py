"""Metrics: one interface, several sinks."""
