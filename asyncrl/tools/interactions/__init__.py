"""Simulated users, which respond to the policy between its turns."""
