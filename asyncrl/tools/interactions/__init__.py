"""Simulated users, who respond to the policy between its turns."""
