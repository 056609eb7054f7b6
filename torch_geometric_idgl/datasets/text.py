"""Documents as graphs whose nodes are words, and the text data of the paper."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
import os.path as osp
import string
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset, download_url
from tqdm import tqdm

from ..checks import check_at_least, check_choice

__all__ = [
    'MovieReviews',
    'NewsGroups20',
    'UNKNOWN',
    'build_vocab',
    'encode',
    'read_text_folder',
    'tokenize',
]

UNKNOWN = '<unk>'

_DAMAGED = (gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_ARCHIVES = ('.tar.gz', '.tgz', '.tar.xz', '.tar')
_BLANKS = str.maketrans(dict.fromkeys(string.punctuation, ' '))
_SPLITS = ('train', 'val', 'test')


def tokenize(text: str) -> list[str]:
    r"""Splits a text into its words, in lower case and without ASCII punctuation.

    Args:
        text (str): The text.
    """
    return text.lower().translate(_BLANKS).split()


def build_vocab(
    documents: Iterable[Iterable[str]],
    max_words: int = 10_000,
    min_count: int = 10,
) -> list[str]:
    r"""Lists the most frequent words, after :obj:`"<unk>"` for all others.

    Words of the same frequency are in alphabetical order.

    Args:
        documents (iterable): The words of each document, as of :meth:`tokenize`.
        max_words (int, optional): The largest number of words, without
            :obj:`"<unk>"`. (default: :obj:`10_000`)
        min_count (int, optional): How often a word occurs at least.
            (default: :obj:`10`)
    """
    check_at_least('max_words', max_words, 1, integer=True)
    check_at_least('min_count', min_count, 1, integer=True)
    count: Counter[str] = Counter()
    for words in documents:
        _check_words(words)
        count.update(words)
    count.pop(UNKNOWN, None)
    frequent = [word for word in count if count[word] >= min_count]
    frequent.sort(key=lambda word: (-count[word], word))
    return [UNKNOWN, *frequent[:max_words]]


def encode(documents: Iterable[Iterable[str]], vocab: Sequence[str]) -> list[Tensor]:
    r"""Turns the words of each document into a vector of their places in a vocabulary.

    Words that are not in it become those of :obj:`"<unk>"`, its first one. A document
    without words becomes a single :obj:`"<unk>"`, as a graph needs a node.

    Args:
        documents (iterable): The words of each document, as of :meth:`tokenize`.
        vocab (list[str]): The vocabulary, as of :meth:`build_vocab`.
    """
    if not vocab or vocab[0] != UNKNOWN:
        raise ValueError(f"Expected 'vocab' to begin with '{UNKNOWN}'")
    index = {word: i for i, word in enumerate(vocab)}
    tokens = []
    for words in documents:
        _check_words(words)
        tokens.append(torch.tensor([index.get(word, 0) for word in words] or [0]))
    return tokens


def _check_words(words: Any) -> None:
    if isinstance(words, str):  # would be taken for a list of letters
        raise TypeError(
            f"Expected documents to be lists of words, as of 'tokenize' (got the text "
            f'{words[:40]!r})'
        )


def read_text_folder(
    path: str | os.PathLike, suffix: str = '.txt'
) -> tuple[list[str], list[int], list[str]]:
    r"""Reads a folder of texts (or a tar archive of one), laid out as
    :obj:`CLASS/FILE.txt`.

    Archives may hold the folder itself or what is in it. Texts are read as UTF-8; what
    is not is left out. They are sorted by class and file.
    Hidden files and files of another suffix are passed over.

    .. code-block:: python

        texts, labels, class_names = read_text_folder('reviews')
        documents = [tokenize(text) for text in texts]
        vocab = build_vocab(documents)
        dataset = [
            Data(token=token, y=torch.tensor([label]), num_nodes=token.numel())
            for token, label in zip(encode(documents, vocab), labels)
        ]

    Args:
        path (str): The folder or archive.
        suffix (str, optional): How names of texts end. (default: :obj:`".txt"`)

    Returns:
        tuple: The texts, the class of each as a place in the class names, and the class
        names.
    """
    path = Path(path).expanduser()
    files = {
        name: content for name, content in _read_files(path) if name.endswith(suffix)
    }
    tops = {name.split('/')[0] for name in files}
    if path.is_file() and len(tops) == 1 and all(n.count('/') == 2 for n in files):
        files = {name.split('/', 1)[1]: files[name] for name in files}
    documents = _documents(files, f'CLASS/FILE{suffix}', path)
    class_names = sorted({name for name, _ in documents})
    index = {name: i for i, name in enumerate(class_names)}
    return (
        [text for _, text in documents],
        [index[name] for name, _ in documents],
        class_names,
    )


class _TextDataset(InMemoryDataset):
    url: str
    _title: str
    _stem: str  # How the names of archives begin.
    _folders: tuple[str, ...]  # What archives hold.

    def __init__(
        self,
        root: str | os.PathLike,
        split: str = 'train',
        seed: int = 1234,
        max_tokens: int = 1000,
        max_words: int = 10_000,
        min_count: int = 10,
        transform: Callable | None = None,
        pre_transform: Callable | None = None,
        pre_filter: Callable | None = None,
        log: bool = True,
        force_reload: bool = False,
    ) -> None:
        check_choice('split', split, _SPLITS)
        check_at_least('seed', seed, 0, integer=True)
        check_at_least('max_tokens', max_tokens, 1, integer=True)
        check_at_least('max_words', max_words, 1, integer=True)
        check_at_least('min_count', min_count, 1, integer=True)
        self.split = split
        self.seed = seed
        self.max_tokens = max_tokens
        self.max_words = max_words
        self.min_count = min_count
        super().__init__(
            os.fspath(root), transform, pre_transform, pre_filter, log, force_reload
        )
        self.load(self.processed_paths[_SPLITS.index(split)])
        with open(self.processed_paths[-1], encoding='utf-8') as file:
            names = json.load(file)
        self.vocab: list[str] = names['vocab']
        self.class_names: list[str] = names['class_names']

    @property
    def num_classes(self) -> int:
        """The number of classes; one for a rating."""
        return max(len(self.class_names), 1)

    @property
    def has_download(self) -> bool:
        """Whether raw files are needed: not if they are processed already."""
        processed = all(osp.exists(path) for path in self.processed_paths)
        return self.force_reload or not processed

    @property
    def raw_file_names(self) -> list[str]:
        """The archive, or the folders of an extracted one."""
        raw = Path(self.raw_dir)
        paths = sorted(raw.glob(f'{self._stem}*'))
        archives = [
            path.name
            for path in paths
            if path.name.endswith(_ARCHIVES) and path.is_file()
        ]
        if len(archives) > 1:
            raise ValueError(f"Expected one archive in '{raw}' (got {archives})")
        if archives:
            return archives
        if all((raw / folder).is_dir() for folder in self._folders):
            return list(self._folders)
        for path in paths:
            if all((path / folder).is_dir() for folder in self._folders):
                return [path.name]
        return [self.url.rpartition('/')[2]]

    @property
    def processed_dir(self) -> str:
        """The directory of the processed files, one for each choice of options."""
        options = (
            f'{type(self).__name__}_seed{self.seed}_tokens{self.max_tokens}'
            f'_words{self.max_words}_count{self.min_count}'
        )
        return osp.join(self.root, 'processed', options)

    @property
    def processed_file_names(self) -> list[str]:
        """The names of the files of all splits, and of the one of the vocabulary."""
        return [*(f'{split}.pt' for split in _SPLITS), 'vocab.json']

    def download(self) -> None:
        """Downloads the archive, and keeps it if it is complete."""
        name = self.url.rpartition('/')[2]
        with tempfile.TemporaryDirectory(prefix='download-', dir=self.raw_dir) as temp:
            try:
                path = download_url(self.url, temp, log=self.log)
                for _ in _read_files(Path(path)):
                    pass
            except Exception as e:  # Of the network, an archive, ...
                raise FileNotFoundError(
                    f"The {self._title} data is not in '{self.raw_dir}' and could not "
                    f'be downloaded ({type(e).__name__}: {e}). Put the file {name} '
                    f'({self.url}) there'
                ) from e
            os.replace(path, osp.join(self.raw_dir, name))

    def process(self) -> None:
        """Reads the texts, splits them and lists the words of the training split."""
        source = ' and '.join(self.raw_paths)
        files: dict[str, bytes] = {}
        for path in map(Path, self.raw_paths):
            prefix = f'{path.name}/' if path.is_dir() else ''
            files.update((f'{prefix}{name}', text) for name, text in _read_files(path))
        splits, class_names = self._read(files, source)
        for split in _SPLITS:
            if not splits[split]:
                raise ValueError(
                    f"Expected enough documents for a '{split}' split in '{source}' "
                    f'(got {sum(map(len, splits.values()))} documents in all)'
                )

        vocab = build_vocab(
            (tokenize(text) for text, _ in splits['train']),
            self.max_words,
            self.min_count,
        )
        with tempfile.TemporaryDirectory(dir=self.processed_dir) as temp:
            for split, documents in splits.items():
                bar = tqdm(documents, f'Processing {split} split', disable=not self.log)
                tokens = encode(
                    (tokenize(text)[: self.max_tokens] for text, _ in bar), vocab
                )
                data_list = []
                for token, (_, y) in zip(tokens, documents, strict=True):
                    data = Data(token=token, y=y, num_nodes=token.numel())
                    if self.pre_filter is not None and not self.pre_filter(data):
                        continue
                    if self.pre_transform is not None:
                        data = self.pre_transform(data)
                    data_list.append(data)
                if not data_list:
                    raise ValueError(
                        f"Expected 'pre_filter' to keep a document of '{split}'"
                    )
                self.save(data_list, osp.join(temp, f'{split}.pt'))
            with open(osp.join(temp, 'vocab.json'), 'w', encoding='utf-8') as file:
                json.dump({'vocab': vocab, 'class_names': class_names}, file)
            # Complete files only, so that an interruption leaves nothing broken behind.
            for path in self.processed_paths:
                os.replace(osp.join(temp, osp.basename(path)), path)

    def _read(
        self, files: dict[str, bytes], source: str
    ) -> tuple[dict[str, list[tuple[str, Tensor]]], list[str]]:
        # The texts and targets of each split, and the names of the classes.
        raise NotImplementedError

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}({len(self)}, split={self.split!r})'


class NewsGroups20(_TextDataset):
    r"""The 20 Newsgroups data, sorted by date, whose graphs are posts.

    Every word of a post is a node, in the order of the text: :obj:`data.token` holds
    places in :obj:`dataset.vocab`, and there are no edges (see
    :class:`~torch_geometric_idgl.transforms.CosineKNNGraph`). Texts are read as UTF-8,
    and bytes that are not are left out. They are in lower case, punctuation separates
    words, and words that are not in the vocabulary are :obj:`"<unk>"`, as is a text
    without words. The vocabulary is that of whole posts of the training split.

    The posts for training are split at random into 70% for training and 30% for
    validation (7,919 and 3,395), whatever their order in the archive. There are 7,532
    for testing.

    The archive :obj:`20news-bydate.tar.gz` is downloaded if there is none in
    :obj:`root/raw`. Other names that begin with :obj:`20news-bydate`, plain and
    :obj:`.xz` archives, and the extracted folders will do.

    .. code-block:: python

        train_data = NewsGroups20('data/NewsGroups20', split='train')
        vectors = load_word_vectors('glove.840B.300d.txt', train_data.vocab)
        data = train_data[0]
        x = vectors.weight[data.token]

    Args:
        root (str): Root directory where the dataset should be saved.
        split (str, optional): The split (:obj:`"train"`, :obj:`"val"`, :obj:`"test"`).
            (default: :obj:`"train"`)
        seed (int, optional): The seed of the split. (default: :obj:`1234`)
        max_tokens (int, optional): The largest number of words of a text; what follows
            is left out. (default: :obj:`1000`)
        max_words (int, optional): The largest number of words in the vocabulary,
            without :obj:`"<unk>"`. (default: :obj:`10_000`)
        min_count (int, optional): How often a word of the vocabulary occurs at least
            in the training split. (default: :obj:`10`)
        transform (callable, optional): A transform that is applied on every access.
            (default: :obj:`None`)
        pre_transform (callable, optional): A transform that is applied before saving
            to disk. (default: :obj:`None`)
        pre_filter (callable, optional): Whether a graph is kept, decided before saving
            to disk. (default: :obj:`None`)
        log (bool, optional): Whether to print what is going on while downloading and
            processing. (default: :obj:`True`)
        force_reload (bool, optional): Whether to re-process the dataset.
            (default: :obj:`False`)
    """

    url = 'http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz'
    _title = '20 Newsgroups'
    _stem = '20news-bydate'
    _folders = ('20news-bydate-train', '20news-bydate-test')

    def _read(
        self, files: dict[str, bytes], source: str
    ) -> tuple[dict[str, list[tuple[str, Tensor]]], list[str]]:
        known, test = (
            _documents(_below(files, folder), f'{folder}/GROUP/ID', source)
            for folder in self._folders
        )
        class_names = sorted({name for name, _ in known + test})
        index = {name: torch.tensor([i]) for i, name in enumerate(class_names)}
        train, val = _split(known, [70], self.seed)
        splits = {'train': train, 'val': val, 'test': test}
        return {
            split: [(text, index[name]) for name, text in documents]
            for split, documents in splits.items()
        }, class_names


class MovieReviews(_TextDataset):
    r"""The movie reviews with ratings of `"Seeing Stars"
    <https://aclanthology.org/P05-1015>`_ (scale dataset v1.0).

    Every word of a review is a node, in the order of the text: :obj:`data.token` holds
    places in :obj:`dataset.vocab`, and there are no edges. :obj:`data.y` is the rating
    from zero to one, of shape :obj:`[1, 1]`. For words and vocabulary see
    :class:`NewsGroups20`.

    The reviews are split at random into 60% for training, 20% for validation and 20%
    for testing (3,003, 1,001 and 1,002), whatever their order in the archive.

    The archive :obj:`scale_data.tar.gz` is downloaded if there is none in
    :obj:`root/raw`. Other names that begin with :obj:`scale_data`, plain and
    :obj:`.xz` archives, and the extracted folder :obj:`scaledata` will do.

    .. code-block:: python

        train_data = MovieReviews('data/MovieReviews', split='train')
        rating = train_data[0].y.item()

    Args:
        root (str): Root directory where the dataset should be saved.
        split (str, optional): The split (:obj:`"train"`, :obj:`"val"`, :obj:`"test"`).
            (default: :obj:`"train"`)
        seed (int, optional): The seed of the split. (default: :obj:`1234`)
        max_tokens (int, optional): The largest number of words of a text; what follows
            is left out. (default: :obj:`1000`)
        max_words (int, optional): The largest number of words in the vocabulary,
            without :obj:`"<unk>"`. (default: :obj:`10_000`)
        min_count (int, optional): How often a word of the vocabulary occurs at least
            in the training split. (default: :obj:`10`)
        transform (callable, optional): A transform that is applied on every access.
            (default: :obj:`None`)
        pre_transform (callable, optional): A transform that is applied before saving
            to disk. (default: :obj:`None`)
        pre_filter (callable, optional): Whether a graph is kept, decided before saving
            to disk. (default: :obj:`None`)
        log (bool, optional): Whether to print what is going on while downloading and
            processing. (default: :obj:`True`)
        force_reload (bool, optional): Whether to re-process the dataset.
            (default: :obj:`False`)
    """

    url = 'http://www.cs.cornell.edu/people/pabo/movie-review-data/scale_data.tar.gz'
    _title = 'movie review'
    _stem = 'scale_data'
    _folders = ('scaledata',)

    def _read(
        self, files: dict[str, bytes], source: str
    ) -> tuple[dict[str, list[tuple[str, Tensor]]], list[str]]:
        files = _below(files, 'scaledata')
        reviews = []
        for author in sorted({name.split('/')[0] for name in files if '/' in name}):
            ids, ratings, texts = (
                _lines(files, f'{author}/{kind}.{author}', source)
                for kind in ('id', 'rating', 'subj')
            )
            for kind, lines in ('rating', ratings), ('subj', texts):
                if len(lines) != len(ids):
                    raise ValueError(
                        f"Expected '{kind}.{author}' in '{source}' to have {len(ids)} "
                        f"lines, as 'id.{author}' has (got {len(lines)})"
                    )
            for i, (key, text) in enumerate(zip(ids, texts, strict=True)):
                name = f"line {i + 1} of 'rating.{author}' in '{source}'"
                rating = _rating(ratings[i], name)
                reviews.append((author, key, rating, text))
        if not reviews:
            raise ValueError(
                f"Expected files 'scaledata/AUTHOR/id.AUTHOR' in '{source}' (got none)"
            )

        parts = _split(sorted(reviews), [60, 20], self.seed)
        return {
            split: [
                (text, torch.tensor([[rating]], dtype=torch.float))
                for _, _, rating, text in part
            ]
            for split, part in zip(_SPLITS, parts, strict=True)
        }, []


def _read_files(path: Path) -> Iterator[tuple[str, bytes]]:
    # The name and content of every file in a folder or a tar archive. Hidden ones,
    # which systems leave behind, are passed over.
    if path.is_dir():
        for folder, _, names in os.walk(path, followlinks=True):
            for name in names:
                file = Path(folder, name)
                relative = file.relative_to(path).as_posix()
                if not _is_hidden(relative):
                    yield relative, file.read_bytes()
        return

    name = ''
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                name = member.name.removeprefix('./')
                if member.isdir() or _is_hidden(name):
                    continue
                content = tar.extractfile(member)
                if content is None:
                    raise tarfile.ReadError('neither a file nor a folder')
                yield name, content.read()
            # What is complete ends with zeros and, if compressed, with a checksum;
            # `tarfile` asks for neither.
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise EOFError('cut short')
            while tar.fileobj.read(2**20):
                pass
    except (tarfile.TarError, EOFError, KeyError, *_DAMAGED) as e:
        at = f" at '{name}'" if name else ''
        raise ValueError(
            f"Cannot read the archive '{path}'{at} ({type(e).__name__}: {e})"
        ) from e


def _is_hidden(name: str) -> bool:
    return any(part.startswith('.') for part in name.split('/'))


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    # The files in a folder, by their names in there, wherever the folder is.
    parts = {name: f'/{name}'.partition(f'/{folder}/') for name in files}
    return {rest: files[name] for name, (_, found, rest) in parts.items() if found}


def _documents(
    files: Mapping[str, bytes], layout: str, source: Any
) -> list[tuple[str, str]]:
    # The class and text of files named 'CLASS/FILE', sorted by these two.
    names = sorted(name.split('/') for name in files)
    for parts in names:
        if len(parts) != 2:
            raise ValueError(
                f"Expected files '{layout}' in '{source}' (got '{'/'.join(parts)}')"
            )
    if not names:
        raise ValueError(f"Expected files '{layout}' in '{source}' (got none)")
    return [(parts[0], _decode(files['/'.join(parts)])) for parts in names]


def _decode(content: bytes) -> str:
    return content.decode('utf-8-sig', errors='ignore')  # without a byte order mark


def _lines(files: Mapping[str, bytes], name: str, source: str) -> list[str]:
    if name not in files:
        raise ValueError(f"Expected the file 'scaledata/{name}' in '{source}'")
    lines = _decode(files[name]).removesuffix('\n').split('\n')
    return [line.removesuffix('\r') for line in lines]


def _rating(text: str, name: str) -> float:
    try:
        rating = float(text)
    except ValueError:
        rating = math.nan
    if not 0 <= rating <= 1:
        raise ValueError(f'Expected {name} to be a number in [0, 1] (got {text!r})')
    return rating


def _split(items: list, percent: list[int], seed: int) -> list[list]:
    # Random parts. Their sizes are rounded down, and the last one is the rest.
    generator = torch.Generator().manual_seed(int(seed))
    order = torch.randperm(len(items), generator=generator).tolist()
    parts = []
    for share in percent:
        size = len(items) * share // 100
        parts.append([items[i] for i in order[:size]])
        order = order[size:]
    return [*parts, [items[i] for i in order]]
