"""Which requests run next, and on which blocks. Standard library only; it keeps the books and never sees a
tensor.
"""

from .adapter_slots import AdapterNames, AdapterSlots
from .admission import has_room, why_infeasible
from .forecast import ADMISSIONS, FuturePeak
from .history import AnswerLengths
from .limits import KVCacheGroup, Limits
from .plan import ForwardRows, ScheduledBatch, ScheduledRow, StepPlan, Swaps
from .policy import POLICIES
from .request import UNKNOWN, Request, SequenceGroup, Status, TokenSequence
from .scheduler import Count, Infeasible, Scheduler
from .swap import Decide, Victim, never

__all__ = [
    "ADMISSIONS", "POLICIES", "UNKNOWN", "AdapterNames", "AdapterSlots", "AnswerLengths", "Count", "Decide",
    "ForwardRows", "FuturePeak", "Infeasible", "KVCacheGroup", "Limits", "Request",
    "ScheduledBatch", "ScheduledRow", "Scheduler", "SequenceGroup", "Status", "StepPlan", "Swaps",
    "TokenSequence", "Victim", "has_room", "never", "why_infeasible",
]  # fmt: skip
