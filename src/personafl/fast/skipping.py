"""What no client needs is not computed.

A rule that is written for one client and stacked has no branches: `core.tree.when` computes what it may need and keeps
it where a condition holds. On a CPU the condition can be looked at first: where it holds for none of the clients that
are trained together, the other value is the result, to the bit. A GPU is not waited for, and a graph of its work has no
branches either.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from personafl.core import tree
from personafl.core.seam import definition
from personafl.fast.stack import stack_around, transformed

T = TypeVar("T")


def when(condition: Tensor, then: Callable[[], T], otherwise: T) -> T:
    """Return what `core.tree.when` does."""
    return definition(tree.when)(condition, then, otherwise) if _may_hold(condition) else otherwise


def _may_hold(condition: Tensor) -> bool:
    """Say whether a condition holds for some client, or cannot be looked at."""
    stack = stack_around()
    if type(condition) is not Tensor or condition.device.type != "cpu" or (stack is None and transformed()):
        return True
    return bool((condition if stack is None else stack.plain(condition)).any())
