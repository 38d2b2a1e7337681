"""Engines: what samples tokens for an actor."""
