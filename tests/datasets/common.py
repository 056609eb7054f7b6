"""Archives of texts."""

import io
import tarfile


def pack(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = {'.gz': 'w:gz', '.tgz': 'w:gz', '.xz': 'w:xz', '.tar': 'w'}[path.suffix]
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            content = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
