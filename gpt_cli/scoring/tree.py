"""The likeliest continuations of a text, as a tree."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count as count_from_0
from typing import NamedTuple

from gpt_cli.errors import counted
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, hidden_states, unembed
from gpt_cli.texts.measures import likeliest
from gpt_cli.texts.result import Recorded, Result, beginning
from gpt_cli.texts.text import Text, editing_hook


@dataclass(repr=False)
class Node(Result):
    """A possible next token, and its continuations."""

    id: int  # of the token
    logprob: float  # in nats, after all tokens before it
    total_logprob: float  # of the continuation that ends with it
    children: list["Node"] = field(default_factory=list)  # possible next tokens, likeliest first

    def _facts(self) -> str:
        return f"id {self.id}, logprob {self.logprob:.4g}, {len(self.children)} children"


class Tree(Recorded, list[Node]):
    """The likeliest continuations of a prompt: its possible next tokens, likeliest first."""

    def __init__(self, nodes: Iterable[Node], prompt: str):
        super().__init__(nodes)
        self.prompt: str = prompt

    def _facts(self) -> str:
        return f"{counted(_size(self), 'continuation')} of {beginning(self.prompt)}"


def _size(nodes: Sequence[Node]) -> int:
    """Return the number of all nodes of a tree."""
    return sum(1 + _size(node.children) for node in nodes)


class _Candidate(NamedTuple):
    """A node that may be in the tree. In a heap, the likeliest is first, then the oldest."""

    negative_logprob: float  # of the path
    number: int
    node: Node
    path: list[int]  # its ids after the text
    siblings: list[Node]  # those in the tree


def tree(model: GPT2, text: Text, count: int) -> list[Node]:
    """Return the `count` likeliest continuations of a text of 1 to n_positions tokens.

    They have any length. None is likelier than a prefix of it, so they form a tree, and
    best-first search finds exactly them. Nothing follows the end token or a full context.
    """
    ops = model.ops
    config = model.config
    ids = text.ids
    hook = editing_hook([text], ops)
    cache = KVCache(config, ops, 1, min(len(ids) + count, config.n_positions))
    numbers = count_from_0()
    waiting: list[_Candidate] = []  # a heap

    def follow(path: list[int], total: float, children: list[Node], max_children: int) -> None:
        """Queue the likeliest next tokens of a path, which may become its children."""
        x = hidden_states(model, ops.xp.asarray([path or ids]), cache, hook=hook)
        cache.rewind(cache.lengths - len(path))  # back to the prompt
        best = likeliest(ops, unembed(model, x[:, -1], hook), max_children)
        best_ids, logprobs = (ops.to_host(row[0]).tolist() for row in best)
        for id, logprob in zip(best_ids, logprobs, strict=True):
            node = Node(id, logprob, total + logprob)
            candidate = _Candidate(-node.total_logprob, next(numbers), node, [*path, id], children)
            heapq.heappush(waiting, candidate)

    roots: list[Node] = []
    follow([], 0.0, roots, count)
    while waiting and count:
        count -= 1
        best = heapq.heappop(waiting)
        node = best.node
        best.siblings.append(node)
        fits = len(ids) + len(best.path) <= config.n_positions
        if count and fits and node.id not in config.eos_token_id:
            follow(best.path, node.total_logprob, node.children, count)
    return roots
