"""The metrics of an evaluation."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, _, _ = made_by("evaluation")

_MEASURED = (
    gauge("eval/outcome", "outcome", "mean outcome of the attempts at held-out tasks: the score of the first rule"),
    gauge("eval/accuracy", "share", "attempts at held-out tasks with an outcome of 1 or more"),
    gauge("eval/reward", "reward", "mean reward of the attempts at held-out tasks"),
    gauge("eval/process", "process score", "mean process score of the attempts whose steps were scored"),
    gauge("eval/length", "tokens", "mean number of policy tokens of an attempt"),
    gauge(
        "eval/pass@K",
        "share",
        "with `learner.eval_attempts` above 1, for K = 2, 4 and so on: tasks that at least one of K attempts would "
        "solve ([evaluate.md](evaluate.md))",
    ),
    gauge("eval/best@K", "outcome", "the outcome of the best of K attempts, for the same K as eval/pass@K"),
    gauge(
        "eval/maj@K",
        "outcome",
        "the outcome of the answer that most of K attempts give, for the same K as eval/pass@K",
    ),
    gauge("eval/count", "episodes", "scored attempts, over which the means are taken"),
)

_OF_A_SOURCE = tuple(
    gauge(
        metric.name.replace("eval/", "eval/SOURCE/"),
        metric.unit,
        f"{metric.name} of one data source, if there are several",
    )
    for metric in _MEASURED
)

METRICS = (
    *_MEASURED,
    gauge(
        "eval/loss",
        "nats",
        "from `asyncrl sft` only: mean negative log-likelihood of the held-out demonstrations, over `eval/tokens` "
        "tokens",
    ),
    gauge("eval/failed", "episodes", "attempts that failed"),
    gauge("eval/version", "version", "the policy version that the evaluation measures"),
    gauge(
        "eval/newest_version",
        "version",
        "the newest version that sampled a token of the evaluation. It is above eval/version if an engine already "
        "served a newer version",
    ),
    gauge("eval/tokens", "tokens", "sampled tokens of the evaluation"),
    gauge("eval/newer_tokens", "tokens", "sampled tokens from versions newer than eval/version"),
    *_OF_A_SOURCE,
)
