"""Who runs next, and on which blocks. Standard library only; it writes the books and never sees a tensor."""

from .admission import Verdict, judge, why_infeasible
from .decode_batch import Crew, Stride
from .forecast import ADMISSIONS, Future
from .history import AnswerLengths
from .limits import KVCacheGroup, Limits
from .plan import ScheduledRow, StepPlan, Swaps
from .policy import POLICIES
from .request import UNKNOWN, Request, Sequence, SequenceGroup, Status
from .scheduler import Count, Infeasible, Scheduler
from .swap import Decide, Victim, never

__all__ = [
    "ADMISSIONS",
    "POLICIES",
    "UNKNOWN",
    "AnswerLengths",
    "Count",
    "Crew",
    "Decide",
    "Future",
    "Infeasible",
    "KVCacheGroup",
    "Limits",
    "Request",
    "ScheduledRow",
    "Scheduler",
    "Sequence",
    "SequenceGroup",
    "Status",
    "StepPlan",
    "Stride",
    "Swaps",
    "Verdict",
    "Victim",
    "judge",
    "never",
    "why_infeasible",
]
