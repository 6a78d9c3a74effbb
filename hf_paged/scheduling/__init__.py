"""Who runs next, and on which blocks. Standard library only; it writes the books and never sees a tensor."""

from .admission import Verdict, judge, why_infeasible
from .decode_batch import Crew, Stride
from .forecast import ADMISSIONS, Future
from .history import History
from .limits import Limits, Shelf
from .plan import Plan, Row, Swaps
from .policy import POLICIES
from .request import UNKNOWN, Group, Request, Sequence, Status
from .scheduler import Count, Infeasible, Scheduler
from .swap import Decide, Victim, never

__all__ = [
    "ADMISSIONS",
    "POLICIES",
    "UNKNOWN",
    "Count",
    "Crew",
    "Decide",
    "Future",
    "Group",
    "History",
    "Infeasible",
    "Limits",
    "Plan",
    "Request",
    "Row",
    "Scheduler",
    "Sequence",
    "Shelf",
    "Status",
    "Stride",
    "Swaps",
    "Verdict",
    "Victim",
    "judge",
    "never",
    "why_infeasible",
]
