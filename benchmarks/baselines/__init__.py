"""The systems that IDGL is compared with."""

import warnings

from baselines.classical import fit_classical
from baselines.gnn import GNN as make_gnn
from baselines.gnn import diffuse
from baselines.hgcn import HGCN
from baselines.lds import fit_lds

# What PyTorch has to say about each use of CSR matrices, PyG's included.
warnings.filterwarnings('ignore', '.*Sparse CSR tensor support is in beta.*')
warnings.filterwarnings('ignore', '.*Sparse invariant checks are implicitly.*')

__all__ = ['HGCN', 'diffuse', 'fit_classical', 'fit_lds', 'make_gnn']
