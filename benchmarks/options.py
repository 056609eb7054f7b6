"""What the command lines of the scripts that train have in common."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from common import RESULTS, default_device

Main = Callable[[list[str] | None], int]


def positive(text: str) -> int:
    """An argument that counts something."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f'must be at least 1 (got {value})')
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds where data and results are, and how to run."""
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    device = {'default': default_device(), 'help': 'default: the GPU if there is one'}
    parser.add_argument('--device', **device)
    parser.add_argument('--results', type=Path, default=RESULTS, help='where to write')
    parser.add_argument('--quiet', action='store_true', help='no progress bars')


def stage(args: argparse.Namespace) -> None:
    """Copies the data to where it can be processed, if asked for."""
    if args.source:
        from torch_geometric_idgl.datasets import stage_data

        stage_data(args.source, args.root)


def explain_errors(main: Main) -> Main:
    """Turns what a user can do something about into a message; the rest is a bug."""

    @functools.wraps(main)
    def wrapper(argv: list[str] | None = None) -> int:
        try:
            return main(argv)
        except (ValueError, FloatingPointError, OSError) as error:
            print(f'{type(error).__name__}: {error}', file=sys.stderr)
            return 1

    return wrapper
