"""`asyncrl try TASKS --index 3 [--answers FILE] [KEY=VALUE ...]`: plays one episode and shows each turn as it happens.
Then it shows the rule's score, and the step scores of scoring.steps or of your class of scoring.prm. Use it to try a
new environment, tool, simulated user, rule, step reward or process reward model before a run.

TASKS means the same as data.train. The policy is the model of model.path in the embedded engine, or the SGLang server
of engine.urls (engine.kind=sglang), which keeps its weights. With --answers a script replaces the policy: each line of
FILE is one turn, as "TEXT" or {"content": "TEXT", "tool_calls": [{"name": "NAME", "arguments": {...}}]}. A script needs
no model; if model.path is set, tool calls are written in that model's format.

Everything runs in this process, so a debugger can stop in an environment or a rule. If your code runs for over 5 s or
ends the process, a message names its line. Nothing is stored.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from asyncrl.chat.chat import Chat
from asyncrl.commands.trial.answers import read_answers
from asyncrl.commands.trial.from_config import play
from asyncrl.commands.trial.transcript import Transcript
from asyncrl.config.commands import command_name
from asyncrl.config.compose import composed, read
from asyncrl.config.exits import EXIT_FAILURE, exit_status
from asyncrl.config.load import log_to_stderr
from asyncrl.config.quoting import quoted
from asyncrl.config.refusals import may_exist
from asyncrl.config.schema import ActorConfig, ModelConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.engine.scripted import ScriptedEngine
from asyncrl.errors import ConfigError, DataError, ScoringError
from asyncrl.launch.preflight.models import missing_model
from asyncrl.launch.preflight.tasks.datasets import make_tasks
from asyncrl.launch.preflight.tasks.truths import check_columns
from asyncrl.machine.blocked_loop import running_line
from asyncrl.machine.own_exits import reported_exits
from asyncrl.machine.slow_code import watched_code
from asyncrl.machine.temporary_folder import temporary_folder
from asyncrl.modelling.end_tokens import end_tokens
from asyncrl.modelling.tokenizer import open_tokenizer, template_name
from asyncrl.sandbox.sandboxes import open_sandbox
from asyncrl.scoring.answers import rule_input, texts_of_steps
from asyncrl.scoring.models.registry import load_prm
from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.rules.registry import RuleSet, load_rules, rule_names
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.step_rewards import StepFunction, StepInput
from asyncrl.text import reason_of
from asyncrl.tools.offered import Offer
from asyncrl.types import Lease, Task, Trajectory

STDERR = 2
NO_MODEL = "none"
"""The value of `model.path` for a script without a model."""


@dataclass(frozen=True)
class TrialRequest:
    """The arguments of a command line. `words` are KEY=VALUE words."""

    tasks: str
    index: int
    answers: Path | None
    words: tuple[str, ...]
    config_dir: Path | None = None

    def read(self, folder: Path) -> TrainConfig:
        """The configuration, with the run's folder inside `folder`. Raises ConfigError: the words cannot be used."""
        words = [f"data.train={quoted(self.tasks)}", *self.words]
        if OmegaConf.is_missing(composed(words, self.config_dir).model, "path"):
            if self.answers is None:
                raise ConfigError(
                    "model.path: name a model with model.path=DIR, or a script that replaces the policy with --answers "
                    'FILE, which needs no model; its lines are the policy\'s turns, such as "4"'
                )
            words.append(f"model.path={NO_MODEL}")
        config = read(words, self.config_dir)
        return replace(config, run=replace(config.run, dir=str(folder), name="try"))


def main(argv: Sequence[str]) -> int:
    """Play an episode, and return the exit status: 1 if the episode or a rule fails."""
    given = _parser().parse_intermixed_args(argv)
    log_to_stderr()
    request = TrialRequest(given.tasks, given.index, given.answers, tuple(given.words), given.config_dir)
    transcript = Transcript(Console(highlight=False))
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)  # A crash writes its stack, with the line of the user's code.
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder("asyncrl-try-"))
            stack.enter_context(_without_tracebacks())
            stack.enter_context(watched_code())
            stack.enter_context(reported_exits(partial(_report_exit, transcript, folder)))
            return 0 if try_out(request, transcript, folder) else EXIT_FAILURE
    except SystemExit as error:
        transcript.failure(f"your own code tried to end the program: {reason_of(error)}")
        return EXIT_FAILURE


def _report_exit(transcript: Transcript, folder: Path, status: int) -> int:
    """Show that the user's code called `os._exit`, remove the folder, and return the exit status."""
    line = running_line(lambda: {threading.get_ident(): sys._getframe()})
    transcript.failure(f"your own code ended the program by os._exit({status}) ({line})")
    sys.stdout.flush()
    rmtree(folder, ignore_errors=True)
    return EXIT_FAILURE


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Drop tracebacks from the log during the block: the message has the line of the user's code."""

    def untraced(record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True

    handlers = logging.getLogger().handlers
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        for each in handlers:
            each.addFilter(untraced)
    try:
        yield
    finally:
        for each in handlers:
            each.removeFilter(untraced)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", metavar="TASKS", help="tasks, as data.train takes them (docs/data.md)")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="keys of docs/configuration.md")
    parser.add_argument(
        "--index", type=int, default=0, metavar="N", help="index of the task, counted from 0 (default: 0)"
    )
    parser.add_argument("--answers", type=Path, metavar="FILE", help="a script that replaces the policy")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="also find group files in DIR")
    return parser


def try_out(request: TrialRequest, transcript: Transcript, folder: Path) -> bool:
    """Play the episode and score it, with the run's files in `folder`. Return False if the episode or a rule failed:
    the transcript shows why.

    Raises ConfigError and DataError: the configuration or the data cannot be used.
    """
    if not may_exist(request.tasks):
        raise ConfigError(f"{request.tasks}: the file does not exist; see docs/data.md")
    config = request.read(folder)
    _check_model(config.model)
    make_tasks(config, config.data.train)
    tasks = run_tasks(config).all(config.data.train)
    if not 0 <= request.index < len(tasks):
        raise DataError(f"--index={request.index}: {request.tasks} has tasks 0 to {len(tasks) - 1}")
    task = tasks[request.index]
    transcript.task(task, tasks.place(request.index), _tools(config.actor, task))
    tokenizer = _tokenizer(config.model)
    sandbox = open_sandbox(config.actor.sandbox)
    # This comes before the episode, so that a wrong rule is refused early.
    rules = load_rules(config.scoring, lambda: tokenizer, sandbox)
    check_columns(rules, tasks, request.index, config.data.columns)
    step_function = StepFunction(config.scoring.steps) if config.scoring.steps is not None else None
    ends = () if config.model.path == NO_MODEL else end_tokens(config.model, config.actor.end_tokens, tokenizer)
    name = template_name(config.model)
    chat = Chat(tokenizer, config.actor.template_kwargs, config.actor.tool_call_format, ends, name)
    script = None if request.answers is None else ScriptedEngine(chat, tokenizer, read_answers(request.answers))
    prm = load_prm(config.scoring.prm) if "." in config.scoring.prm.family else None
    trajectory = asyncio.run(play(config, task, chat, script, transcript))
    if trajectory is None:
        return False
    given = replace(rule_input(task, trajectory, tokenizer, config.scoring.strip_thoughts), sandbox=sandbox)
    if rule_names(config.scoring, task.data_source) and not _score(rules, given, transcript):
        return False
    if prm is not None:
        return _score_steps(Scorer(config.scoring, tokenizer, prm=prm), task, trajectory, transcript)
    if config.scoring.prm.is_configured:
        transcript.unscored_steps("only a class of your own is loaded here, no other model of scoring.prm")
    if step_function is None:
        return True
    texts = texts_of_steps(trajectory, tokenizer)
    rewarded = StepInput(task, trajectory, texts, given.answer, given.full_answer)
    return _reward_steps(step_function, rewarded, transcript)


def _tools(actor: ActorConfig, task: Task) -> list[str]:
    if actor.played_by:
        return ["the agent's own tools"]
    if task.tools:
        return [tool.get("function", tool)["name"] for tool in task.tools]
    return list(Offer(actor).functions(task))


def _check_model(model: ModelConfig) -> None:
    """Raises ConfigError: there is no such model. The files in an existing folder are not checked: if the engine runs
    elsewhere, only the tokenizer must be in the folder."""
    if model.path != NO_MODEL and not Path(model.path).is_dir() and (reason := missing_model(model)):
        raise ConfigError(f"model.path={model.path}: {reason}")


def _tokenizer(model: ModelConfig) -> Any:
    if model.path != NO_MODEL:
        return open_tokenizer(model)
    from asyncrl.commands.demo.tokenizer import build_tokenizer

    return build_tokenizer()


def _score(rules: RuleSet, given: RuleInput, transcript: Transcript) -> bool:
    """Score the episode. Return False if a rule failed."""
    try:
        scores = rules.score(given)
    except Exception as error:  # noqa: BLE001 - a rule may raise anything
        transcript.failure(f"the rule failed: {reason_of(error)}")
        return False
    transcript.scores(scores, given.answer, given.task.truth_text)
    return True


def _score_steps(scorer: Scorer, task: Task, trajectory: Trajectory, transcript: Transcript) -> bool:
    """Score the steps of the episode by the process reward model. Return False if the model failed."""
    (scored,) = scorer.score([Lease(task, trajectory, ("prm",), None, final=False)])
    if isinstance(scored, ScoringError):
        transcript.failure(f"the process reward model failed: {scored}")
        return False
    transcript.step_rewards(scored.labels.step_scores.tolist())
    return True


def _reward_steps(function: StepFunction, given: StepInput, transcript: Transcript) -> bool:
    """Reward the steps of the episode. Return False if the function failed."""
    try:
        rewards = function(given)
    except ScoringError as error:
        transcript.failure(str(error))
        return False
    transcript.step_rewards(rewards)
    return True


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl try"))
