"""Whether two computations of the same model give the same tokens and log-probabilities, and where they do
not, why.
"""

from .mismatch import check_mismatch
from .report import LogprobGap, Mismatch, RowMismatch

__all__ = ["LogprobGap", "Mismatch", "RowMismatch", "check_mismatch"]
