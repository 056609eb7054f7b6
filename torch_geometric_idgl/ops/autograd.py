"""What the package's own autograd functions have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

__all__ = ['first_order', 'no_random_numbers']


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives, which closed forms would silently get wrong."""

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                'Expected first derivatives only, as learned graphs are differentiated '
                'in closed form (got create_graph=True)'
            )
        return backward(ctx, *grads)

    return wrapper


@contextmanager
def no_random_numbers(name: str, device: torch.device) -> Iterator[None]:
    """Refuse a function that draws random numbers: what is computed block by block, and
    again in the backward pass, would be another function each time.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before = _rng_states(device)
    yield
    if not all(map(torch.equal, before, _rng_states(device))):
        raise RuntimeError(
            f"Expected the '{name}' to be a function of its arguments (got one that "
            f'draws random numbers; take its dropout out, or leave it in evaluation '
            f'mode)'
        )


def _rng_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == 'cuda':
        states.append(torch.cuda.get_rng_state(device))
    return states
