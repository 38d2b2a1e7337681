"""Every part by kind and name: `asyncrl algorithms [KIND ...] [--json]` lists them, and
`python -m asyncrl.algorithms.docs docs/algorithms.md` writes the page, both from the parts themselves."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.algorithms import registry
from asyncrl.algorithms.parts import Part, card
from asyncrl.config.option import Option, options

HEAD = """# Algorithms

One algorithm is one part of each kind, chosen by name in the `algorithm` section; `algorithm=NAME` takes a preset of
`configs/algorithm/`. Every part of every kind can be combined with every other, except where it makes no sense: that is
refused when the configuration is read, with the fix in the message. `asyncrl algorithms` lists all parts with formula
and parameters, and `asyncrl algorithms --json` gives programs all that this page has of them. This page is generated
from the parts' own docstrings by `make docs`.

Notation: pi_theta is the policy being trained, pi_prox the proximal policy (by default pi_theta at the start of the
learner step), mu the behaviour policy that sampled the token, pi_ref the reference. r = pi_theta / pi_prox,
w = pi_prox / mu, A is the advantage, R the reward. Policy tokens are those that the policy sampled; prompt and tool
tokens are removed before anything is computed. N and S are the numbers of policy tokens and sequences of the global
minibatch before any correction drops some. sg(x) is x without gradient; w never carries gradient. Log-ratios are
clamped to +-20 before exp (to +-10 in the KL).

The loss is aggregate(w loss(r, A)) + weight aggregate(KL) - entropy_weight aggregate(entropy), over the tokens that no
correction dropped.
"""

SECTIONS = {
    "advantage": ("Advantages", "advantage: {name: gae, params: {lam: 0.95}}"),
    "loss": ("Policy losses", "loss: {name: ppo, params: {clip_high: 0.28}}"),
    "correction": ("Importance corrections", "correction: [{name: truncate, params: {cap: 2.0}}, {name: veto}]"),
    "kl": ("KL to the reference", "kl: {name: k3, params: {weight: 0.001, place: loss}}"),
    "aggregation": ("Aggregation", "aggregation: {name: token-mean}"),
    "reward": ("Changes of the reward", "reward: [{name: overlong, params: {max_length: 4096, buffer: 512}}]"),
    "value": ("The critic's loss", "value: {name: clipped, params: {clip: 0.2}}"),
}

NOTES = {
    "correction": """
A correction sets the weight w, drops tokens or sequences, or both; the list is applied in order, and an empty list is
w = 1. At most one correction sets weights. A level says what one ratio spans: `token`; `turn`, the product over an
assistant turn; `sequence`, the product over the sequence; `geometric`, the sequence's mean log-ratio.

`algorithm.proximal` says where pi_prox comes from. `recompute`: a forward pass at the start of the step. `interpolate`:
log pi_prox = log mu + alpha (log pi_theta - log mu), alpha = clamp((v - 1 - v_b) / (v - v_b), 0, 1), with v the
learner's version and v_b the token's, which saves that pass. `behaviour`: pi_prox = mu, so that r is the whole ratio
and w = 1 (plain PPO).
""",
    "kl": """
In the formulas d is log(pi_theta / pi_ref) of a token. `place: loss` adds the KL to the loss. `place: reward` subtracts
it from the reward: token by token for gae, vtrace and reinforce_pp, otherwise as the sequence's sum. With `target` the
coefficient adapts: each step it is multiplied by 1 + clamp(KL / target - 1, -0.2, 0.2) S / horizon.
""",
}

METRICS = """
## What is reported
The same for any number of ranks and micro-batches. Shares are of all policy tokens.

| metric | meaning |
| --- | --- |
| mismatch/ess | effective sample size (sum w)^2 / (N sum w^2) of the raw w |
| mismatch/kl, mismatch/k3 | KL from behaviour to proximal policy, as k1 and as k3 |
| mismatch/chi_square | mean w^2 - 1 |
| mismatch/agree | share of tokens on which engine and learner agree: abs(log w) <= 1e-4 |
| mismatch/perplexity_ratio | mean over sequences of exp(mean log mu - mean log pi_prox) |
| update/kl, update/k3 | KL from proximal to trained policy |
| weight/mean, weight/ess | mean and ess of the weights after correction; a dropped token counts as 0 in ess |
| clip/high, clip/low, clip/... | share of tokens beyond each of the loss's bounds |
| masked/RULE, masked/any | share of tokens dropped by each correction, and by any |
| noop | 1 if there was nothing left to learn from |
| token_lag/mean, token_lag/K | mean lag in versions, share of tokens with lag K (K = 16: 16 or more) |
| advantage/mean, /std, /positive; return/mean, /std | of the policy tokens; returns only if there is a critic |
| entropy, kl_reference, kl_reference/weight | only if they are computed |
| loss/policy, loss/kl, loss/entropy | the terms of the loss, mean over the step's minibatches |
| reward/..., length/..., groups/zero_variance | of the episodes (`metrics.episode_metrics`) |
"""

OWN = """
## A part of yours
One file with one class, named in the configuration by its dotted path:

```python
from dataclasses import dataclass
from typing import ClassVar

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class Squared(Loss):
    \"\"\"A policy gradient with a quadratic penalty.

    Formula: -A log pi_theta + weight log^2 r
    \"\"\"

    name: ClassVar[str] = "squared"

    weight: float = param(0.1, "weight of the penalty", "[0, inf)")

    def __call__(self, updates: Updates) -> TokenLosses:
        penalty = self.weight * updates.log_ratio.square()
        return TokenLosses(penalty - updates.advantages * updates.logprobs)
```

`algorithm.loss.name=my_package.squared.Squared algorithm.loss.params.weight=0.2` uses it. The base classes are
`advantages.base.SequenceAdvantage` (one number a sequence) and `Advantage` (one a token), `losses.base.Loss`,
`corrections.base.Correction`, `kl.Kl`, `aggregation.Aggregation`, `rewards.base.Reward` and `losses.value.Value`.
"""


def table(kinds: Sequence[str] = tuple(registry.HOMES)) -> list[dict[str, Any]]:
    """One entry a part: kind, name, summary, formula, use, source, caveat (where there is one) and parameters."""
    return [_entry(part) for kind in kinds for part in registry.parts(kind).values()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list; with --json as one JSON array."""
    parser = argparse.ArgumentParser(
        prog="asyncrl algorithms", description="List every part with its formula and parameters."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"only these kinds: {', '.join(registry.HOMES)}")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of text")
    options = parser.parse_args(argv)
    unknown = [kind for kind in options.kinds if kind not in registry.HOMES]
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}; use {', '.join(registry.HOMES)}")
    entries = table(options.kinds or tuple(registry.HOMES))
    sys.stdout.write(json.dumps(entries, indent=2) + "\n" if options.json else _text(entries))
    return 0


def shown(value: Any) -> str:
    """A default as YAML writes it."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _entry(part: type[Part]) -> dict[str, Any]:
    described = [_parameter(parameter) for parameter in options(part)]
    return {"kind": part.kind, "name": part.name, **card(part), "parameters": described}


def _parameter(parameter: Option) -> dict[str, Any]:
    default = {} if parameter.required else {"default": _plain(parameter.default)}
    return {"name": parameter.name, **default, "allowed": parameter.allowed, "meaning": parameter.meaning}


def _plain(value: Any) -> Any:
    """JSON has no infinity, so it is written as text."""
    return shown(value) if isinstance(value, float) and math.isinf(value) else value


def _text(entries: Sequence[dict[str, Any]]) -> str:
    lines = []
    for kind in dict.fromkeys(entry["kind"] for entry in entries):
        lines.append(f"algorithm.{kind}")
        for entry in (entry for entry in entries if entry["kind"] == kind):
            lines.append(f"  {entry['name']:<24} {entry['formula']}")
            lines += [f"  {'':<24}   {_parameter_text(parameter)}" for parameter in entry["parameters"]]
        lines.append("")
    return "\n".join(lines)


def _parameter_text(parameter: dict[str, Any]) -> str:
    default = f"={shown(parameter['default'])}" if "default" in parameter else " (must be given)"
    return f"{parameter['name']}{default}: {parameter['meaning']}; {parameter['allowed']}"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(kind) for kind in registry.HOMES) + METRICS + OWN


def _section(kind: str) -> str:
    title, example = SECTIONS[kind]
    entries = table([kind])
    rows = "".join(_row(entry) for entry in entries)
    return (
        f"\n## {title}\n`algorithm.{kind}`, for instance `{example}`\n{NOTES.get(kind, '')}\n"
        f"| name | formula | when to use it | source | config line |\n| --- | --- | --- | --- | --- |\n{rows}"
        f"\n| parameter of | parameter | default | allowed | meaning |\n| --- | --- | --- | --- | --- |\n"
        f"{''.join(_parameters(entries))}"
    )


def _row(entry: dict[str, Any]) -> str:
    use = entry["use"] + (f". Caveat: {entry['caveat']}" if "caveat" in entry else "")
    return _line([f"`{entry['name']}`", entry["formula"], use, entry["source"], f"`{_config(entry)}`"])


def _config(entry: dict[str, Any]) -> str:
    """The line that chooses the part, with dots for required parameters."""
    needed = ", ".join(f"{each['name']}: ..." for each in entry["parameters"] if "default" not in each)
    choice = f"{{name: {entry['name']}" + (f", params: {{{needed}}}}}" if needed else "}")
    is_list = entry["kind"] in ("correction", "reward")
    return f"{entry['kind']}: [{choice}]" if is_list else f"{entry['kind']}: {choice}"


def _parameters(entries: Sequence[dict[str, Any]]) -> list[str]:
    """One row a parameter; parts that share one with the same default share the row."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        for each in entry["parameters"]:
            default = f"`{shown(each['default'])}`" if "default" in each else "must be given"
            owners.setdefault((f"`{each['name']}`", default, each["allowed"], each["meaning"]), []).append(
                entry["name"]
            )
    return [_line([", ".join(names), *cells]) for cells, names in owners.items()]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
