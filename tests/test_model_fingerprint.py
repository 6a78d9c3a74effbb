"""The name of a model's weights, the same wherever they lie."""

from __future__ import annotations

import torch
from families import BY_NAME, build

from hf_paged import demo
from hf_paged.model.fingerprint import fingerprint


def test_weights_have_a_name_of_their_own() -> None:
    """Not the process's, nor the object's; another one behind an optimizer's step, and in another precision."""
    model = demo.model()
    name = fingerprint(model)
    assert name == fingerprint(demo.model())
    assert name != fingerprint(build(BY_NAME["llama"]))
    assert name != fingerprint(demo.model().to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimizer.step()
    assert name != fingerprint(model)


def test_weights_that_are_elsewhere_count_by_shape() -> None:
    assert fingerprint(demo.model().to("meta")) == fingerprint(demo.model().to("meta"))
    assert fingerprint(demo.model().to("meta")) != fingerprint(demo.model())
