"""One client's code for several at once."""

import pytest
import torch
from torch import Tensor
from torch._C._functorch import pop_dynamic_layer_stack
from torch.func import vmap

from personafl.fast.stack import Outside, Stack, stack_around, stacked, transformed

X = torch.arange(6.0).reshape(3, 2)


def test_it_is_vmap() -> None:
    def one(x: Tensor) -> Tensor:
        return x.softmax(-1) @ x

    assert torch.equal(stacked(3, lambda stack: stack.plain(one(stack.each(X)))), vmap(one)(X))


def test_what_clients_share_is_expanded() -> None:
    assert stacked(3, lambda stack: stack.plain(X)).shape == (3, 3, 2)


def test_the_stack_is_around_but_not_outside() -> None:
    def look(stack: Stack) -> list[object]:
        with Outside():
            return [stack_around()]

    assert stacked(3, lambda stack: (stack_around(), stack)) == ((1, 3), (1, 3))
    assert stacked(3, look) == [None]
    assert not transformed()


@pytest.mark.parametrize("left", [True, False])
def test_it_ends_with_an_interrupt(left: bool) -> None:
    """Also with one that comes while the vmap is left, when there is none to come back to."""

    def interrupted(stack: Stack) -> None:
        if left:
            pop_dynamic_layer_stack()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stacked(3, interrupted)
    assert not transformed()
    test_it_is_vmap()
