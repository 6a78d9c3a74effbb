"""Tensors still hold what they held, or not: samples at every look, and all of them in turns (contract C24)."""

from __future__ import annotations

import weakref

import pytest
import torch
from kernel_cases import DEVICE, GPU, load

from hf_paged.model import weights_digest as fingerprint
from hf_paged.model.snapshot import StateKey
from hf_paged.model.weights_digest import Contents, Unreadable, content_digest, tensor_facts


@pytest.fixture(params=["host", "torch", "kernel"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Words are read by the host, by torch, or by address; without a GPU the kernel is interpreted."""
    if request.param == "host" and GPU:
        pytest.skip("the host does not read a GPU's memory")
    monkeypatch.setattr(fingerprint, "hashes", lambda device: request.param == "host")
    kernels = load()
    digest = (lambda device: kernels.digest) if request.param == "kernel" else (lambda device: None)
    monkeypatch.setattr(fingerprint, "digester", digest)
    return request.param


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large."""
    monkeypatch.setattr(fingerprint, "SMALL", 64)
    monkeypatch.setattr(fingerprint, "SAMPLES", 32)
    monkeypatch.setattr(fingerprint, "PIECE", 256)
    monkeypatch.setattr(fingerprint, "TURN", {"cpu": 4096, "cuda": 4096})


def tensors() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    made = [
        torch.randn(*shape, generator=random).to(DEVICE)
        for shape in ((40, 50), (3,), (60, 60), (8, 300), (1,))
    ]
    return [made[0], made[1], made[2].t(), made[3][:, ::3], made[4].bfloat16()]


@pytest.mark.usefixtures("_small")
def test_a_word_between_the_samples_is_seen_when_its_turn_comes(reader: str) -> None:
    watched = tensors()
    contents = Contents(watched)
    assert contents.turns >= 3
    for _ in range(2 * contents.turns):
        assert contents.same(contents.look(watched))
    watched[0].data[1, 1] += 1
    assert [contents.same(contents.look(watched)) for _ in range(contents.turns)].count(False) == 1


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("which", range(5))
def test_what_changes_everywhere_is_seen_at_once(reader: str, which: int) -> None:
    """Small or large, turned, with gaps, of an odd number of bytes."""
    watched = tensors()
    contents = Contents(watched)
    watched[which].data += 1
    assert not contents.same(contents.look(watched))
    watched[which].data -= 1
    contents = Contents(watched)
    assert contents.same(contents.look(watched))


@pytest.mark.usefixtures("_small")
def test_both_readers_find_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = [torch.randn(50, 40, device=DEVICE), torch.randn(30, device=DEVICE)]
    found = []
    monkeypatch.setattr(fingerprint, "hashes", lambda device: False)
    for digest in (None, load().digest):
        monkeypatch.setattr(fingerprint, "digester", lambda device, digest=digest: digest)
        contents = Contents(watched)
        found.append([reading.fetch() for _ in range(3) for reading in contents.look(watched)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.int8,
        torch.bool,
        torch.uint8,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_words_of_every_dtype(reader: str, dtype: torch.dtype) -> None:
    for shape in ((), (3,), (5, 7), (0, 4), (8, 8)):
        tensor = torch.zeros(shape, dtype=dtype, device=DEVICE)
        contents = Contents([tensor])
        assert contents.same(contents.look([tensor]))
        if tensor.numel():
            tensor.view(-1)[-1:] = torch.ones(1, device=DEVICE).to(dtype)
            assert not contents.same(contents.look([tensor]))


def test_rows_that_changed_places_are_another_content(reader: str) -> None:
    """A sum that does not mind the order would be the same."""
    tensor = torch.randn(16, 16, device=DEVICE)
    contents = Contents([tensor])
    tensor.data[[3, 4]] = tensor.data[[4, 3]].clone()
    assert not contents.same(contents.look([tensor]))
    contents = Contents([tensor])
    tensor.data.neg_()
    assert not contents.same(contents.look([tensor]))


def tensors_key(several: list[torch.Tensor]) -> StateKey:
    return StateKey(tensor_facts(several), several)


def test_the_key_of_tensors_holds_what_torch_knows() -> None:
    """A write, another address, another tensor, another shape; and no write through `.data`."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    key = tensors_key([weight])
    assert tensors_key([weight]).same(key)
    with torch.no_grad():
        weight += 0
    assert not tensors_key([weight]).same(key)
    key = tensors_key([weight])
    weight.data += 1
    assert tensors_key([weight]).same(key)
    weight.data = weight.data.t()
    assert not tensors_key([weight]).same(key)
    key = tensors_key([weight])
    weight.data = weight.data.clone()
    assert not tensors_key([weight]).same(key)
    assert not tensors_key([weight]).same(tensors_key([torch.nn.Parameter(weight.data)]))
    assert not tensors_key([weight]).same(tensors_key([]))
    with torch.inference_mode():
        inference = torch.ones(3)
    assert tensors_key([inference]).same(tensors_key([inference]))


def test_subclasses_are_read_where_their_numbers_are() -> None:
    """A tensor that wraps others: each of them is read."""

    class Packed(torch.Tensor):
        @staticmethod
        def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

        def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
            self.numbers, self.scale = numbers, scale

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["numbers", "scale"], None

        @classmethod
        def __torch_dispatch__(
            cls, func: object, types: object, args: tuple[Packed, ...] = (), kwargs: object = None
        ) -> object:
            return args[0]

    packed = Packed(torch.ones(5, 5, dtype=torch.int8), torch.ones(5))
    contents = Contents([packed])
    assert contents.same(contents.look([packed]))
    packed.scale[2] = 3
    assert not contents.same(contents.look([packed]))
    key = tensors_key([packed])
    assert tensors_key([packed]).same(key)
    packed.scale = packed.scale.clone()
    assert not tensors_key([packed]).same(key)


@pytest.mark.parametrize(
    "tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"]
)
def test_what_has_no_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unreadable, match="has no memory to read"):
        Contents([tensor])


def test_looking_keeps_no_tensor_alive(reader: str) -> None:
    tensor = torch.randn(100, 100, device=DEVICE)
    contents, key = Contents([tensor]), tensors_key([tensor])
    contents.look([tensor])
    gone, storage = weakref.ref(tensor), weakref.ref(tensor.untyped_storage())
    del tensor
    assert gone() is None
    assert storage() is None
    assert not tensors_key([torch.randn(100, 100, device=DEVICE)]).same(key)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device: there the kernel is what reads by default")
def test_a_device_is_read_by_address() -> None:
    watched = tensors()
    contents = Contents(watched)
    assert any(by_address for _, by_address in contents._kv_groups)
    assert contents.same(contents.look(watched))


def test_the_content_of_large_tensors_is_taken_in_pieces() -> None:
    """Any byte counts, and the same numbers have the same digest wherever they lie."""
    large = torch.arange(3 * 2**22 + 5, dtype=torch.int32)

    def digest(tensor: torch.Tensor) -> bytes:
        return content_digest([("head", [tensor])])

    found = digest(large)
    assert digest(large.clone()) == found == digest(torch.stack([large, large], 1)[:, 0])
    for place in (0, 2**22 - 1, 2**22, len(large) - 1):
        changed = large.clone()
        changed[place] += 1
        assert digest(changed) != found
    assert digest(large[:-1]) != found
