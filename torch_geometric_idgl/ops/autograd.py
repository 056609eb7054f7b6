"""What the package's own autograd functions have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ['first_order']


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
