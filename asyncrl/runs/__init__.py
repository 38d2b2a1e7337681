"""Views of a run's folder for people: its state, its numbers, its episodes."""

from asyncrl.observe.kept.reading import KeptEpisodes

__all__ = ["KeptEpisodes"]
