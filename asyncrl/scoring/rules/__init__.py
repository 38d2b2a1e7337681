"""Verifiers: one file a rule."""
