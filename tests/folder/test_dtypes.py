"""The table of the types of weights, beside what says the same in other places."""

import re
from pathlib import Path

import gpt_cli
from gpt_cli.folder.dtypes import NAMES, NAMES_OF_CODES, SHORT, WEIGHT_TYPES
from gpt_cli.ops.int8 import GROUP
from support.cuda_kernels import FORMATS

PACKAGE = Path(gpt_cli.__file__).parent


def test_the_order_is_that_of_the_kernels():
    assert [*NAMES] == FORMATS
    source = (PACKAGE / "ops" / "native" / "kernels.h").read_text("utf-8")
    listed = re.search(r"enum format \{(.*?)\}", source, re.DOTALL)
    assert [name.lower() for name in re.findall(r"[A-Z]+\d+", listed[1])] == [*NAMES]


def test_sizes_are_those_of_the_types():
    sizes = {name: kind.itemsize for name, kind in WEIGHT_TYPES.items()}
    assert sizes == {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1 + 2 / GROUP}
    assert {name for name, size in sizes.items() if size == 2} == {*SHORT}


def test_codes_are_those_of_safetensors():
    codes = {code: int(re.search(r"\d+", code)[0]) // 8 for code in NAMES_OF_CODES}
    assert codes == {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}
