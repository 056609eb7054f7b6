"""Checks that links within built pages lead to files and anchors that exist.

python docs/check_links.py docs/_build/html
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag: str, attrs: list) -> None:
        for name, value in attrs:
            if name == 'id':
                self.anchors.add(value)
            elif name in ('href', 'src') and tag != 'link':
                self.links.append(value)


def broken_links(folder: Path) -> list[str]:
    """One line for each link that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob('*.html'))}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve()
            target = file if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                broken.append(f'{path.relative_to(folder.resolve())}: {link}')
    return broken


if __name__ == '__main__':
    found = broken_links(Path(sys.argv[1]))
    print('\n'.join(found) or 'All internal links lead somewhere.')
    sys.exit(bool(found))
