"""The plan of the house: small rooms, and tests that mirror them."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "gpt_cli"
ROOMS = [PACKAGE, *(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())]


def imported(path: Path) -> set[str]:
    """Return the first names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_rooms_are_small():
    sizes = {room.name: len(list(room.glob("*.py"))) for room in ROOMS}
    assert sizes.pop("gpt_cli") <= 8
    assert {name: size for name, size in sizes.items() if size > 16 + 1} == {}  # and __init__.py


def test_every_folder_of_tests_is_a_room():
    others = {"faults", "fuzz", "golden", "kept", "native", "support"}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - others
    assert {name for name in folders if name[:2] != "__"} <= {room.name for room in ROOMS}


def test_no_test_imports_another():
    modules = {path.stem for path in TESTS.rglob("test_*.py")}
    importing = {path.name for path in TESTS.rglob("*.py") if imported(path) & modules}
    assert importing == set()
