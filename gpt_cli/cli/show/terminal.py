"""What `gpt-cli show` shows, in text: blocks of colour, or characters where there is none."""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text
from rich.tree import Tree as Lines

from gpt_cli.cli.show import views
from gpt_cli.cli.text import quoted, visible
