"""Writes the page of a saved trace: ``python -m torch_geometric_idgl.view run.pt``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import GraphView


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the file and writes the page beside it, or where it is asked for."""
    parser = argparse.ArgumentParser(
        prog='python -m torch_geometric_idgl.view',
        description='Write a page that shows the learned graphs of a run.',
    )
    parser.add_argument('run', type=Path, help="what 'trace.save(data, path)' wrote")
    parser.add_argument(
        '-o', '--output', type=Path, help='the page (default: RUN with .html)'
    )
    parser.add_argument('--title', help='the title of the page')
    args = parser.parse_args(arguments)
    output = args.output or args.run.with_suffix('.html')
    try:
        view = GraphView.load(args.run)
        view.title = args.title or view.title
        view.write(output)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(output)


if __name__ == '__main__':
    main()
