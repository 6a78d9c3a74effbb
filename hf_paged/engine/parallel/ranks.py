"""The processes that compute one model together: how they agree, and how the failure of one ends all."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from ...kv import is_out_of_memory
from ...kv.budget import free_bytes
from ...model.offloaded import input_device
from ...model.ranks.symmetric_memory import end_waits
from ...model.ranks.tensor_parallel import mesh_of
from ...model.ranks.votes import FORKED, RankVotes, before_groups, collectives_begun, smallest
from .message import MessageKind
from .packed import Packed, unpack

HEAD = 1024
"""Numbers of a message that are sent at once; longer ones come in two parts."""
EVER = timedelta(days=3650)
"""How long a rank waits for the next message: rank 0 may be idle for as long as it likes."""
POLL = 0.2
"""Seconds between two looks of a rank at what became of the others."""
GRACE = 2.0
"""Seconds within which an error of all ranks alike reaches all of them."""
GOODBYE = 5.0
"""Seconds that rank 0 waits for the others to take its last message, and a rank for its waits to end."""
FAULT = "fault"
CLOSED = "closed"
_abandoned: set[Any] = set()
"""Those whose engine was collected before it was closed."""
_leaving = threading.Lock()
"""Held while one of these leaves."""


class RankError(RuntimeError):
    """A rank has failed, or does not answer: the engine cannot go on, on any rank."""


class Ranks(RankVotes):
    """The ranks of a tensor-parallel engine: their votes, rank 0's messages, and the failure of one.

    A rank that fails notes it in the store of the process group. A thread of each rank reads the store, and
    breaks off whatever its rank waits for; so it does where a step takes more than `timeout` seconds.
    """

    each_decides = False

    def __init__(self, model: nn.Module, timeout: float) -> None:
        mesh = mesh_of(model)
        assert mesh is not None
        self._device_group: dist.ProcessGroup = mesh.get_group()
        """The group of the model's own collectives."""
        super().__init__(self._device_group, timeout, None)
        self.timeout = timeout
        self._device = input_device(model)
        self._first = dist.get_process_group_ranks(self._device_group)[0]
        base: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"{self._group.group_name}/faults", base.clone())
        self._since: float | None = None
        self._point = 0
        """How often the ranks have met: they do so in one order, so equal numbers are one meeting."""
        self._noted = -1
        """The collectives begun here that the others know of."""
        self._sending: list[Any] = []
        """The message before, if it may be on its way."""
        self._head = torch.zeros(HEAD, dtype=torch.int32, device="cpu")
        self._messages = 0
        """How many rank 0 has sent, or this rank has received or waits for."""
        dist.distributed_c10d._set_pg_timeout(EVER, self._group)
        self._left_early: dict[int, str] = {}
        """The ranks that have closed their engine before rank 0 has, and why."""
        self._breaking: threading.Thread | None = None
        """Ends waits for a rank that has failed."""
        self.ended_in_order = self.leads
        """True once rank 0 has closed; on it, always."""
        self._over = threading.Event()
        self._watch = threading.Thread(target=_watch, args=(weakref.ref(self), self._over), daemon=True)
        self._watch.start()
        self._leave_at_exit = _at_exit(weakref.ref(self))
        atexit.register(self._leave_at_exit)

    @property
    def leads(self) -> bool:
        """True if this rank schedules and samples."""
        return self.rank == 0

    @property
    def meeting(self) -> bool:
        """True while this rank waits for others, or they for it."""
        return self._since is not None

    # ---- messages

    def send(self, numbers: array[int]) -> None:
        """Give numbers to all other ranks, without waiting until they have them."""
        if self._connections.complete:
            self._messages += 1
            try:
                self._connections.send(numbers.tobytes())
            except OSError as error:
                raise dist.DistNetworkError(f"a rank takes no message: {error}") from error
            return
        for work in self._sending:  # its tensors are read until then
            work.wait()
        head = self._head
        whole = torch.frombuffer(numbers, dtype=torch.int32)
        head[0] = len(numbers)
        first = min(len(numbers), HEAD - 1)
        head[1 : 1 + first] = whole[:first]
        parts = [head] if len(numbers) == first else [head, whole[first:].clone()]
        self._sending = [
            dist.broadcast(part, self._first, group=self._group, async_op=True) for part in parts
        ]

    def receive(self) -> list[int]:
        """The next numbers of rank 0, whenever they come."""
        numbers = self._read_message()
        # From here on nobody waits for anybody, and rank 0's process may end.
        self.ended_in_order |= numbers[0] == MessageKind.CLOSE
        return numbers

    def _read_message(self) -> list[int]:
        if self._connections.complete:
            self._messages += 1
            try:
                return array("i", self._connections.receive()).tolist()
            except OSError as error:
                raise dist.DistNetworkError(str(error)) from error
        head = self._head
        self._broadcast(head)
        count = int(head[0])
        found: list[int] = head[1 : 1 + min(count, HEAD - 1)].tolist()
        if count > len(found):
            rest = torch.zeros(count - len(found), dtype=torch.int32, device="cpu")
            self._broadcast(rest)
            found += rest.tolist()
        return found

    def broadcast_object(self, packed: Packed | None = None) -> Any:
        """Rank 0's value, on the other ranks; for what is rare."""
        size = torch.tensor([0 if packed is None else len(packed.pickled)], device="cpu")
        self._broadcast(size)
        if packed is not None:
            for part in (packed.pickled, *packed.tensors):
                self._broadcast(part)
            return None
        pickled = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._broadcast(pickled)
        return unpack(pickled, self._broadcast)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, self._first, group=self._group)

    def broadcast_on_device(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor to all ranks, in the order of the device's work."""
        self.require_whole()
        dist.broadcast(tensor, self._first, group=self._device_group)

    def least_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """For each number the smallest of all ranks', in the order of the device's work."""
        self.require_whole()
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._device_group)
        return tensor

    def smallest(self, numbers: Sequence[int], place: str = "") -> list[int]:
        """For each number the smallest of all ranks', by gloo: rank 0's messages lie on the connections."""
        return smallest(numbers, self._group)

    def _ended(self, why: str) -> RankError:
        self.fail(f"{why}; else report this")
        return RankError(self.reason)

    def attempt(self, act: Callable[[], object], kind: type[Exception]) -> None:
        """Do on every rank what takes memory and meets no other. If it fails on one, it does on all: with a
        `kind` of error where it has not.
        """
        error: Exception | None = None
        try:
            act()
        except Exception as trouble:
            error = trouble
        if not any(self.any(error is not None)):
            return
        words = self.gather(None if error is None else _described(error))
        if error is not None:
            raise error
        raise kind(next(f"rank {rank}: {each}" for rank, each in enumerate(words) if each is not None))

    def any(self, *flags: bool, agreed: object = None, number: int = 0) -> list[bool]:
        """Of each flag whether it is true on any rank, and at last whether ranks have different numbers.
        agreed: what must be the same on all, or all raise RuntimeError.
        """
        digest = crc32(repr(agreed).encode())
        asked = [*(not flag for flag in flags), number, -number, digest, -digest]
        *none, low, high, least, most = self.smallest(asked)
        if least != -most:
            raise RuntimeError(
                f"ranks have different adapters in their models (rank {self.rank}: {agreed}); call pause(), "
                "load, activate or delete the same on all ranks, then resume()"
            )
        return [*(not each for each in none), low != -high]

    # ---- faults

    @contextmanager
    def together(self, everyone: bool = True) -> Iterator[None]:
        """A stretch in which ranks wait for each other. An error that all of them raise is raised as it is;
        any other ends the engine on all ranks, with one RankError. everyone: whether all ranks come here.

        Alike means that all have begun as many collectives: else some devices would wait in a sum that others
        skip, and the next step would add up different things.
        """
        self.require_whole()
        outer = self._since
        self._point += everyone and outer is None
        try:
            if outer is None:
                self._met += self._begun()
                self._since = time.monotonic()
            yield
        except RankError:
            raise
        except Exception as error:
            if outer is None and not self._alike(error, everyone):
                raise RankError(self.reason) from error
            raise
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._since = outer
        self.require_whole()

    def require_whole(self) -> None:
        """Raise if a rank has failed."""
        if self.reason is not None:
            raise RankError(self.reason)

    def fail(self, error: BaseException | str) -> None:
        """End the engine on all ranks. The first reason counts."""
        what = error if isinstance(error, str) else f"rank {self.rank} raised {self._described(error)}"
        with suppress(RuntimeError):  # the store's process may be gone
            what = self._store.compare_set(FAULT, "", what).decode() or what
        self._break_off(what)

    def _described(self, error: BaseException) -> str:
        """An error in words; of one for want of memory also where, and what to do."""
        words = _described(error)
        if not is_out_of_memory(error):
            return words
        return (
            f"{words} ({free_bytes(self._device)} bytes are free on its {self._device}). Other ranks were in "
            "the middle of this step, so it cannot be repeated; lower max_batch_tokens, memory_fraction or "
            "num_blocks, or free memory there, and start all ranks again"
        )

    def _alike(self, error: Exception, everyone: bool) -> bool:
        """True if all ranks have raised an error of their own at this point. If not, the engine has ended."""
        lost = _is_lost_connection(error)
        missing = [0]
        try:
            self._store.set(f"here/{self._point}/{self.rank}", "1")
            if not lost and everyone:
                self._store.set(f"raised/{self._point}/{self.rank}", str(self._begun()))
            self.look()
            end = time.monotonic() + GRACE
            while time.monotonic() < end and self.reason is None:
                missing = self._missing("here")
                if everyone and not self._missing("raised"):
                    keys = [f"raised/{self._point}/{each}" for each in range(self.size)]
                    if len({self._store.get(key) for key in keys}) == 1:
                        return True
                    break
                time.sleep(POLL / 10)
        except RuntimeError:  # the store's process is gone, and most likely rank 0 with it
            pass
        if self.reason is None:
            gone = f"rank {', '.join(map(str, missing))} has ended or does not answer"
            self.fail(gone if lost and missing else error)
        return False

    def _missing(self, what: str) -> list[int]:
        """The ranks that have not noted something at this point."""
        return [each for each in range(self.size) if not self._store.check([f"{what}/{self._point}/{each}"])]

    def lost(self, rank: int) -> RankError:
        """A rank does not answer: why, as soon as that is known."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end and self.reason is None:
            time.sleep(POLL / 10)
        if self.reason is None:
            self.fail(f"rank {rank} has ended or does not answer")
        return RankError(self.reason)

    def look(self) -> None:
        """See what became of the other ranks, and whether they take too long."""
        if self.reason is not None or (self.ended_in_order and not self.leads):
            return
        try:
            self._note_collectives()
            if self._store.check([FAULT]):
                self._break_off(self._store.get(FAULT).decode())
        except RuntimeError:
            self._break_off("rank 0 has ended, or the process with the store of the process group")
        for rank in self._connections.closed():
            with suppress(RuntimeError):  # the store's process may be gone
                if self._store.check([f"left/{rank}"]):
                    self._left_early[rank] = self._store.get(f"left/{rank}").decode()
                    continue
            self.fail(f"rank {rank} has ended; start all again (a rank that is done closes its engine first)")
        if self._since is not None:
            for rank, why in self._left_early.items():
                if why:
                    self.fail(f"rank {rank} {why}")
        since = self._since
        if since is not None and time.monotonic() - since > self.timeout:
            self.fail(
                f"a step has taken more than rank_timeout={self.timeout:g} seconds: {self._behind()} hangs"
            )

    def _note_collectives(self) -> None:
        """Let the others know how many collectives this rank has begun."""
        count = collectives_begun(self._device_group) + collectives_begun(self._group) + self._messages
        if count != self._noted:
            self._noted = count
            self._store.set(f"collectives/{self.rank}", str(count))

    def _behind(self) -> str:
        """The ranks for which the others wait."""
        with suppress(RuntimeError):  # the store's process may be gone
            keys = [f"collectives/{rank}" for rank in range(self.size)]
            counts = [int(self._store.get(key)) if self._store.check([key]) else 0 for key in keys]
            behind = waited_for(counts)
            if behind:
                return f"rank {', '.join(map(str, behind))}"
        return "a rank"

    def _break_off(self, reason: str) -> None:
        """Let no thread of this process wait for another rank any more."""
        self._connections.shut()
        if self.reason is not None:
            return
        self.reason = reason
        breaking = threading.Thread(target=self._break_waits, daemon=True)
        try:
            threading.Thread(target=end_waits, args=(self._device_group,), daemon=False).start()
            breaking.start()
            self._breaking = breaking
        except RuntimeError:  # an interpreter that ends starts no thread
            self._break_waits()

    def _break_waits(self) -> None:
        """Let no thread wait for a collective. For NCCL this takes until no captured step has collectives."""
        for group in (self._device_group, self._group):
            break_waits(group, self.rank, self.size)

    def _end_breaking(self) -> None:
        """Wait until the process groups may be destroyed."""
        if self._breaking is not None:
            self._breaking.join(GOODBYE)

    # ---- the end

    def close(self) -> None:
        """Leave the others. Twice is once. If rank 0 goes on without this rank, it gets an error."""
        if not self._over.is_set():
            error = sys.exception()
            words = "has closed its engine, and rank 0 has not"
            if error is not None:
                words = f"raised {_described(error)}"
            with suppress(RuntimeError):  # the store's process may be gone
                self._store.set(f"left/{self.rank}", "" if self.ended_in_order else words)
        self._over.set()
        atexit.unregister(self._leave_at_exit)
        if threading.current_thread() is not self._watch:
            self._watch.join()
        self._end_breaking()
        self._connections.close()
        if self.reason is None and all(work.is_completed() for work in self._sending):
            with suppress(ValueError, RuntimeError):  # it has gone already, with all others
                dist.destroy_process_group(self._group)

    def forget(self) -> None:
        """This process is a fork of the rank's: it meets no other one, and ends none."""
        self.reason = FORKED
        self._over.set()

    def abandon(self) -> None:
        """The engine is gone, and was not closed: the thread of this rank leaves the others. Finalizers run
        in the middle of anything, so this only notes it.
        """
        if not self._over.is_set():
            _abandoned.add(self)

    def leave(self) -> None:
        """Close what was abandoned, and let the others know."""
        if self in _abandoned:
            if self.leads:
                self.announce_end(array("i", [MessageKind.CLOSE]))
            self.close()
            _abandoned.discard(self)

    def announce_end(self, numbers: array[int]) -> None:
        """Rank 0 ends, with an error if it handles one: give the others its last message, if they take it.

        The words of the error are added to it, and stay in the store for ranks that do not take it.
        """
        if self.reason is not None or self._over.is_set():
            return
        error = sys.exception() or getattr(sys, "last_value", None)
        words = "" if error is None else f"rank 0 raised {_described(error)}"[: HEAD - 1 - len(numbers)]
        numbers.extend(map(ord, words))
        with suppress(RuntimeError, OSError):
            self._store.set(CLOSED, words)
            if self._connections.complete:
                self._connections.send(numbers.tobytes(), GOODBYE)
                return
            head = torch.zeros_like(self._head)
            head[0] = len(numbers)
            head[1 : 1 + len(numbers)] = torch.frombuffer(numbers, dtype=torch.int32)
            work: Any = dist.broadcast(head, self._first, group=self._group, async_op=True)
            end = time.monotonic() + GOODBYE
            while not work.is_completed() and not self._alone() and time.monotonic() < end:
                time.sleep(POLL / 100)
            if not work.is_completed():
                break_waits(self._group, self.rank, self.size)

    def _alone(self) -> bool:
        """True if all other ranks have left."""
        return all(self._store.check([f"left/{each}"]) for each in range(self.size) if each != self.rank)

    def ended(self) -> str | None:
        """With which words rank 0 has ended, perhaps none; None if it has not."""
        with suppress(RuntimeError):  # the store's process may be gone
            return self._store.get(CLOSED).decode() if self._store.check([CLOSED]) else None
        return None


def _watch(whose: weakref.ref[Ranks], over: threading.Event) -> None:
    """Look after the other ranks until this one leaves them."""
    while not over.wait(POLL):
        ranks = whose()
        if ranks is None:
            return
        if ranks in _abandoned and _leaving.acquire(blocking=False):
            try:
                ranks.leave()
            finally:
                _leaving.release()
            return
        ranks.look()
        del ranks


def _leave_abandoned() -> None:
    with _leaving:
        for each in list(_abandoned):
            each.leave()


before_groups.append(_leave_abandoned)


def _at_exit(whose: weakref.ref[Ranks]) -> Callable[[], None]:
    def leave() -> None:
        ranks = whose()
        if ranks is not None:
            ranks._over.set()
            ranks._end_breaking()

    return leave


def waited_for(begun: Sequence[int]) -> list[int]:
    """The ranks that have begun the fewest collectives, if any has begun more. Those that wait may differ: a
    host runs ahead of its device.
    """
    return [rank for rank, count in enumerate(begun) if count == min(begun) < max(begun)]


def break_waits(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """Make everything that waits in a process group raise, in this process."""
    for backend in group._device_types:
        own: Any = group._get_backend(backend)
        if own.name() != "gloo":
            with suppress(RuntimeError):
                own.abort()
            continue
        for other in range(size):
            if other != rank:  # a wait that times out closes the connection
                with suppress(RuntimeError):
                    nothing = torch.zeros(1, dtype=torch.int32, device="cpu")
                    own.recv([nothing], other, 2**30).wait(timedelta(milliseconds=1))


def _is_lost_connection(error: Exception) -> bool:
    """True if a rank has raised because another one did not answer."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "pair closure" in str(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
