"""The operations that the model is written in.

All optimized code lives behind `Ops`. `numpy_ops` is the reference that the other implementations
are tested against.
"""

from gpt_cli.ops.contract import Array as Array
from gpt_cli.ops.contract import AttentionSteps as AttentionSteps
from gpt_cli.ops.contract import DraftOps as DraftOps
from gpt_cli.ops.contract import LayerNorm as LayerNorm
from gpt_cli.ops.contract import Linear as Linear
from gpt_cli.ops.contract import Matrix as Matrix
from gpt_cli.ops.contract import Ops as Ops
from gpt_cli.ops.contract import Rows as Rows
from gpt_cli.ops.select import check_available as check_available
from gpt_cli.ops.select import get_ops as get_ops
from gpt_cli.ops.select import ops_for as ops_for
