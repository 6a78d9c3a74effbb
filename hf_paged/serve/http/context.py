"""The facts known about an HTTP request beside its body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .keys import Tenant

KEY = "hf_paged"


@dataclass
class Context:
    """An HTTP request: its number, its tenant, and the facts of its log line."""

    request_id: str
    tenant: Tenant
    notes: dict[str, Any] = field(default_factory=dict)
    span: dict[str, Any] = field(default_factory=dict)
    """Attributes of its span, where spans are made."""

    @classmethod
    def of(cls, scope: Any) -> Context:
        """That of a request which has come through the guard."""
        found = scope[KEY]
        assert isinstance(found, cls)
        return found

    def note(self, **facts: Any) -> None:
        """Add facts to the log line. No prompt, no answer, no key."""
        self.notes.update(facts)
