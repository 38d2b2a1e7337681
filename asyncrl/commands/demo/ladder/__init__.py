"""Harder variants of the demo's task: longer expressions with brackets, and wrong steps that must be undone."""

from asyncrl.commands.demo.ladder.judge import StepJudge
from asyncrl.commands.demo.ladder.tools import LadderCalculator, SlowLadderCalculator, Undo

__all__ = ["LadderCalculator", "SlowLadderCalculator", "StepJudge", "Undo"]
