"""What makes a run what it is, in texts that can be saved, compared and read."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Sampler, Subset
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.typing import SparseTensor

from ..loader import AnchorLoader, PartitionLoader

__all__ = ['describe_run', 'differences']

_WORDS = {
    'data.x': 'the features',
    'data.y': 'the labels',
    'data.edge_index': 'the edges',
    'data.adj_t': 'the edges',
    'data.edge_weight': 'the edge weights',
}


def describe_run(
    model: Module, data: Data | Mapping[str, Any], **settings: Any
) -> dict[str, str]:
    """Describes a run by its settings, its model (the classes, public attributes and
    parameters of all modules) and a digest of all its data.

    It is the same in every process, and whatever values the parameters have. Of the
    loaders of splits it tells batch sizes and samplers. Their data sets are known by
    the tensors they hold in memory, or else by the first and the last item.
    """
    found = dict(_module('model', model, _shape))
    for name, value in settings.items():
        if isinstance(value, Module):  # such as a loss with weights
            found.update(_module(name, value, _digest))
        else:
            found[name] = _text(value)
    if isinstance(data, Data):
        parts = data.to_dict()
        found.update((f'data.{key}', _text(value)) for key, value in parts.items())
    else:
        stored: dict[int, str] = {}
        for split, loader in data.items():
            found.update(_loader(split, loader, stored))
    return found


def differences(here: dict[str, str], there: dict[str, str], most: int = 4) -> str:
    """Says in which parts two descriptions differ."""
    parts = []
    for key in {**here, **there}:
        if here.get(key) == there.get(key):
            continue
        if key in _WORDS:
            parts.append(f"{_WORDS[key]} '{key}' differ")
        elif key.startswith('data.'):
            parts.append(f"'{key}' differs")
        else:
            parts.append(f"'{key}' is {there.get(key)} instead of {here.get(key)}")
    more = [f'{len(parts) - most} more'] if len(parts) > most else []
    return ', '.join(parts[:most] + more)


def _loader(
    split: str, loader: Any, stored: dict[int, str]
) -> Iterator[tuple[str, str]]:
    name = f'loader.{split}'
    yield name, _name(type(loader))
    if isinstance(loader, AnchorLoader):
        yield f'{name}.anchors', _text(loader.anchors)
        loader = loader.loader
        yield f'{name}.loader', _name(type(loader))
    dataset = loader
    if isinstance(loader, DataLoader):
        dataset = loader.dataset
        # The sampler of single items is not used where another one gives batches.
        batches = loader.batch_sampler
        sampler = loader.sampler if batches is None else batches
        yield from _sampler(f'{name}.sampler', sampler)
        yield f'{name}.collate_fn', _text(loader.collate_fn)
        yield f'{name}.generator', _text(loader.generator)
    yield from _dataset(f'data.{split}', dataset, stored)
    whole = getattr(loader, 'data', None)  # which batches of nodes are of
    whole = getattr(getattr(loader, 'cluster_data', None), 'data', whole)
    if isinstance(whole, BaseData):
        if id(whole) not in stored:
            stored[id(whole)] = _text(whole)
        yield f'data.{split}.whole', stored[id(whole)]
    if isinstance(loader, PartitionLoader):
        yield f'data.{split}.part', _text(loader.part)


def _sampler(name: str, sampler: Any) -> Iterator[tuple[str, str]]:
    yield name, _name(type(sampler))
    for key, value in _public(sampler):
        if isinstance(value, Sampler):
            yield from _sampler(f'{name}.{key}', value)
        elif isinstance(value, (bool, str, Real, Tensor, torch.Generator)):
            yield f'{name}.{key}', _text(value)
        elif isinstance(value, (Sequence, np.ndarray)) and key != 'data_source':
            yield f'{name}.{key}', _long(value)


def _dataset(
    name: str, dataset: Any, stored: dict[int, str]
) -> Iterator[tuple[str, str]]:
    if not hasattr(dataset, '__len__') or not hasattr(dataset, '__getitem__'):
        yield name, _text(dataset)
        return
    size = len(dataset)
    yield f'{name}.length', _text(size)
    if size > 0:
        yield f'{name}.first', _text(dataset[0])
        yield f'{name}.last', _text(dataset[size - 1])
    while isinstance(dataset, Subset):
        yield f'{name}.indices', _long(dataset.indices)
        dataset, name = dataset.dataset, f'{name}.whole'
    if isinstance(dataset, InMemoryDataset):
        yield f'{name}.indices', _long(dataset.indices())
        # Parts of the same data set share what it holds.
        key = id(dataset._data)
        if key not in stored:
            stored[key] = _text([dataset._data, dataset.slices])
        yield f'{name}.stored', stored[key]


def _long(values: Any) -> str:
    # An array or a tensor gives the numbers of Python.
    values = values.tolist() if hasattr(values, 'tolist') else values
    return _hash(_joined(map(_text, values)).encode())


def _module(name: str, module: Module, tensor: Any) -> Iterator[tuple[str, str]]:
    for path, part in module.named_modules(prefix=name):
        yield path, _name(type(part))
        for key, value in _public(part):
            # A tensor that is no buffer is a cache, and `None` one not filled yet.
            if value is not None and not isinstance(value, Tensor):
                yield f'{path}.{key}', _text(value)
    for path, value in (*module.named_parameters(name), *module.named_buffers(name)):
        yield path, tensor(value)


def _public(value: Any) -> Iterator[tuple[str, Any]]:
    for key, attribute in getattr(value, '__dict__', {}).items():
        if not key.startswith('_') and key != 'training':
            yield key, attribute


def _text(value: Any) -> str:
    # No address, and no order of a set: both are others in the next process.
    if value is None or isinstance(value, (bool, torch.dtype, torch.device, Enum)):
        return str(value)
    if isinstance(value, (str, bytes)):
        return repr(str(value) if isinstance(value, str) else value)
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):  # 1 and 1.0 are the same setting
        number = float(value)
        return str(int(number) if number.is_integer() else number)
    if isinstance(value, Tensor):
        return _digest(value)
    if isinstance(value, SparseTensor):
        return _text([value.sizes(), *value.csr()])
    if isinstance(value, BaseData):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return _joined(f'{_text(k)}: {_text(v)}' for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return _joined(map(_text, value))
    if isinstance(value, (set, frozenset)):
        return _joined(sorted(map(_text, value)))
    if isinstance(value, functools.partial):
        return f'{_text(value.func)}{_text([value.args, value.keywords])}'
    if inspect.ismethod(value):
        return f'{_name(value)} of {_text(value.__self__)}'
    if inspect.isfunction(value) and '<' in value.__qualname__:
        # Of functions in functions, and of lambdas, many have the same name.
        return f'{_name(value)} {_hash(_code(value.__code__).encode())}'
    if hasattr(value, '__qualname__') or hasattr(value, '__name__'):
        return _name(value)
    plain = (bool, str, Real)
    found = (f'{k}={_text(v)}' for k, v in _public(value) if isinstance(v, plain))
    return f'{_name(type(value))}{_joined(found)}'


def _joined(texts: Iterable[str]) -> str:
    return f'({", ".join(texts)})'


def _name(value: Any) -> str:
    name = getattr(value, '__qualname__', None) or value.__name__
    module = getattr(value, '__module__', None)
    return f'{module}.{name}' if module else name


def _code(code: CodeType) -> str:
    consts = [_code(c) if isinstance(c, CodeType) else _text(c) for c in code.co_consts]
    return repr((code.co_code, code.co_names, consts))


def _shape(value: Tensor) -> str:
    if is_lazy(value):
        return 'not initialized'
    text = f'{str(value.dtype).removeprefix("torch.")} {list(value.shape)}'
    frozen = isinstance(value, torch.nn.Parameter) and not value.requires_grad
    return f'{text} (frozen)' if frozen else text


def _digest(value: Tensor) -> str:
    if hasattr(value, 'as_tensor'):  # 'EdgeIndex' and 'Index' of PyG
        value = value.as_tensor()
    parts = [value.detach()]
    if value.layout != torch.strided:
        coo = parts[0].to_sparse_coo().coalesce()
        parts = [coo.indices(), coo.values()]
    flat = (part.cpu().contiguous().flatten().view(torch.uint8) for part in parts)
    layout = str(value.layout).removeprefix('torch.')
    return f'{_shape(value)} {layout} {_hash(*(part.numpy() for part in flat))}'


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
