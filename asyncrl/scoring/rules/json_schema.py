"""The answer is JSON that the ground truth, a JSON schema, accepts (needs the extra asyncrl[json])."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.confined import Confined
from asyncrl.scoring.rules.text import fenced_blocks, tagged
from asyncrl.types import Task, Trajectory

try:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
except ImportError as error:
    raise ConfigError(f"the rule json_schema needs the extra: pip install 'asyncrl[json]' ({error})") from error


def json_schema(
    task: Task, answer: str, trajectory: Trajectory, *, confined: Confined, cpu_s: float = 2.0
) -> Mapping[str, float]:
    """`score` is 1 if the answer, or its last fenced block of JSON, fits the schema, else 0. NaN, infinities and
    numbers too large for a float are not accepted. References to other documents are not fetched. If the check takes
    over `cpu_s` seconds of processor time or too much memory, for example by a costly `pattern`, `score` is 0 and
    `out_of_time` or `out_of_memory` is 1.

    Raises ScoringError: the ground truth is not a JSON schema, or refers to another document.
    """
    return confined(_validator, _accepts, task.truth_text, answer, cpu_s)


def _validator(truth: str) -> Any:
    try:
        schema = json.loads(truth)
        family = validator_for(schema)
        family.check_schema(schema)
    except (ValueError, TypeError, SchemaError) as error:
        raise ScoringError(f"the ground truth is not a JSON schema: {error}") from error
    return family(schema, registry=Registry())


def _accepts(validator: Any, answer: str) -> float:
    read = [each for text in _texts(answer) if (each := _read(text))]
    if not read:
        return 0.0
    (value,) = read[-1]
    try:
        return float(validator.is_valid(value))
    except OverflowError:  # The schema compares a float with an integer too large for a float.
        return 0.0
    except RecursionError:
        # Either the answer is nested too deeply, or the schema cannot check any answer. The check of None tells which.
        try:
            validator.is_valid(None)
        except RecursionError as error:
            raise ScoringError("the schema refers to itself without end") from error
        return 0.0
    except Unresolvable as error:
        raise ScoringError(f"the schema refers to something outside itself: {error}") from error


def _texts(answer: str) -> list[str]:
    """The texts that may be the JSON: the last block marked as JSON, else all blocks, else the whole answer."""
    blocks = list(fenced_blocks(answer))
    marked = [each.body for each in blocks if each.language in ("json", "jsonc", "json5")][-1:]
    return marked or [each.body for each in blocks] or [tagged(answer)]


def _read(text: str) -> tuple[Any] | None:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def finite(number: str) -> float:
        return value if math.isfinite(value := float(number)) else refuse(number)

    try:
        return (json.loads(text, parse_constant=refuse, parse_float=finite),)
    except (ValueError, RecursionError):
        return None
