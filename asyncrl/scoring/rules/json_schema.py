"""The answer is JSON that the ground truth, a JSON schema, accepts (the extra asyncrl[json])."""

from __future__ import annotations

import json
from typing import Any

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.text import last_block
from asyncrl.types import Task, Trajectory

try:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
except ImportError as error:
    raise ConfigError("the rule json_schema needs the extra: pip install 'asyncrl[json]'") from error


def json_schema(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the answer, or its last fenced block, is JSON that fits the schema, else 0. References to other
    documents are not fetched.

    Raises ScoringError: the ground truth is no JSON schema, or refers to another document.
    """
    try:
        schema = json.loads(task.ground_truth)
        family = validator_for(schema)
        family.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ScoringError(f"the ground truth of task {task.id} is no JSON schema: {error}") from error
    try:
        value: Any = json.loads(last_block(answer))
    except (ValueError, RecursionError):
        return 0.0
    validator = family(schema, registry=Registry())
    try:
        return float(validator.is_valid(value))
    except RecursionError as error:
        if _ends(validator):
            return 0.0
        raise ScoringError(f"the schema of task {task.id} refers to itself without end") from error
    except Unresolvable as error:
        raise ScoringError(f"the schema of task {task.id} refers to what it does not hold: {error}") from error


def _ends(validator: Any) -> bool:
    """Whether the schema can be judged by; then it was the answer that is nested too deep."""
    try:
        validator.is_valid(None)
    except RecursionError:
        return False
    return True
