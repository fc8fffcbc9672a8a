"""Imports go down only: a room may import the rooms below it, and nothing else of ours."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "kimi_hf"
# room -> rooms it may import besides itself and `errors`
BELOW = {
    "configuration": set(),
    "ops": set(),
    "checkpoint": {"configuration"},
    "storage": {"checkpoint"},
    "modeling": {"configuration", "ops", "checkpoint", "storage"},
    "quantization": {"configuration", "ops", "checkpoint", "modeling"},
    "processing": {"configuration"},
    "training": {"configuration", "ops", "modeling", "quantization"},
    "conversion": {"configuration", "ops", "checkpoint", "modeling", "quantization", "processing"},
}


def imported_rooms(path: Path) -> set[str]:
    """First-level rooms of kimi_hf that a file imports, wherever the import stands."""
    package = ("kimi_hf", *path.relative_to(ROOT).parent.parts)
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            inner = (node.module or "").split(".") if node.module else []
            names = [[*base, *inner]] if inner else [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")]
        else:
            continue
        rooms |= {name[1] for name in names if name[0] == "kimi_hf" and len(name) > 1}
    return rooms


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_what_is_below_it(room):
    allowed = BELOW[room] | {room, "errors"}
    for path in (ROOT / room).rglob("*.py"):
        above = imported_rooms(path) - allowed
        assert not above, f"{path.relative_to(ROOT.parent)} imports {sorted(above)}, which lie above {room}"


@pytest.mark.parametrize("room, forbidden", [("ops", ("transformers",)), ("configuration", ("torch",))])
def test_a_room_does_without(room, forbidden):
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert name.split(".")[0] not in forbidden, f"{path} imports {name}"
