"""Tables of the UCI repository that scikit-learn carries."""

from __future__ import annotations

import os.path as osp
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.utils import index_to_mask

from ..checks import check_at_least

__all__ = ['UCI']

# Function of `sklearn.datasets`, number of training nodes, number of dev nodes.
_TABLES = {
    'wine': ('load_wine', 10, 20),
    'cancer': ('load_breast_cancer', 10, 20),
    'digits': ('load_digits', 50, 100),
}


class UCI(InMemoryDataset):
    r"""The tables :obj:`"wine"`, :obj:`"cancer"` and :obj:`"digits"` of the paper.

    They ship with scikit-learn, so nothing is downloaded. Every row is a node; there
    are no edges (see :class:`~torch_geometric_idgl.transforms.CosineKNNGraph`). Columns
    are standardised. The split is drawn by two stratified
    :meth:`~sklearn.model_selection.train_test_split` with the given seed: 10 training
    and 20 dev nodes (digits: 50 and 100), the others are for testing.

    .. code-block:: python

        data = UCI('data/UCI', 'wine', transform=CosineKNNGraph(k=20))[0]

    Args:
        root (str): Root directory where the dataset should be saved.
        name (str): The name of the dataset (:obj:`"wine"`, :obj:`"cancer"`,
            :obj:`"digits"`).
        seed (int, optional): The seed of the split. (default: :obj:`0`)
        transform (callable, optional): A transform that is applied on every access.
            (default: :obj:`None`)
        pre_transform (callable, optional): A transform that is applied before saving
            to disk. (default: :obj:`None`)
        force_reload (bool, optional): Whether to re-process the dataset.
            (default: :obj:`False`)
    """

    def __init__(
        self,
        root: str,
        name: str,
        seed: int = 0,
        transform: Callable | None = None,
        pre_transform: Callable | None = None,
        force_reload: bool = False,
    ) -> None:
        check_at_least('seed', seed, 0, integer=True)
        self.name = check_name(name, list(_TABLES))
        self.seed = seed
        super().__init__(root, transform, pre_transform, force_reload=force_reload)
        try:
            self.load(self.processed_paths[0])
        except Exception:  # damaged, or cut short: it is quickly made again
            self.process()
            self.load(self.processed_paths[0])

    @property
    def processed_dir(self) -> str:
        """The directory of the processed files."""
        return osp.join(self.root, self.name, 'processed')

    @property
    def processed_file_names(self) -> str:
        """The name of the processed file, one for each split."""
        return f'data_{self.seed}.pt'

    def process(self) -> None:
        """Reads the table, standardises it and draws the split."""
        try:
            import sklearn.datasets
            from sklearn.model_selection import train_test_split
            from sklearn.preprocessing import scale
        except ImportError as e:
            raise ImportError(
                f"The '{self.name}' data comes with scikit-learn. Install it with "
                f"'pip install torch_geometric_idgl[datasets]'"
            ) from e

        function, num_train, num_val = _TABLES[self.name]
        x, y = getattr(sklearn.datasets, function)(return_X_y=True)
        known, test = train_test_split(
            np.arange(len(y)),
            train_size=num_train + num_val,
            random_state=self.seed,
            stratify=y,
        )
        train, val = train_test_split(
            known,
            train_size=num_train,
            test_size=num_val,
            random_state=self.seed,
            stratify=y[known],
        )

        data = Data(
            x=torch.from_numpy(scale(x)).to(torch.float),
            y=torch.from_numpy(y).to(torch.long),
            train_mask=index_to_mask(torch.from_numpy(train), len(y)),
            val_mask=index_to_mask(torch.from_numpy(val), len(y)),
            test_mask=index_to_mask(torch.from_numpy(test), len(y)),
        )
        data = data if self.pre_transform is None else self.pre_transform(data)
        self.save([data], self.processed_paths[0])

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}({self.name!r}, seed={self.seed})'


def check_name(name: Any, names: list[str]) -> str:
    """Returns a name in lower case, and raises unless it is one of :obj:`names`."""
    if not isinstance(name, str):
        raise TypeError(f"Expected 'name' to be a string (got {name!r})")
    if name.lower() not in names:
        raise ValueError(f"Expected 'name' to be one of {names} (got {name!r})")
    return name.lower()
