"""verl's types of tools: OpenAI schemas, calls, and what a tool answers.

They need pydantic, as in verl. Fields that these types do not have are ignored: of a parameter's JSON schema, only
type, description and enum stay.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, field_validator


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a function. Several types may be allowed."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All parameters of a function, by name."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function that the policy may call."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema(
        type="object", properties={}, required=[]
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in the form that chat templates and OpenAI's API take."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as the policy wrote it: `arguments` is JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call whose arguments were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Read the arguments. The second value is true, and there are no arguments, if the text is not a JSON
        object."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_object = isinstance(arguments, dict)
        call = OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments if is_object else {})
        return call, not is_object


class OpenAIFunctionToolCall(BaseModel):
    """A call with the id by which its answer refers to it."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """The answer of a tool: a text, and lists of images and videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"it must be a list, even if it has one element; it is {type(value).__name__}")
        return value

    def is_empty(self) -> bool:
        """True if nothing is answered."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """True if the answer is a text alone."""
        return bool(self.text) and not (self.image or self.video)
