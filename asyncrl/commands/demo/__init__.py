"""The demo: a calculator task, its tokenizer, warm start, step scorer and report."""

from asyncrl.commands.demo.answer_checker import AnswerChecker
from asyncrl.commands.demo.prepare import prepare_demo, prepared_overrides
from asyncrl.commands.demo.tool import SlowStepCalculator, StepCalculator

__all__ = [
    "AnswerChecker",
    "SlowStepCalculator",
    "StepCalculator",
    "prepare_demo",
    "prepared_overrides",
]
