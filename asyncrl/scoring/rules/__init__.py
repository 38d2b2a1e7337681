"""Rules: plain functions that judge an episode's outcome, one file a rule."""

from asyncrl.scoring.rules.base import Rule

__all__ = ["Rule"]
