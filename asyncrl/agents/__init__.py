"""Agents of ours, which play episodes against environments that others run as servers."""
