"""Scores episodes with rules, in separate processes. This file has the code that runs in the scorer, and the program of
the processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl import wire
from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.config.schema.tools import SandboxConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.network.throttle import ErrorLogger
from asyncrl.sandbox.sandboxes import Sandbox, open_sandbox
from asyncrl.scoring.judge_program import Answer, failed, serve
from asyncrl.scoring.judges import JudgePool, Limits
from asyncrl.scoring.rules.base import RuleInput, RuleScores, RunStep
from asyncrl.scoring.rules.confined import limit_memory
from asyncrl.scoring.rules.registry import RuleSet, load_rules
from asyncrl.text import reason_of
from asyncrl.types import Reason
from asyncrl.wire import Message

logger = logging.getLogger(__name__)

BACKSTOP = 8
"""A process of the verifier limits its own memory to this multiple of `rule_memory_mb`, in case the scorer has ended or
reacts too late."""


_TEXTS = ("answer", "full_answer", "response", "turn_texts")
"""The fields of a RuleInput that are put into messages unchanged."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a run. `last`: the last learner step; 0 if it is unknown. `per_version`: the number of steps from
    one policy version to the next."""

    last: int = 0
    per_version: int = 1


class Verifier:
    """Scores with the configured rules, up to `rule_processes` episodes at once. An episode may take `timeout_s`
    seconds and `rule_memory_mb` megabytes of memory. verl's reward managers use the tokenizer of `policy`. Programs run
    in `sandbox`. Reward functions for TRL get the learner step, which `steps` computes from a policy version.

    Raises ConfigError: a rule cannot be loaded.
    """

    def __init__(
        self,
        config: ScoringConfig,
        policy: ModelConfig | None = None,
        sandbox: SandboxConfig | None = None,
        steps: Steps | None = None,
    ) -> None:
        settings = {
            "rule": config.rule,
            "rules": config.rules,
            "timeout_s": config.timeout_s,
            "rule_memory_mb": config.rule_memory_mb,
            "sandbox": asdict(sandbox or SandboxConfig()),
            "steps": asdict(steps or Steps()),
            **policy_settings(policy),
        }
        limits = Limits("the rule", config.timeout_s, "scoring.timeout_s", config.rule_memory_mb)
        self._pool = JudgePool("asyncrl.scoring.verifier", settings, config.rule_processes, limits)

    def submit(self, given: RuleInput) -> Future[RuleScores]:
        """Scores in the background. The future raises ScoringError if a rule failed, overran a limit, or ended its
        process, and CancelledError if the verifier is closed first. Raises ScoringError: the verifier is closed."""
        texts = {name: getattr(given, name) for name in _TEXTS}
        message = wire.trajectory_message(given.trajectory)
        body = {**message.body, "row": wire.task_body(given.task), **texts}
        return self._pool.submit([Message("verify", 0, body, message.arrays)], _read)

    def score(self, given: RuleInput) -> RuleScores:
        """The scores of one episode. Raises: see `submit`."""
        return self.submit(given).result()

    def close(self) -> None:
        """Ends the processes, even busy ones."""
        self._pool.close()


def policy_settings(policy: ModelConfig | None) -> dict[str, Any]:
    """The settings that `policy_tokenizer` reads."""
    names = ("path", "revision", "tokenizer", "chat_template", "copies", "trust_remote_code")
    return {"policy": {name: getattr(policy, name) for name in names} if policy else None}


def policy_tokenizer(settings: Mapping[str, Any]) -> Any:
    """The policy's tokenizer. Raises ConfigError: model.path is not set."""
    if settings["policy"] is None:
        raise ConfigError("a verl reward manager needs model.path: it is made with this model's tokenizer")
    return open_tokenizer(ModelConfig(**settings["policy"]))


def _read(reply: Message) -> RuleScores:
    body = reply.body
    reasons = [Reason(*each) for each in body["reasons"]]
    return RuleScores(body["outcome"], body["total"], body["scores"], body["vote"], reasons)


def _load(settings: Mapping[str, Any]) -> Answer:
    """Makes the function that answers requests in a process of the verifier."""
    config = ScoringConfig(rule=settings["rule"], rules=settings["rules"])
    sandbox = open_sandbox(SandboxConfig(**settings["sandbox"]))
    rules = load_rules(config, lambda: policy_tokenizer(settings), sandbox)
    limit_memory(BACKSTOP * settings["rule_memory_mb"] << 20)
    error_logger, steps = ErrorLogger(logger), Steps(**settings["steps"])
    return lambda messages, deadline: _score(rules, messages, deadline, sandbox, steps, error_logger)


def _score(
    rules: RuleSet,
    messages: Sequence[Message],
    deadline: float,
    sandbox: Sandbox,
    steps: Steps,
    error_logger: ErrorLogger,
) -> Message:
    (message,) = messages
    texts = {name: message.body[name] for name in _TEXTS}
    task, trajectory = wire.read_task(message.body["row"]), wire.read_trajectory(message)
    progress = RunStep(max(0, trajectory.newest_version) * steps.per_version, steps.last)
    given = RuleInput(task, trajectory, deadline=deadline, sandbox=sandbox, progress=progress, **texts)
    try:
        found = rules.score(given)
    except ScoringError as error:
        if error.__cause__ is not None:
            error_logger.exception(f"trajectory {given.trajectory.id}: {error}", error)
        return failed(str(error))
    except Exception as error:
        reason = f"the rule raised {reason_of(error)}"
        error_logger.exception(f"trajectory {given.trajectory.id}: {reason}", error)
        return failed(reason)
    numbers = {"outcome": found.outcome, "total": found.total, "scores": dict(found.scores)}
    return Message("scores", 0, {**numbers, "vote": found.vote, "reasons": list(found.reasons)})


if __name__ == "__main__":
    serve(sys.argv[1:], _load)
