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
    try:
        return float(family(schema, registry=Registry()).is_valid(value))
    except Unresolvable as error:
        raise ScoringError(f"the schema of task {task.id} refers to what it does not hold: {error}") from error
