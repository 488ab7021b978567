"""Show the default and the help of options on the site, which `option(default, help)` declares."""

import ast
from typing import Any

import griffe


class DeclaredOptions(griffe.Extension):
    """Shows the default and the help of an option, instead of its declaration."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Read the arguments of `option`."""
        match attr.value:
            case griffe.ExprCall(griffe.ExprName("option"), [default, *others]):
                attr.value = default
                if others and isinstance(others[0], str):
                    text = ast.literal_eval(others[0])
                    attr.docstring = griffe.Docstring(text, parent=attr)
