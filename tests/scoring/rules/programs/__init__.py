"""Programs for the rule `code`, as Markdown: a section a program, or a program and its tests."""

import re
from pathlib import Path


def sections(name):
    """The blocks of code of each section of `name`.md, by the section's title."""
    _, *found = re.split(r"^## ", Path(__file__).with_name(f"{name}.md").read_text("utf-8"), flags=re.MULTILINE)
    return {
        each.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```$", each, re.DOTALL | re.MULTILINE) for each in found
    }
