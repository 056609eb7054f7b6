"""What the benchmark scripts share: settings, results on disk, versions, tables."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

import torch_geometric_idgl
from torch_geometric_idgl.training.checkpoint import replacing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / 'configs'
RESULTS = HERE / 'results'
PACKAGES = ('torch', 'torch-geometric', 'numpy', 'scipy', 'scikit-learn')
# What tells the C library how to treat freed memory.
ALLOCATOR = ('GLIBC_TUNABLES', 'MALLOC_MMAP_MAX_', 'MALLOC_TRIM_THRESHOLD_')
ALLOCATOR += ('MALLOC_TOP_PAD_',)
# Tells it to keep freed memory. By default it gives tensors of more than 32 MB back at
# once, and the next ones are paged in again: a jump between two sizes.
KEEP_MEMORY = {'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}
CODE = ('torch_geometric_idgl', 'benchmarks/*.py', 'benchmarks/baselines')

# The columns of the paper's first table.
GRAPHS = ('cora', 'citeseer', 'pubmed', 'ogbn-arxiv')
TABLES = ('wine', 'cancer', 'digits')
DATASETS = GRAPHS + TABLES
TITLES = {
    'cora': 'Cora',
    'citeseer': 'Citeseer',
    'pubmed': 'Pubmed',
    'ogbn-arxiv': 'ogbn-arxiv',
    'wine': 'Wine',
    'cancer': 'Cancer',
    'digits': 'Digits',
}


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keeps others that use this from the folder of a file while it is read, changed
    and written (where the system has such locks).
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _git(*arguments: str) -> str:
    """What git says about the repository of these scripts; nothing without one."""
    try:
        command = ['git', '-C', str(HERE.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ''
    return done.stdout.strip()


def commit() -> str:
    """The commit of models, scripts and baselines, and whether they were changed."""
    name = _git('rev-parse', '--short=10', 'HEAD')
    changed = _git('status', '--porcelain', '--', *CODE)
    return f'{name}-dirty' if changed else name


COMMIT = commit()  # that of the code that is loaded now, whatever comes later


def read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a YAML file; an empty one is an empty dictionary."""
    loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)  # the quick one
    return yaml.load(Path(path).read_text(encoding='utf-8'), loader) or {}


def read_json(path: Path) -> Any:
    """Reads a JSON file, or returns :obj:`None` if there is none."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:  # of JSON, or of the encoding
        raise ValueError(
            f"Expected '{path}' to be a JSON file of results (got: {error}). Restore "
            f'it, or move it away to run anew'
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file at once: a killed process leaves the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding='utf-8')


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file at once."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + '\n')


def versions() -> dict[str, str]:
    """The versions that a result depends on, the commit among them if there is one."""
    found = {'python': platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name.replace('-', '_')] = metadata.version(name)
    found['torch_geometric_idgl'] = torch_geometric_idgl.__version__
    return {**found, 'commit': COMMIT} if COMMIT else found


def machine(device: torch.device | str | None = None) -> dict[str, Any]:
    """What a time depends on, without anything that names the machine."""
    device = torch.device(device or default_device())
    cuda = device.type == 'cuda'
    found = {
        'system': f'{platform.system()} {platform.machine()}',
        'cpus': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'device': torch.cuda.get_device_name(device) if cuda else device.type,
    }
    allocator = {key: os.environ[key] for key in ALLOCATOR if key in os.environ}
    return {**found, 'environment': allocator} if allocator else found


def peak_memory_mb() -> float:
    """The largest memory the process has had so far, that of the GPU if it uses one."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2 ** (20 if sys.platform == 'darwin' else 10), 1)


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def mean_std(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (zero for a single value)."""
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), std


def exponent(points: list[dict], key: str) -> float:
    """The slope of a least-squares line in log-log coordinates."""
    xs = [math.log(point['n']) for point in points]
    ys = [math.log(max(point[key], 1e-9)) for point in points]
    mx, my = statistics.fmean(xs), statistics.fmean(ys)
    top = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    return top / sum((x - mx) ** 2 for x in xs)


def percent(values: list[float]) -> str:
    """Formats scores as :obj:`mean ± std` in percent; a single one has no deviation."""
    return mean_and_deviation([100.0 * value for value in values])


def mean_and_deviation(values: list[float], sign: str = '-') -> str:
    """Formats values as :obj:`mean ± std`, a single one without a deviation; with
    :obj:`'+'` every mean has a sign.
    """
    mean, std = mean_std(values)
    text = f'{round(mean, 1) + 0.0:{sign}.1f}'
    return f'{text} ± {std:.1f}' if len(values) > 1 else text


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its columns aligned so that it reads well as text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join(
        '| ' + ' | '.join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + ' |'
        for line in lines
    )
