"""A model that we have seen can be moved, cast, swapped, loaded, freed and wrapped like one that we have not.

Every entry leaves a model as torch, accelerate and FSDP expect it: no weak reference to a weight, no memory that
cannot be resized. tests/test_quantized.py does the same with torchao.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from cases import every_other
from families import BY_NAME, build
from seen_models import IDS, Seen
from torch.distributed.fsdp import fully_shard

ENTRIES = ("generate", "prefixes", "invariant", "open_engine", "closed_engine", "released")


@contextmanager
def swapping() -> Iterator[None]:
    """Modules swap their parameters where they would replace them."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swapped_half(model: Any) -> None:
    with swapping():
        model.half()


def swapped_load(model: Any) -> None:
    state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    with swapping():
        model.load_state_dict(state)


def swapped_tensors(model: Any) -> None:
    for parameter in list(model.parameters()):
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().clone() * 2))


def freed(model: Any) -> None:
    """As FSDP frees what it has gathered."""
    for tensor in (*model.parameters(), *model.buffers()):
        size = tensor.untyped_storage().nbytes()
        content = tensor.detach().clone()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)
        with torch.no_grad():
            tensor.copy_(content)


def offloaded(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    accelerate.hooks.remove_hook_from_module(model, recurse=True)


def pickled(model: Any) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False).state_dict())


def moved_to_meta(model: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    rotary = copy.deepcopy(model.model.rotary_emb)  # whose buffers no state has
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    model.model.rotary_emb = rotary


CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.bfloat16),
    "half, swapped": swapped_half,
    "load_state_dict": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "load_state_dict, assigned": lambda model: model.load_state_dict(
        copy.deepcopy(model.state_dict()), assign=True
    ),
    "load_state_dict, swapped": swapped_load,
    "swap_tensors": swapped_tensors,
    "resize_": freed,
    "share_memory": lambda model: model.share_memory(),
    "cpu_offload": offloaded,
    "torch.save": pickled,
    "deepcopy": lambda model: model.load_state_dict(copy.deepcopy(model).state_dict()),
    "meta": moved_to_meta,
}


@pytest.mark.parametrize(("name", "entry"), every_other([*CONVERSIONS], ENTRIES, every=4))
def test_a_conversion_between_two_uses(entry: str, name: str) -> None:
    """The weights become what they become without us, and the next answers are theirs (C24)."""
    plain, seen = Seen(build(BY_NAME["llama"])), Seen(build(BY_NAME["llama"]))
    plain.unseen()
    assert torch.equal(plain.unseen(), getattr(seen, entry)())
    for each in (plain, seen):
        torch.manual_seed(0)
        CONVERSIONS[name](each.model)
    expected = plain.model.state_dict()
    found = seen.model.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor, expected[key]), key
    assert torch.equal(plain.unseen(), getattr(seen, entry)())
    seen.close()


@pytest.mark.parametrize("entry", ENTRIES)
def test_fsdp_shards_and_frees_what_we_have_seen(entry: str, tmp_path: Path) -> None:
    """One rank: FSDP replaces the parameters, and frees after each forward what it has gathered."""
    seen = Seen(build(BY_NAME["llama"]))
    model = seen.model
    before = model(IDS).logits
    getattr(seen, entry)()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        torch.testing.assert_close(model(IDS).logits, before)
        model(IDS, labels=IDS).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        seen.close()
        torch.distributed.destroy_process_group()
