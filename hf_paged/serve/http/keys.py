"""API keys, and whose prefixes may be shared with whose."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple


class Tenant(NamedTuple):
    """Whose request it is. name: for logs, never the key. salt: of the prefixes of this tenant, None if all
    share theirs. sees_all: whether the map shows it the requests of all. admin: whether its key is one of the
    operator's own.
    """

    name: str
    salt: str | None
    sees_all: bool = False
    admin: bool = False

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request that brings one of its own."""
        if cache_salt is None:
            return self.salt
        return f"{len(self.salt or '')}:{self.salt or ''}:{cache_salt}"


class Keys:
    """The keys that a server knows. A key is compared in constant time with all of them, and only digests
    under a secret of the process are kept.
    """

    def __init__(
        self, keys: Sequence[str], share_prefixes: bool = False, admin_keys: Sequence[str] = ()
    ) -> None:
        self._secret = os.urandom(32)
        self._tenants = [
            (
                self._digest(key),
                Tenant(f"{kind}-{i}", None if share_prefixes else self._salt(key), admin, admin),
            )
            for kind, some, admin in (("key", keys, False), ("admin", admin_keys, True))
            for i, key in enumerate(dict.fromkeys(some))
        ]

    @property
    def names(self) -> list[str]:
        """The tenants' names, the keys in their order."""
        return [tenant.name for _, tenant in self._tenants]

    @property
    def open(self) -> bool:
        """True if no key is needed."""
        return not self._tenants

    def tenant(self, key: str | None) -> Tenant | None:
        """The tenant of a key; None if the server does not know it."""
        if self.open:
            return Tenant("open", None, sees_all=True)
        given = self._digest(key or "")
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if key else None

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=32).digest()

    def _salt(self, key: str) -> str:
        # A secret of the process is in it: equal keys of two processes have different salts.
        return blake2b(key.encode(), key=self._secret, person=b"salt", digest_size=16).hexdigest()


def bearer(authorization: str | None) -> str | None:
    """The key of an Authorization header."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
