"""Show the Python API on the site: exactly the names that tests/kept/listing.json keeps.

A class lists its attributes and options, with their docstrings, their comments or their help.
"""

import ast
import json
from pathlib import Path
from typing import Any

import griffe

LISTING = Path(__file__).parents[1] / "tests" / "kept" / "listing.json"


class KeptNames(griffe.Extension):
    """Gives classes the members that are kept, and docstrings with the attributes."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Show the default and the help of an option, which `option(default, help)` declares."""
        match attr.value:
            case griffe.ExprCall(griffe.ExprName("option"), [default, *others]):
                attr.value = default
                if others and isinstance(others[0], str):
                    text = ast.literal_eval(others[0])
                    attr.docstring = griffe.Docstring(text, parent=attr)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the classes when all are known, since some inherit what others do not keep."""
        listing, known = json.loads(LISTING.read_bytes())["Python"], pkg.modules_collection
        classes = [
            (known[known[f"{module}.{name}"].canonical_path], kept)
            for module, names in listing.items()
            for name, kept in names.items()
            if "members" in kept
        ]
        changes = [(cls, _members(cls, kept), _text(cls, kept)) for cls, kept in classes]
        names = {cls.name for cls, _ in classes}
        for cls, members, text in changes:
            cls.members, cls.docstring.value = members, text
            cls.bases = [base for base in cls.bases if str(base) in names]
            for member in members.values():
                if member.is_attribute:
                    member.docstring = None  # that of the class has it


def _members(cls: griffe.Class, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the kept members of a class, its own before others, and its constructor."""
    known = cls.members | cls.inherited_members
    names = kept["members"].keys() | ({"__init__"} if "parameters" in kept else set())
    if missing := names - known.keys():
        raise KeyError(f"{cls.path} has no {missing} where griffe looks for them")
    return {
        name: member if name in cls.members else griffe.Alias(name, member.target, parent=cls)
        for name, member in known.items()
        if name in names
    }


def _text(cls: griffe.Class, kept: dict[str, Any]) -> str:
    """Return the docstring of a class with sections about its parameters and other attributes."""
    parameters = kept.get("parameters", {})
    others = {name: member for name, member in kept["members"].items() if name not in parameters}
    text = cls.docstring.value
    for title, names in ("Args", parameters), ("Attributes", others):
        lines = [
            f"    {name}: {description}".replace("\n", "\n        ")
            for name, member in cls.all_members.items()
            if name in names and member.is_attribute
            if (description := _description(member, names[name])) or names is others
        ]
        text += "\n".join([f"\n\n{title}:", *lines]) if lines else ""
    return text


def _description(attribute: griffe.Attribute, kept: dict[str, Any]) -> str:
    """Return the value of an attribute if it is kept, or else its docstring or its comment."""
    if "value" in kept:
        return f"`{kept['value']}`"
    if attribute.docstring:
        return attribute.docstring.value
    return attribute.lines[-1].partition("  # ")[2]
