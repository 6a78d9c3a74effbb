"""A cache's length in a captured step: a model may count from it, and never learns it on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from tape import record
from torch import nn

from hf_paged.model import lengths
from hf_paged.model.lazy import NotCapturable
from hf_paged.model.lengths import DeviceNumber, GrowingOnes, LengthsOnDevice, lengths_on_device
from hf_paged.model.rehearsal import Rehearsal

CPU = torch.device("cpu")
GROWS = "grows from step to step"


@pytest.fixture
def length() -> DeviceNumber:
    return DeviceNumber.of(torch.tensor(7))


def value(number: torch.Tensor) -> Any:
    """The numbers that the device would know."""
    return number.as_subclass(torch.Tensor).tolist()


# ---- numbers


@pytest.mark.parametrize(
    ("add", "more"),
    [
        (lambda n: n + 3, 3),
        (lambda n: 3 + n, 3),
        (lambda n: n.add(3), 3),
        (lambda n: n + -2, -2),
        (lambda n: n + 0, 0),
        (lambda n: (n + 3) + 4, 7),
        (lambda n: 1 + (n + 3).add(4) + -2, 6),
    ],
)
def test_adding_a_plain_number_gives_a_length(
    add: Callable[[Any], Any], more: int, length: DeviceNumber
) -> None:
    further = add(length)
    assert isinstance(further, DeviceNumber)
    assert further.base is length.base
    assert (further.more, value(further), value(length)) == (more, 7 + more, 7)


@pytest.mark.parametrize(
    "add",
    [
        lambda n: n.add(3, alpha=2),
        lambda n: n.add(other=6),
        lambda n: torch.add(n, 6),
        lambda n: 3 + (n - 1) + 4,
    ],
)
def test_a_length_is_as_far_as_it_says(add: Callable[[Any], Any], length: DeviceNumber) -> None:
    """However it was added: a number that calls itself a length is so many tokens further than its base."""
    further = add(length)
    assert value(further) == 13
    assert not isinstance(further, DeviceNumber) or further.more == 6


def test_adding_in_place_leaves_the_length_alone(length: DeviceNumber) -> None:
    """The number lies where the next layer reads it: `past += 1` in a model is its own affair, or refused."""
    further = length
    with suppress(NotCapturable):
        further += 1
        assert value(further) == 8
    assert value(length) == value(length.base) == 7


def test_a_number_begins_as_its_own_base() -> None:
    """It looks at the device's number, it is no copy: another step, another length."""
    number = torch.tensor(7)
    length = DeviceNumber.of(number)
    assert (length.base is number, length.more) == (True, 0)
    number.fill_(9)
    assert value(length) == 9


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda n: n - 1, 6),
        (lambda n: n * 2, 14),
        (lambda n: n + 1.5, 8.5),
        (lambda n: n + torch.tensor([1, 2]), [8, 9]),
        (lambda n: torch.arange(3) + n, [7, 8, 9]),
        (lambda n: n + n, 14),
        (lambda n: torch.stack([n, n + 1]), [7, 8]),
        (lambda n: torch.full((2,), 5).add(n), [12, 12]),
        (lambda n: torch.full((2,), 5).add_(n), [12, 12]),
        (lambda n: n.to(torch.float32), 7.0),
        (lambda n: n.expand(2), [7, 7]),
        (lambda n: n[None], [7]),
        (lambda n: n == 7, True),
        (lambda n: torch.where(n > 3, n, 0), 7),
        (lambda n: torch.maximum(n, other=n + 2), 9),
        (lambda n: copy.deepcopy(n), 7),
    ],
)
def test_other_work_gives_plain_tensors(
    compute: Callable[[Any], Any], expected: Any, length: DeviceNumber
) -> None:
    """With the right content, computed on the device; from there on nobody takes it for a length."""
    made = compute(length)
    assert type(made) is torch.Tensor
    assert made.tolist() == expected


def test_what_is_no_tensor_stays_what_it_is(length: DeviceNumber) -> None:
    assert (length.shape, length.ndim, length.dtype, length.device.type) == (
        torch.Size([]),
        0,
        torch.long,
        "cpu",
    )


@pytest.mark.parametrize(
    "read",
    [
        bool, int, float, len, range, list("ab").__getitem__,
        lambda n: [1, 2, 3][:n], lambda n: [1, 2, 3][n], lambda n: torch.zeros(9)[n:], lambda n: torch.zeros(9)[: n + 1],
        lambda n: n.item(), lambda n: n.tolist(), lambda n: n.numpy(), lambda n: f"{n}", lambda n: f"{n:d}", lambda n: "yes" if n else "no",
        lambda n: torch.zeros(9).split(n), lambda n: torch.tensor([n, n]), lambda n: (n + 1).item(),
    ],
)  # fmt: skip
def test_the_host_cannot_read_it(read: Callable[[Any], Any], length: DeviceNumber) -> None:
    """The number it read would stay the same at every replay."""
    with pytest.raises(NotCapturable, match="asks for the cache's length on the host"):
        read(length)


@pytest.mark.parametrize(
    "read",
    [
        lambda n: torch.zeros(2, n), lambda n: torch.ones((2, n)), lambda n: torch.ones(2, 3, n), lambda n: torch.ones(n),
        lambda n: torch.full((2, n), 1), lambda n: torch.zeros(9).new_ones(2, n), lambda n: torch.zeros(9)[n], lambda n: complex(n),
        lambda n: torch.arange(start=n, end=n + 2), lambda n: torch.arange(end=n), lambda n: torch.arange(n - 1), lambda n: max(n, 3),
        lambda n: "yes" if n > 3 else "no", lambda n: torch.zeros(9).narrow(0, n, 1), lambda n: 7 in n,
    ],
)  # fmt: skip
def test_what_reads_behind_its_back_is_rehearsed(read: Callable[[Any], Any], length: DeviceNumber) -> None:
    """Sizes, and numbers that were computed from a length: the rehearsal of the step notices."""
    with (
        LengthsOnDevice(),
        Rehearsal([CPU], [length.base]),
        pytest.raises(NotCapturable, match="makes the host wait"),
    ):
        read(length)


# ---- counting


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (0, 1), (2, 5), (3, 3), (-2, 1)])
def test_counting_from_one_length_to_another(begin: int, end: int, length: DeviceNumber) -> None:
    with LengthsOnDevice():
        counted = torch.arange(length + begin, length + end)
    assert type(counted) is torch.Tensor
    assert torch.equal(counted, torch.arange(7 + begin, 7 + end))


def test_whether_a_model_counted_is_known_afterwards(length: DeviceNumber) -> None:
    """A step that did nothing with lengths is captured without the mode, through which all of torch
    passes.
    """
    for count, met in [
        (lambda: torch.arange(3), False),
        (lambda: torch.ones(2, 3), False),
        (lambda: length + 1, False),
        (lambda: torch.arange(length, length + 2), True),
        (lambda: torch.ones(2, length), True),
    ]:
        with LengthsOnDevice() as mode:
            count()
        assert mode.met is met


def test_counting_as_asked(length: DeviceNumber) -> None:
    with LengthsOnDevice():
        counted = torch.arange(length, length + 2, dtype=torch.float32, device="cpu")
    assert (counted.dtype, counted.tolist()) == (torch.float32, [7.0, 8.0])


def test_a_replay_counts_from_its_own_length() -> None:
    """Counts follow the device's number, the number of columns stays."""
    number = torch.tensor(7)

    def step() -> dict[str, torch.Tensor]:
        length = DeviceNumber.of(number)
        with LengthsOnDevice():
            return {"counted": torch.arange(length + 1, length + 3)}

    replay, answer = record(step, None, CPU)
    for now in (8, 30):
        number.fill_(now)
        replay()
        assert answer["counted"].tolist() == [now + 1, now + 2]


@pytest.mark.parametrize(
    "count",
    [
        lambda n: torch.arange(n),
        lambda n: torch.arange(0, n + 2),
        lambda n: torch.arange(n, 9),
        lambda n: torch.arange(n, n + 4, 2),
        lambda n: torch.arange(0, n, 1),
        lambda n: torch.arange(n - 1, n),
        lambda n: torch.arange(n, DeviceNumber.of(torch.tensor(9))),
        lambda n: torch.arange(DeviceNumber.of(torch.tensor(7)), n + 1),
    ],
)
def test_counting_to_what_grows_is_refused(count: Callable[[Any], Any], length: DeviceNumber) -> None:
    """One end alone, or two numbers that need not keep their distance."""
    with LengthsOnDevice(), pytest.raises(NotCapturable, match=GROWS):
        count(length)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3),
        lambda: torch.arange(1, 7, 2, dtype=torch.float64),
        lambda: torch.arange(end=4),
        lambda: torch.arange(torch.tensor(2), torch.tensor(4)),
        lambda: torch.ones(3),
        lambda: torch.ones(2, 3, dtype=torch.bool),
        lambda: torch.ones((2, 3)),
        lambda: torch.ones([]),
        lambda: torch.ones(size=(2, 3)),
        lambda: torch.zeros(2, 3),
    ],
)
def test_others_count_and_make_ones_as_ever(make: Callable[[], torch.Tensor]) -> None:
    with LengthsOnDevice():
        made = make()
    expected = make()
    assert type(made) is torch.Tensor
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


# ---- masks of ones


def test_ones_up_to_a_length(length: DeviceNumber) -> None:
    """They say nothing, so they may be handed on; at no size are they right for every replay."""
    with LengthsOnDevice():
        ones = torch.ones(3, length + 2, device="cpu")
        mask = torch.ones(3, length, dtype=torch.bool)
    assert isinstance(ones, GrowingOnes)
    assert (ones.shape[0], ones.dtype, mask.dtype, mask.device.type) == (3, torch.float32, torch.bool, "cpu")
    assert ones.to(torch.bool) is not None
    assert isinstance(ones.to(torch.bool), GrowingOnes)
    assert isinstance(ones.bool().to("cpu", torch.float64), GrowingOnes)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x[:, None, None, :],
        lambda x: x.sum(),
        lambda x: x.cumsum(-1),
        lambda x: x.tolist(),
        lambda x: bool(x.all()),
    ],
)
def test_computing_with_growing_ones_is_refused(compute: Callable[[Any], Any], length: DeviceNumber) -> None:
    with LengthsOnDevice():
        ones = torch.ones(3, length + 2)
    with pytest.raises(NotCapturable, match=GROWS):
        compute(ones)


# ---- around a forward


class Warner(nn.Module):
    """A model that looks at its tokens on the host, only to warn."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = 0

    def warn_if_padding_and_no_attention_mask(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> None:
        self.looked += 1

    def forward(self, input_ids: torch.Tensor) -> None:
        self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask=None)


def test_warners_are_silent_inside_only() -> None:
    inner, outer = Warner(), Warner()
    outer.inner, outer.other = inner, nn.Linear(2, 2)
    before = [set(module.__dict__) for module in outer.modules()]
    with lengths_on_device(outer, LengthsOnDevice()):
        outer(torch.zeros(1))
        inner(torch.zeros(1))
        with lengths_on_device(inner, LengthsOnDevice()):
            inner(torch.zeros(1))
        inner(torch.zeros(1))
        assert (outer.looked, inner.looked) == (0, 0)
    outer(torch.zeros(1))
    inner(torch.zeros(1))
    assert (outer.looked, inner.looked) == (1, 1)
    assert [set(module.__dict__) for module in outer.modules()] == before


def test_warners_speak_again_after_an_error() -> None:
    warner, length = Warner(), DeviceNumber.of(torch.tensor(7))
    before = set(warner.__dict__)
    with pytest.raises(NotCapturable), lengths_on_device(warner, LengthsOnDevice()):
        torch.arange(length)
    assert set(warner.__dict__) == before
    warner(torch.zeros(1))
    assert warner.looked == 1
    assert torch.equal(torch.ones(2, length), torch.ones(2, 7)), "torch makes its own again"


def test_a_warner_of_the_user_stays() -> None:
    """Whoever put his own in the method's place gets it called, and finds it there afterwards."""
    warner, called = Warner(), []

    def own(*args: Any, **kwargs: Any) -> None:
        called.append(args)

    warner.warn_if_padding_and_no_attention_mask = own  # type: ignore[method-assign]
    with lengths_on_device(warner, LengthsOnDevice()):
        warner(torch.zeros(1))
    assert warner.__dict__[lengths.WARNING] is own
    assert (len(called), warner.looked) == (1, 0)


def test_transformers_has_the_warner() -> None:
    """The method that is silenced exists under this name, and its look at the tokens is what a step could not
    be captured with.
    """
    model: Any = build(BY_NAME["llama"])
    ids = torch.tensor([[0, 5]])
    with Rehearsal([CPU], [ids]), pytest.raises(NotCapturable):
        getattr(model, lengths.WARNING)(ids, None)
    with lengths_on_device(model, LengthsOnDevice()), Rehearsal([CPU], [ids]):
        getattr(model, lengths.WARNING)(ids, None)
