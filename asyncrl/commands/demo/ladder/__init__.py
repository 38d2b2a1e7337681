"""Harder tasks of the demo's family: longer expressions with brackets, and wrong turns that must be undone."""

from asyncrl.commands.demo.ladder.judge import StepJudge
from asyncrl.commands.demo.ladder.tools import LadderCalculator, SlowLadderCalculator, Undo

__all__ = ["LadderCalculator", "SlowLadderCalculator", "StepJudge", "Undo"]
