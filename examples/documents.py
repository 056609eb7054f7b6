"""Classify documents: IDGL learns a graph of the words of each one.

A folder of texts is laid out as `CLASS/FILE.txt`; without one, short texts about
astronomy, cooking and the weather are taken, which are beside this script. Word
vectors are read from a file (GloVe's text format, or `.npz`), or made from the training
texts: words that occur in the same texts are similar. At the end the strongest links in
the learned graph of one test document are shown.

Settings were chosen by looking at these texts, and seven for testing say little: for
a folder of one's own, they are a start.

    python examples/documents.py
    python examples/documents.py --folder reviews --vectors glove.6B.100d.txt
"""

import argparse
from pathlib import Path

import torch
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from torch_geometric_idgl import IDGL, DocumentGNN
from torch_geometric_idgl.datasets import (
    build_vocab,
    encode,
    load_word_vectors,
    read_text_folder,
    tokenize,
)
from torch_geometric_idgl.loader import BucketSampler
from torch_geometric_idgl.training import fit

TEXTS = Path(__file__).parent / 'texts'

parser = argparse.ArgumentParser()
parser.add_argument('--folder', default=TEXTS, help='with a folder for each class')
parser.add_argument('--vectors', help='a file of word vectors')
parser.add_argument('--channels', type=int, default=16, help='of vectors it makes')
parser.add_argument('--max-tokens', type=int, default=300, help='of a document')
parser.add_argument('--batch-size', type=int, default=8)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--epochs', type=int, default=40, help='at most')
parser.add_argument('--patience', type=int, default=10)
parser.add_argument('--links', type=int, default=8, help='to show, of each kind')
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

seed_everything(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
texts, labels, class_names = read_text_folder(args.folder)
if len(texts) < 5:
    parser.error(f'expected five texts at least to split (got {len(texts)})')
documents = [tokenize(text)[: args.max_tokens] for text in texts]

# In random order class by class, of five texts one is for dev and one for test.
order = sorted(torch.randperm(len(texts)).tolist(), key=lambda i: labels[i])
places = {'train': order[::5] + order[1::5] + order[2::5]}
places.update(dev=order[3::5], test=order[4::5])
vocab = build_vocab([documents[i] for i in places['train']], min_count=1)
tokens = encode(documents, vocab)
splits = {
    name: [
        Data(token=tokens[i], y=torch.tensor([labels[i]]), num_nodes=len(tokens[i]))
        for i in place
    ]
    for name, place in places.items()
}
loaders = [
    DataLoader(
        split,
        batch_sampler=BucketSampler(split, args.batch_size, shuffle=name == 'train'),
    )
    for name, split in splits.items()
]


def vectors_of_texts(tokens):
    """Latent semantic analysis: a low-rank form of which words are in which texts."""
    counts = [token.bincount(minlength=len(vocab)) for token in tokens]
    count = torch.stack(counts, dim=1)
    rarity = (len(tokens) / (count > 0).sum(dim=1).clamp(min=1)).log()
    matrix = count.log1p() * rarity.unsqueeze(1)  # Words of all texts say nothing.
    u, s, _ = torch.svd_lowrank(matrix, q=min(args.channels, *count.shape))
    return u * s


if args.vectors:
    vectors, found = load_word_vectors(args.vectors, vocab)
    print(f'{int(found.sum())} of {len(vocab)} words have a vector in the file')
else:
    vectors = vectors_of_texts([data.token for data in splits['train']])
sizes = ', '.join(f'{len(split)} for {name}' for name, split in splits.items())
print(f'{len(texts)} texts of {len(class_names)} classes: {sizes}')

gnn = IDGL(
    32,
    hidden_channels=32,
    num_layers=2,
    act='tanh',
    dropout=0.3,
    graph_channels=vectors.size(1),
    k=2,
    epsilon=0.5,
    initial_weight=0.5,
    update_weight=0.4,
    smoothness=0.1,
    connectivity=0.1,
    sparsity=1.0,
    tol=1e-2,
)
model = DocumentGNN(vectors, 32, len(class_names), gnn, dropout=0.3)
model = model.to(device)
record = fit(
    model,
    *loaders,
    lr=args.lr,
    max_epochs=args.epochs,
    patience=args.patience,
    desc='Training IDGL on documents',
)
print(f'Dev accuracy: {record.val_score:.4f}, test accuracy: {record.test_score:.4f}')


def links(graph, token):
    """Pairs of different words, and the largest weight of an edge between them."""
    (source, target), weight = graph.to_edges()
    pairs, hidden = {}, {vocab[0], *ENGLISH_STOP_WORDS}
    words = token[source].tolist(), token[target].tolist()
    for i, j, value in zip(*words, weight.tolist(), strict=True):
        pair = tuple(sorted((vocab[i], vocab[j])))
        if i != j and not hidden & {*pair}:
            pairs[pair] = max(value, pairs.get(pair, 0.0))
    return pairs


# The test document that has most words with a vector.
place = max(places['test'], key=lambda i: tokens[i].unique().numel())
token = tokens[place].to(device)
with torch.no_grad():
    out, trace = model.eval()(token, return_trace=True)
print(f'\n"{" ".join(texts[place].split())[:500]}"')
print(
    f'is about {class_names[labels[place]]}, and IDGL says: {class_names[out.argmax()]}'
)
before, learned = links(trace.first, token), links(trace.learned, token)
for new, title in [(True, 'New links'), (False, 'Links of its word vectors as well')]:
    print(f'\n{title:<36}{"learned":>9}')
    chosen = [pair for pair in learned if (pair not in before) == new]
    for pair in sorted(chosen, key=learned.get, reverse=True)[: args.links]:
        print(f'{" - ".join(pair):<36}{learned[pair]:>9.2f}')
