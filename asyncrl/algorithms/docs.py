"""Lists all parts of algorithms by kind and name: `asyncrl algorithms [KIND ...] [--json]` prints them, and `python -m
asyncrl.algorithms.docs docs/algorithms.md` writes the tables of that page. Both read the classes of the parts."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.algorithms import registry
from asyncrl.algorithms.parts import Part, card
from asyncrl.algorithms.presets import HEAD, preset_rows
from asyncrl.config.option import Option

TABLES = re.compile(r"(<!-- parts of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""The marks around the tables of one kind of parts on the page."""
PRESETS = re.compile(r"(<!-- presets -->\n).*?(<!-- end -->)", re.DOTALL)


def table(kinds: Sequence[str] = tuple(registry.HOMES)) -> list[dict[str, Any]]:
    """An entry for each part: kind, name, summary, formula, use, source, caveat (if the part has one) and
    parameters."""
    return [_entry(part) for kind in kinds for part in registry.parts(kind).values()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list, with --json as a JSON array."""
    parser = argparse.ArgumentParser(
        prog="asyncrl algorithms", description="List every part with its formula and parameters."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"only these kinds: {', '.join(registry.HOMES)}")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of text")
    options = parser.parse_args(argv)
    unknown = [kind for kind in options.kinds if kind not in registry.HOMES]
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}; use {', '.join(registry.HOMES)}")
    entries = table(tuple(dict.fromkeys(options.kinds)) or tuple(registry.HOMES))
    sys.stdout.write(json.dumps(entries, indent=2) + "\n" if options.json else _text(entries))
    return 0


def shown(value: Any) -> str:
    """A default in YAML's notation."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _entry(part: type[Part]) -> dict[str, Any]:
    described = [_parameter(parameter) for parameter in part.parameters()]
    return {"kind": part.kind, "name": part.name, **card(part), "parameters": described}


def _parameter(parameter: Option) -> dict[str, Any]:
    default = {} if parameter.required else {"default": _plain(parameter.default)}
    return {"name": parameter.name, **default, "allowed": parameter.allowed, "meaning": parameter.meaning}


def _plain(value: Any) -> Any:
    """A value for JSON. Infinity becomes text, since JSON has no infinity."""
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


def page(text: str) -> str:
    """The page `text` with new tables."""
    presets = "".join(map(_line, [HEAD, ["---"] * len(HEAD), *preset_rows()]))
    text = PRESETS.sub(lambda place: place[1] + presets + place[2], text)
    return TABLES.sub(lambda place: place[1] + _tables(place[2]) + place[3], text)


def _tables(kind: str) -> str:
    entries = table([kind])
    return (
        "| name | formula | when to use it | source |\n| --- | --- | --- | --- |\n"
        f"{''.join(map(_row, entries))}\n"
        "| parameter of | parameter | default | allowed | meaning |\n| --- | --- | --- | --- | --- |\n"
        f"{''.join(_parameters(entries))}"
    )


def _row(entry: dict[str, Any]) -> str:
    use = entry["use"] + (f". Caveat: {entry['caveat']}" if "caveat" in entry else "")
    return _line([f"`{entry['name']}`", entry["formula"], use, entry["source"]])


def _parameters(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each parameter. Parts with the same parameter and the same default share a row."""
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
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text()))
