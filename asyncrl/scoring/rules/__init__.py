"""Rules: plain functions that judge an episode's outcome. Each rule has its own file."""

from asyncrl.scoring.rules.base import Rule

__all__ = ["Rule"]
