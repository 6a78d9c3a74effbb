"""The cost of a grammar, measured in a process that can be killed: no thread can stop llguidance's code.

This file is also run as that process's program, without torch and without the rest of the package.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

CPU_SECONDS = 2
"""That the compilation of a grammar may take."""
SECONDS = 30
"""The same by the clock, on a machine that has much else to do."""
MEMORY = 256 * 2**20
"""Bytes that it may take."""
STACK = 256 * 2**20
"""Bytes of the stack of a thread that compiles: llguidance recurses as deep as a grammar is long."""
MOST_STATES = 50_000
"""States of a grammar's lexer, of up to 2 kB each, which are made while it is followed."""


_stacks = threading.Lock()
"""Held while threads get another stack."""


class GrammarError(ValueError):
    """A grammar that cannot be read, that no text matches, or that takes too much."""


class GrammarTrials:
    """Compiles grammars on trial: a process forks for each one, and a fork that takes too much dies.

    The process has llguidance and the tokenizer, so a fork takes milliseconds. It ends with this object.
    """

    def __init__(self, tokenizer: str, vocabulary: int, ends: Sequence[int]) -> None:
        """tokenizer: in JSON. vocabulary: how many tokens there are scores for. ends: of a sequence."""
        self._spec = json.dumps([tokenizer, vocabulary, list(ends)]).encode() + b"\n"
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def cost(self, grammar: str) -> int:
        """The bytes that a compiled grammar takes; raises GrammarError for one that is refused."""
        if not hasattr(os, "fork"):  # Windows
            return 0
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            answer = b""
            try:
                ours.sendall(grammar.encode())
                ours.shutdown(socket.SHUT_WR)
                while part := ours.recv(4096):
                    answer += part
            except ConnectionError:  # it died before it had read the grammar
                pass
        if not answer:
            raise GrammarError(
                f"the grammar takes more than {CPU_SECONDS} s of a CPU or {MEMORY >> 20} MB to compile; give "
                "a shorter one, or one with smaller numbers (multipleOf, lengths, repetitions)"
            )
        trouble, size = json.loads(answer)
        if trouble is not None:
            raise GrammarError(trouble)
        return int(size)

    def _hand_over(self, end: socket.socket) -> None:
        """Give the process one end of a connection, by which it gets the grammar."""
        with self._lock:
            for _ in range(2):
                self._control = self._control or self._started()
                try:
                    socket.send_fds(self._control, [b"."], [end.fileno()])
                    return
                except ConnectionError:  # it was killed since
                    self._control = None
        raise RuntimeError("the process that tries grammars was killed twice; is there enough memory?")

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what native code writes as it dies
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        weakref.finalize(self, _end, process, ours)
        try:
            ours.sendall(self._spec)
            ready = ours.recv(1)
        except ConnectionError:
            ready = b""
        if not ready:
            raise RuntimeError(f"the process that tries grammars did not start, exit code {process.wait()}")
        return ours


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def compile_grammar(known: Any, grammar: str) -> Any:
    """A matcher at the beginning of a grammar; raises GrammarError if no text can be made by it."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=MOST_STATES)
    matcher = llguidance.LLMatcher(known, grammar, log_level=0, limits=limits)
    for each in (matcher, matcher.deep_copy()):
        if each.is_error():
            raise GrammarError(f"the grammar cannot be used: {trouble_of(each)}")
        # Some trouble shows with the first mask. The matcher that is kept stays at its beginning.
        if not any(each.compute_bitmask()) and not each.is_error():
            raise GrammarError("no token of the model can begin an answer that matches the grammar")
        if each.is_error():
            raise GrammarError(f"the grammar cannot be used: {trouble_of(each)}")
    return matcher


def trouble_of(matcher: Any) -> str:
    """Why a matcher is of no use, in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:500]


def with_deep_stack(act: Any) -> Any:
    """Call `act` in a thread with a large stack: its result, or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((act(), None))
        except BaseException as error:
            found.append((None, error))

    with _stacks:
        before = threading.stack_size(STACK)
        try:
            thread = threading.Thread(target=run, name="hf_paged grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


# ---- in the process


def main(descriptor: int) -> None:
    """Fork for each connection that comes, until the other process ends."""
    import llguidance

    control = socket.socket(fileno=descriptor)
    text, vocabulary, ends = json.loads(control.makefile("rb").readline())
    known = llguidance.LLTokenizer(text, n_vocab=vocabulary, eos_token=ends)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing behind
    control.sendall(b".")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        connection = socket.socket(fileno=descriptors[0])
        if not os.fork():
            control.close()
            _try(known, connection)
            os._exit(0)
        connection.close()


def _try(known: Any, connection: socket.socket) -> None:
    """Compile one grammar within the limits, and send what is wrong with it and what it takes."""
    import resource

    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + STACK + MEMORY,) * 2)
    grammar = connection.makefile().read()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trouble = None
    try:
        with_deep_stack(lambda: compile_grammar(known, grammar))
    except GrammarError as error:
        trouble = str(error)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    connection.sendall(json.dumps([trouble, kilobytes * 1024]).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
