"""Who runs next, and on which blocks. Standard library only; it writes the books and never sees a tensor."""

from .admission import Verdict, judge, why_infeasible
from .future import ADMISSIONS, Future, future_peak
from .history import History
from .limits import Limits, Shelf
from .plan import Plan, Row
from .policy import POLICIES
from .scheduler import Infeasible, Scheduler
from .sequence import UNKNOWN, Group, Request, Sequence, Status

__all__ = [
    "ADMISSIONS",
    "POLICIES",
    "UNKNOWN",
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
    "Verdict",
    "future_peak",
    "judge",
    "why_infeasible",
]
