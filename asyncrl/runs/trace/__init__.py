"""The timeline of a run: the spans of all its roles on one clock, for Perfetto, for OpenTelemetry, and in words."""
