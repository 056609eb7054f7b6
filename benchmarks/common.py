"""What the benchmark scripts share: settings, files, versions, tables."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock

import torch_geometric_idgl
from torch_geometric_idgl.training.checkpoint import replacing

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / 'configs'
RESULTS = HERE / 'results'
PACKAGES = ('torch', 'torch-geometric', 'numpy', 'scipy', 'scikit-learn')
# What tells the C library how to treat freed memory.
ALLOCATOR = ('GLIBC_TUNABLES', 'MALLOC_MMAP_MAX_', 'MALLOC_TRIM_THRESHOLD_')
ALLOCATOR += ('MALLOC_TOP_PAD_',)

# The columns of the paper's first table.
TITLES = {
    'cora': 'Cora',
    'citeseer': 'Citeseer',
    'pubmed': 'Pubmed',
    'ogbn-arxiv': 'ogbn-arxiv',
    'wine': 'Wine',
    'cancer': 'Cancer',
    'digits': 'Digits',
}
DATASETS = tuple(TITLES)
GRAPHS, TABLES = DATASETS[:4], DATASETS[4:]
PLANETOID = DATASETS[:3]


def commit(folder: Path = HERE) -> str:
    """The commit of models, scripts and baselines, and whether they were changed; the
    folder is that of the scripts.
    """
    git = ['git', '-C', str(folder)]
    code = ['../torch_geometric_idgl', '*.py', 'baselines']
    quiet: dict[str, Any] = {'text': True, 'stderr': subprocess.DEVNULL}
    try:
        head = [*git, 'rev-parse', '--short=10', 'HEAD']
        name = subprocess.check_output(head, **quiet).strip()
        status = [*git, 'status', '--porcelain', '--', *code]
        changed = subprocess.check_output(status, **quiet).strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return ''
    return f'{name}-dirty' if changed else name


COMMIT = commit()  # that of the code that is loaded now, whatever comes later


def locked(file: Path) -> FileLock:
    """Keeps others that use this from a file while it is read, changed and written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f'{file}.lock')


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
            f"Expected '{path}' to be a JSON file of results (got: {error})"
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
    sizes, values = ([point[k] for point in points] for k in ('n', key))
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def mean_and_deviation(values: list[float], digits: int = 1, sign: str = '-') -> str:
    """Formats values as :obj:`mean ± std`, a single one without a deviation; with
    :obj:`'+'` every mean has a sign.
    """
    mean, std = mean_std(values)
    text = f'{round(mean, digits) + 0.0:{sign}.{digits}f}'
    return f'{text} ± {std:.{digits}f}' if len(values) > 1 else text


def percent(values: list[float], **options: Any) -> str:
    """The same of scores, in percent."""
    return mean_and_deviation([100.0 * value for value in values], **options)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its columns aligned so that it reads well as text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join(
        '| ' + ' | '.join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + ' |'
        for line in lines
    )
