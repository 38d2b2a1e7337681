"""The ways in which models write JSON, and texts that look like it."""

import json

from tests.scoring.rules.tables.judging import assert_judged, rows

SCHEMA = json.dumps(
    {
        "type": "object",
        "required": ["name", "age"],
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z]"},
            "age": {"type": "number", "minimum": 0, "multipleOf": 0.5},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "more": {},
        },
        "additionalProperties": False,
    }
)
ADA = '{"name": "Ada", "age": 36}'
VALUES = [
    ADA,
    '{"age": 36, "name": "Ada"}',
    '{"name":"Ada","age":36}',
    '{\n  "name": "Ada",\n  "age": 36\n}',
    '{"name": "Ada", "age": 36.0}',
    '{"name": "Ada", "age": 36.5}',
    '{"name": "Ada", "age": 3.6e1}',
    '{"name": "Ada", "age": 0}',
    '{"name": "Ada", "age": 36, "tags": []}',
    '{"name": "Ada", "age": 36, "tags": ["a", "b"]}',
    '{"name": "Ada", "age": 36, "more": null}',
    '{"name": "Ada", "age": 36, "more": {"a": [1, {"b": true}]}}',
    '{"name": "Ada \\u00e9", "age": 36}',
    '{"name": "Émile", "age": 36}'.replace("É", "E"),
    '{"name": "A ``` b", "age": 36}',
]
FRAMES = [
    "{}",
    "  {}\n",
    "```json\n{}\n```",
    "```\n{}\n```",
    "Here it is:\n\n```json\n{}\n```\n\nDone.",
    "~~~json\n{}\n~~~",
    "1. So:\n   ```json\n   {}\n   ```",
    "```JSON\n{}\n```",
    "```json\n{}",
    "```json\n{{}}\n```\nbetter:\n```json\n{}\n```",
    "```json\n{}\n```\nas\n```python\nprint(1)\n```",
    "```\n{}\n```\nwhich is\n```\nnot json\n```",
    "<answer>{}</answer>",
    "<think>{{</think>{}",
]
BAD = rows(r"""
{} | [] | null | 36 | "Ada" | {"name": "Ada"} | {"age": 36} | {"name": "ada", "age": 36} | {"name": 1, "age": 36}
{"name": "Ada", "age": "36"} | {"name": "Ada", "age": -1} | {"name": "Ada", "age": 36.25}
{"name": "Ada", "age": true} | {"name": "Ada", "age": null} | {"name": "Ada", "age": NaN}
{"name": "Ada", "age": Infinity} | {"name": "Ada", "age": -Infinity} | {"name": "Ada", "age": 1e999}
{"name": "Ada", "age": 36, "more": NaN} | {"name": "Ada", "age": 36, "more": [Infinity]}
{"name": "Ada", "age": 36, "more": -1e999} | {"name": "Ada", "age": 36, "extra": 1}
{"name": "Ada", "age": 36, "tags": ["a", "a"]} | {"name": "Ada", "age": 36, "tags": [1]} | {"name": "Ada", "age": 36,}
{'name': 'Ada', 'age': 36} | {name: "Ada", age: 36} | {"name": "Ada", "age": 36 | {"name": "Ada" "age": 36}
{"name": "Ada", "age": 36} // done | {"name": "Ada", "age": 036} | {"name": "Ada", "age": 0x24}
{"name": "Ada", "age": +36} | {"name": "Ada", "age": None}
""")
BAD += ['{"name": "Ada\n", "age": 36}', "[" * 2000]
BAD += [f'{{"name": "Ada", "age": 1{"0" * zeros}}}' for zeros in (400, 5000)]
MORE = [
    f"Here it is: {ADA}",
    f"{ADA}{ADA}",
    f"```json\n{ADA}\n```\n```json\n{{}}\n```",
    f"<think>{ADA}",
    f"{ADA}\nDone.",
]


def test_json_is_judged_by_its_schema():
    values = [(value, SCHEMA) for value in VALUES]
    framed = [
        (frame.replace("{{", "\0").replace("{}", ADA).replace("\0", "{").replace("}}", "}"), SCHEMA) for frame in FRAMES
    ]
    fenced = [(f"```json\n{value}\n```", SCHEMA) for value in VALUES]
    wrong = [(text, SCHEMA) for text in ["", "no json", *BAD, *MORE, *(f"```json\n{each}\n```" for each in BAD)]]
    assert_judged("json_schema", values + framed + fenced, wrong)
