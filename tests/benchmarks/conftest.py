"""The scripts import each other as `python benchmarks/x.py` does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
