"""The ingress of hf_paged.ray, without replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is an extra: pip install 'hf_paged[ray]'")

from ray_serving import DEMO

from hf_paged.ray.gateway import Gateway
from hf_paged.ray.replica import Replica


def _gateway(options: dict[str, Any]) -> None:
    Gateway(SimpleNamespace(options=lambda **_: SimpleNamespace(answer=None)), options)


def _replica(options: dict[str, Any]) -> None:
    asyncio.run(Replica.__init__(Replica.__new__(Replica), options))


@pytest.mark.parametrize("part", [_gateway, _replica])
def test_a_broken_template_is_refused_as_by_the_server(part: Callable[[dict[str, Any]], None]) -> None:
    """Before an engine starts, and with the same words."""
    with pytest.raises(ValueError, match=r"--chat-template is broken in line 1: .*give a Jinja template"):
        part({**DEMO, "model": "demo", "chat-template": "{{ broken"})
