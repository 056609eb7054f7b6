"""Pretrained word vectors for a vocabulary."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_at_least
from .text import UNKNOWN

__all__ = ['WordVectors', 'load_word_vectors']


class WordVectors(NamedTuple):
    r"""The vectors of the words of a vocabulary.

    Attributes:
        weight (torch.Tensor): The vectors, of shape :obj:`[len(vocab), d]`, as for
            :meth:`torch.nn.Embedding.from_pretrained`.
        found (torch.Tensor): Whether a word has a pretrained vector, of shape
            :obj:`[len(vocab)]`. The others are random.
    """

    weight: Tensor
    found: Tensor


def load_word_vectors(
    path: str | os.PathLike,
    vocab: Sequence[str],
    seed: int = 0,
    normalize: bool = False,
) -> WordVectors:
    r"""Reads the vectors of the words of a vocabulary.

    Files are read line by line, and only words of the vocabulary are kept. The first
    one counts if a word is there twice. Words that are not there, and :obj:`"<unk>"`,
    get normally distributed vectors, with the mean and the standard deviation of each
    column of the vectors that were found. They do not depend on the order of the file.

    .. code-block:: python

        weight, found = load_word_vectors('glove.840B.300d.txt', dataset.vocab)
        embedding = torch.nn.Embedding.from_pretrained(weight)
        print(f'{found.float().mean():.0%} of the vocabulary and '
              f'{found[dataset.token].float().mean():.0%} of the texts')

    Args:
        path (str): A text file with a word and its numbers in each line, as those of
            GloVe are, with or without the first line of word2vec (the numbers of words
            and columns); compressed if its name ends with :obj:`.gz`. Or an
            :obj:`.npz` file with the arrays :obj:`words`, :obj:`vectors` and, if they
            are not in the same order, :obj:`row` (the row in :obj:`vectors` of each
            word).
        vocab (list[str]): The words.
        seed (int, optional): The seed of random vectors. (default: :obj:`0`)
        normalize (bool, optional): If set to :obj:`True`, vectors are scaled to unit
            length. (default: :obj:`False`)
    """
    check_at_least('seed', seed, 0, integer=True)
    path = Path(path).expanduser()
    index = {word: i for i, word in enumerate(vocab)}
    if len(index) != len(vocab):
        raise ValueError(
            f"Expected 'vocab' to hold different words (got {len(index)} different "
            f'ones of {len(vocab)})'
        )
    index.pop(UNKNOWN, None)

    read = _read_npz if path.suffix == '.npz' else _read_text
    vectors = read(path, index)
    if not vectors:
        raise ValueError(f"None of the {len(index)} words has a vector in '{path}'")
    rows = sorted(vectors)
    known = torch.from_numpy(np.stack([vectors[row] for row in rows]))
    found = torch.zeros(len(vocab), dtype=torch.bool)
    found[rows] = True

    generator = torch.Generator().manual_seed(int(seed))
    weight = torch.randn(len(vocab), known.size(1), generator=generator)
    weight = known.mean(dim=0) + known.std(dim=0, correction=0) * weight
    weight[found] = known
    return WordVectors(F.normalize(weight) if normalize else weight, found)


def _read_text(path: Path, index: Mapping[str, int]) -> dict[int, np.ndarray]:
    # Words are compared as bytes, and numbers are read for those of the vocabulary
    # only: this is most of the time that large files take.
    places = {word.encode(): i for word, i in index.items()}
    vectors: dict[int, np.ndarray] = {}
    size = number = 0
    header = None
    try:
        with gzip.open(path) if path.suffix == '.gz' else open(path, 'rb') as file:
            for number, line in enumerate(file, 1):
                line = line.rstrip(b' \r\n')
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                blanks = line.count(b' ')
                if number == 1:
                    header = re.fullmatch(rb'(\d+) (\d+)', line)
                    size = blanks if header is None else int(header[2])
                    if header is not None:
                        continue
                if not 0 < size <= blanks:
                    raise ValueError(
                        f"Expected line {number} of '{path}' to be a word and "
                        f'{size or "its"} numbers (got {blanks} after the word)'
                    )
                word = line[: line.index(b' ')]
                if blanks > size:  # Words with blanks: GloVe has some.
                    word = line.rsplit(b' ', size)[0]
                    if all(_is_number(part) for part in word.split(b' ')[1:]):
                        raise ValueError(
                            f"Expected line {number} of '{path}' to be a word and "
                            f'{size} numbers (got {blanks})'
                        )
                place = places.get(word)
                if number == 1 or (place is not None and place not in vectors):
                    values = line.rsplit(b' ', size)[1:]
                    vector = _to_vector(values, f"line {number} of '{path}'")
                    if place is not None:
                        vectors[place] = vector
    except EOFError as e:
        raise EOFError(f"'{path}' is cut short after line {number}") from e
    except (gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"Cannot read '{path}' after line {number} ({e})") from e
    if number == 0:
        raise ValueError(f"Expected '{path}' to hold word vectors (it is empty)")
    if header is not None and int(header[1]) != number - 1:
        raise ValueError(
            f"Expected '{path}' to hold {int(header[1])} words, as its first line says "
            f'(got {number - 1})'
        )
    return vectors


def _is_number(value: bytes) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _to_vector(values: list[bytes], name: str) -> np.ndarray:
    for value in values:
        if not _is_number(value):
            text = value.decode(errors='replace')
            raise ValueError(f'Expected {name} to hold numbers (got {text!r})')
    vector = np.array([float(value) for value in values], dtype=np.float32)
    return _check_finite(vector, name)


def _check_finite(vector: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(vector).all():
        raise ValueError(f'Expected {name} to hold finite numbers')
    return vector


def _read_npz(path: Path, index: Mapping[str, int]) -> dict[int, np.ndarray]:
    with open(path, 'rb') as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(f"Cannot read '{path}' (no complete npz file)")
    try:
        with np.load(path) as arrays:
            missing = [key for key in ('words', 'vectors') if key not in arrays]
            if missing:
                raise ValueError(f'without the array {" and ".join(missing)}')
            words, vectors = arrays['words'], arrays['vectors']
            row = arrays['row'] if 'row' in arrays else np.arange(len(words))
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise ValueError(f"Cannot read '{path}' ({e})") from e

    if words.ndim != 1 or words.dtype.kind != 'U':
        raise ValueError(
            f"Expected 'words' in '{path}' to be a vector of strings "
            f'(got {words.dtype} of shape {list(words.shape)})'
        )
    if vectors.ndim != 2 or vectors.dtype.kind != 'f' or vectors.shape[1] == 0:
        raise ValueError(
            f"Expected 'vectors' in '{path}' to be a matrix of floating-point numbers "
            f'(got {vectors.dtype} of shape {list(vectors.shape)})'
        )
    if row.shape != words.shape or row.dtype.kind not in 'iu':
        raise ValueError(
            f"Expected 'row' in '{path}' to be {len(words)} integers, one for each "
            f'word (got {row.dtype} of shape {list(row.shape)})'
        )
    if row.size and not 0 <= row.min() <= row.max() < len(vectors):
        raise ValueError(
            f"Expected words in '{path}' to have rows from 0 to {len(vectors) - 1}, as "
            f"'vectors' has (got {row.min()} to {row.max()})"
        )
    out: dict[int, np.ndarray] = {}
    for word, i in zip(words.tolist(), row.tolist(), strict=True):
        if word in index and index[word] not in out:
            vector = _check_finite(
                vectors[i].astype(np.float32), f"'{word}' in '{path}'"
            )
            out[index[word]] = vector
    return out
