"""The structs of Python and of C are the same, byte for byte."""

import ctypes
import os
import shlex
import shutil
import subprocess

import pytest

from gpt_cli.ops import bindings
from hatch_build import NATIVE

COMPILER = shlex.split(os.environ.get("CC") or "cc")


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="needs a C compiler")
def test_each_struct_has_the_size_and_the_offsets_of_c(tmp_path):
    lines, expected = [], []
    for name, kind in bindings.STRUCTS.items():
        tag = f"struct {name}"
        lines.append(f"sizeof({tag}), (size_t)0")
        expected.append([name, ctypes.sizeof(kind), 0])
        for field, type_ in kind._fields_:
            lines.append(f"offsetof({tag}, {field}), sizeof((({tag} *)0)->{field})")
            expected.append([f"{name}.{field}", getattr(kind, field).offset, ctypes.sizeof(type_)])
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "native.h"\nint main(void) {\n'
        + "".join(f'printf("%zu %zu\\n", {line});\n' for line in lines)
        + "return 0; }\n"
    )
    program = tmp_path / "offsets"
    subprocess.run([*COMPILER, f"-I{NATIVE}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    numbers = [list(map(int, line.split())) for line in output.splitlines()]
    names = [name for name, *_ in expected]
    assert dict(zip(names, numbers, strict=True)) == {name: rest for name, *rest in expected}


@pytest.mark.usefixtures("library")
def test_the_library_exports_the_formats():
    layout = bindings.layout()
    formats = [storage.name for storage in layout.storage[: layout.formats]]
    assert formats == [b"float32", b"bfloat16", b"float16", b"int8"]
