import torch
from torch_geometric.data import Data

from torch_geometric_idgl import IDGL


def make_data(n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.randn(n, 8, generator=generator, dtype=torch.double)
    x[:, :3] += torch.eye(3)[y]
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    return Data(x=x, y=y, edge_index=torch.cat([ring, ring.flip(0)], dim=1))


def make_trace(data, cls=IDGL, **kwargs):
    torch.manual_seed(0)
    kwargs = {'tol': None, 'max_iters': 2, 'initial_weight': 0.3, **kwargs}
    model = cls(8, 16, num_layers=2, out_channels=3, **kwargs).double().eval()
    with torch.no_grad():
        return model(data, return_trace=True)[1]
