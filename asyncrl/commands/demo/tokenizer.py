"""The demo's tokenizer: one token for each byte, and one for each fixed phrase. Any text can be encoded and decoded
without a change.

The chat template has Qwen's form: `<|im_start|>role ... <|im_end|>`, hermes tool calls, and tool results as
`<tool_response>` in a user turn. Consecutive tool results share a turn. To keep prompts short, tools are listed only by
name and parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.commands.demo.arithmetic import SYSTEM_PROMPT

END_OF_TURN = "<|im_end|>"
ASSISTANT_MARK = "assistant\n"

_PADDING = "<|endoftext|>"
_SPECIAL = (_PADDING, "<|im_start|>", END_OF_TURN)
_PHRASES = (
    "system\n",
    "user\n",
    "assistant\n",
    SYSTEM_PROMPT,
    "\n\n# Tools\n",
    "calculator(operator, expression)",
    "<tool_call>",
    "</tool_call>",
    '<tool_call>\n{"name": "calculator", "arguments": {"operator": "',
    '", "expression": "',
    '"}}\n</tool_call>',
    "user\n<tool_response>\n",
    "\n</tool_response>",
)
_OF_THE_DEMO = (SYSTEM_PROMPT, "calculator(operator, expression)", '", "expression": "')
"""Phrases that only the demo's own task needs."""

CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n' }}
        {%- for tool in tools %}
            {%- set function = tool.function if tool.function is defined else tool %}
            {{- function.name + '(' + (function.parameters.properties | default({}) | join(', ')) + ')' }}
            {{- '' if loop.last else '\\n' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(own: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """Build the tokenizer, which is the same at every call. Its EOS token ends a turn. `own` has the phrases of another
    task, which replace the demo's own phrases.
    """
    phrases = _PHRASES if own is None else (*(each for each in _PHRASES if each not in _OF_THE_DEMO), *own)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=_PADDING,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
