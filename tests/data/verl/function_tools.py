"""Function tools written for verl."""

from verl.tools.function_tool import function_tool


@function_tool
def shout(text: str, times: int = 1) -> str:
    """Shouts a text.

    Args:
        text: What to shout.
        times: How often.
    """
    return text.upper() * times


@function_tool("judge")
async def _judge(text: str) -> tuple:
    """Judges a text.

    Args:
        text: What to judge.
    """
    return {"said": text}, 0.5 if text == "good" else None, {"n": 1}
