"""The data of the paper: graphs for node classification, and documents; and graphs
under attack.
"""

from .attacked import AttackedGraph
from .load import load, stage_data
from .text import (
    MovieReviews,
    NewsGroups20,
    build_vocab,
    encode,
    read_text_folder,
    tokenize,
)
from .uci import UCI
from .word_vectors import WordVectors, load_word_vectors

__all__ = [
    'UCI',
    'AttackedGraph',
    'MovieReviews',
    'NewsGroups20',
    'WordVectors',
    'build_vocab',
    'encode',
    'load',
    'load_word_vectors',
    'read_text_folder',
    'stage_data',
    'tokenize',
]
