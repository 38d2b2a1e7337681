"""The rules about distances between policies: the trained one, the one that sampled, and the reference."""

from __future__ import annotations

from statistics import fmean

from asyncrl.runs.health.evidence import Evidence
from asyncrl.runs.health.finding import FEWEST_STEPS, LONG_WINDOW, WINDOW, Finding, last_steps, steps_text
from asyncrl.runs.health.trends import values_of

REFERENCE, UPDATE, MISMATCH = "kl_reference", "update/k3", "mismatch/k3"
NAMES = {
    REFERENCE: "the KL to the reference (kl_reference)",
    UPDATE: "the KL of an update (update/k3)",
    MISMATCH: "the KL between engine and learner (mismatch/k3)",
}
LARGEST_KL = {
    REFERENCE: (1.0, "the policy has left its reference: use a larger weight of algorithm.kl, or lower learner.lr"),
    UPDATE: (0.2, "a single step changes the policy too much: lower learner.lr"),
    MISMATCH: (
        0.2,
        "the engine samples from another policy than the learner trains. Less than 0.01 is usual if both have the "
        "same weights. Check that both have the same weights (docs/weights.md), model, chat template and precision "
        "(model.dtype, engine.dtype, the arguments of servers). If the value was small at first, the policy has moved "
        "too far from the older versions that sampled the data: lower learner.lr or replay.max_lag",
    ),
}
"""The largest healthy mean of an estimate of a KL, in nats a token, and the advice for a larger one."""
FROM_SAMPLING = (
    "with algorithm.proximal=behaviour it is the distance to the policy that sampled, so the data may be too old, or a "
    "single step may change the policy too much: lower replay.max_lag or learner.lr"
)
"""The advice for a large `update/k3` if no policy is recomputed at the start of a step."""
FAR_MISMATCH = 1.0
"""A mismatch of engine and learner above this number of nats a token gets a warning for a single step. Data of
older versions rarely explains so much."""
MOST_FADED = 0.5
"""The largest healthy share of tokens whose sequences have weights close to 0 in the loss."""


def runaway_kl(seen: Evidence) -> Finding | None:
    """A KL is far above the values of healthy runs."""
    rows = last_steps(seen, WINDOW, WINDOW)
    for name, (limit, advice) in LARGEST_KL.items():
        values = values_of(rows, name)
        if len(values) == len(rows) > 0 and min(values) > limit:
            found = f"{NAMES[name]} was {fmean(values):.2g} nats a token in {steps_text(rows)}, far more than usual"
            # A mismatch of exactly 0 means that no policy was recomputed: the policy that sampled is used instead.
            from_sampling = name == UPDATE and set(values_of(rows, MISMATCH)) == {0.0}
            return Finding("kl", f"{found}: {FROM_SAMPLING if from_sampling else advice}")
    return _far_mismatch(seen)


def _far_mismatch(seen: Evidence) -> Finding | None:
    """Engine and learner disagreed in one of the newest steps, and far more than in any healthy run."""
    known = {row["step"]: values[0] for row in seen.newest[-LONG_WINDOW:] if (values := values_of([row], MISMATCH))}
    step = max(known, key=known.__getitem__, default=None)
    if step is None or known[step] <= FAR_MISMATCH:
        return None
    found = f"{NAMES[MISMATCH]} was {known[step]:.2g} nats a token in step {step}, far more than usual"
    return Finding("kl", f"{found}: {LARGEST_KL[MISMATCH][1]}")


def faded_weights(seen: Evidence) -> Finding | None:
    """The loss gives most of the tokens a weight close to 0."""
    rows = last_steps(seen, LONG_WINDOW, FEWEST_STEPS)
    shares = values_of(rows, "clip/faded")
    if not shares or fmean(shares) <= MOST_FADED:
        return None
    return Finding(
        "faded",
        f"the loss gave {fmean(shares):.0%} of the tokens of {steps_text(rows)} a weight below 0.01 (clip/faded), so "
        "that most episodes taught next to nothing: their probabilities have changed too much since they were sampled. "
        "Lower replay.max_lag or learner.lr. For long episodes choose an algorithm that weighs tokens, not the product "
        "over a sequence",
    )
