"""Starts and supervises the roles of a run by their command lines."""
