"""Tensors computed once, but not once without gradient for those who need one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ['LastTensor', 'cached_tensor']

T = TypeVar('T')


class cached_tensor(Generic[T]):
    """Like :func:`functools.cached_property`; what was computed under
    :func:`torch.no_grad` is computed again when gradients are wanted.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f'_cached_{name}'

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        known = instance.__dict__.get(self.name)
        if known is None or (torch.is_grad_enabled() and not known[1]):
            known = self.__set__(instance, self.compute(instance))
        return known[0]

    def __set__(self, instance: Any, value: T) -> tuple[T, bool]:
        known = instance.__dict__[self.name] = (value, torch.is_grad_enabled())
        return known


class LastTensor:
    """What was computed from a tensor last: not computed again from the same one,
    unless it was done under :func:`torch.no_grad` and gradients are wanted now.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor, bool] | None = None

    def knows(self, argument: Tensor) -> bool:
        """Whether nothing needs to be computed."""
        if self._known is None or self._known[0] is not argument:
            return False
        return self._known[2] or not torch.is_grad_enabled()

    def set(self, argument: Tensor, result: Tensor) -> None:
        """Keeps a result."""
        self._known = (argument, result, torch.is_grad_enabled())

    @property
    def value(self) -> Tensor:
        """The result that is kept."""
        assert self._known is not None
        return self._known[1]

    def get(self, argument: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The result for an argument."""
        if not self.knows(argument):
            self.set(argument, compute(argument))
        return self.value
