"""The node classification data of the paper."""

from .load import load, stage_data
from .uci import UCI

__all__ = ['UCI', 'load', 'stage_data']
