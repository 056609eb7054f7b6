"""A metric of one's own: any module that compares two sets of vectors.

`metric` takes a function from the number of input channels to a module, called once for
the raw features and once for the hidden embeddings. The module maps vectors of shapes
`[n, d]` and `[s, d]` to similarities `[n, s]` and is trained with everything else. Here
it is the kernel of t-SNE with a learned scale for each channel. The data comes with
scikit-learn.

    python examples/custom_metric.py
    python examples/custom_metric.py --metric weighted_cosine --epsilon 0.75
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.logging import log

from torch_geometric_idgl import IDGL
from torch_geometric_idgl.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument('--metric', default='student_t', help='or a name IDGL knows')
parser.add_argument('--epsilon', type=float, default=0.5)
parser.add_argument('--root', default='data', help='where the split is stored')
parser.add_argument('--epochs', type=int, default=200)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()


class StudentT(torch.nn.Module):
    """Heavy-tailed similarity, `1 / (1 + mean_c w_c^2 (u_c - v_c)^2)`."""

    symmetric = True  # Swapping the arguments transposes the result.

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(in_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        u, v = self.weight * u, self.weight * v
        distance = u.square().sum(1).unsqueeze(1) + v.square().sum(1) - 2 * u @ v.t()
        return 1 / (1 + distance.clamp(min=0) / self.weight.numel())


seed_everything(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
data = load('wine', args.root, seed=args.seed).to(device)

model = IDGL(
    data.num_features,
    hidden_channels=16,
    num_layers=2,
    out_channels=int(data.y.max()) + 1,
    dropout=0.5,
    metric=StudentT if args.metric == 'student_t' else args.metric,
    heads=1,
    epsilon=args.epsilon,
    initial_weight=0.8,
    update_weight=0.7,
    smoothness=0.1,
    connectivity=0.1,
    sparsity=0.3,
    tol=1e-3,
    cached=True,
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    _, trace = model(data.x, return_trace=True)
    y = data.y[data.train_mask]
    loss = trace.loss(lambda out: F.cross_entropy(out[data.train_mask], y))
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test():
    model.eval()
    out = model(data.x)
    val_loss = F.cross_entropy(out[data.val_mask], data.y[data.val_mask])
    correct = (out.argmax(dim=-1) == data.y).float()
    return float(val_loss), float(correct[data.test_mask].mean())


best_val_loss, test_acc = float('inf'), 0.0
for epoch in range(1, args.epochs + 1):
    loss = train()
    val_loss, tmp_test_acc = test()
    if val_loss < best_val_loss:
        best_val_loss, test_acc = val_loss, tmp_test_acc
    log(Epoch=epoch, Loss=loss, ValLoss=val_loss, Test=test_acc)
print(f'Test accuracy with {args.metric}: {test_acc:.4f}')
