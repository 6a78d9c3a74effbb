"""The engine's end of the connection to HTTP: what it writes, and that a server which does not read holds up
nothing.
"""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from hosting import hosted, news
from serving import generated, ids, until

from hf_paged import Engine
from hf_paged.serve.link import engine_host
from hf_paged.serve.link.wire import Cancel, EngineCall, News, Submit, frame


def tokens_of(message: News) -> list[tuple[int, list[int]]]:
    """Tickets and their new tokens."""
    packed = list(message.tokens)
    found = [(packed[i], [packed[i + 2]]) for i in range(0, len(packed), 3)]
    return found + [(each.ticket, new.token_ids) for each in message.progress for new in each.tokens]


def greedy(ticket: int, prompt: str, new: int) -> Submit:
    return Submit(ticket, tuple(ids(prompt)), {"max_new_tokens": new, "do_sample": False}, True)


def test_one_message_has_the_tokens_of_all_requests_of_a_step() -> None:
    """All tokens come once and in order, as generate() has them."""
    prompts = ["The fox", "The owl", "Once upon a time"]
    with hosted() as (engine, connection):
        engine.pause()
        connection.sendall(b"".join(frame(greedy(i, each, 20)) for i, each in enumerate(prompts)))
        until(lambda: engine.stats()["waiting"] == len(prompts))
        engine.resume()
        found: dict[int, list[int]] = {}
        ended: set[int] = set()
        together = 0
        for message in news(connection):
            new = tokens_of(message)
            together += len(new) == len(prompts)
            for ticket, tokens in new:
                assert ticket not in ended
                found.setdefault(ticket, []).extend(tokens)
            ended |= {each.ticket for each in message.progress if each.end is not None}
            if len(ended) == len(prompts):
                break
        assert [found[i] for i in range(len(prompts))] == [
            generated(each, max_new_tokens=20)[0] for each in prompts
        ]
        assert together


def test_a_server_that_does_not_read_holds_up_nothing() -> None:
    """The engine goes on to the end, and what was not read comes in few messages."""
    with hosted(sent=4096) as (engine, connection):
        body = {"max_new_tokens": 150, "do_sample": False, "eos_token_id": 2**31 - 1, "logprobs": 20}
        asked = [Submit(i, (1, 2, 3 + i), body, True) for i in range(4)]
        connection.sendall(b"".join(map(frame, asked)))
        until(lambda: engine.stats()["running"])
        until(lambda: not engine.stats()["running"])
        counts = dict.fromkeys(range(4), 0)
        ended = 0
        number = 0
        for message in news(connection):
            number += 1
            for ticket, tokens in tokens_of(message):
                counts[ticket] += len(tokens)
            ended += sum(each.end is not None for each in message.progress)
            if ended == 4:
                break
        assert set(counts.values()) == {150}
        assert number < 150


def test_steps_of_the_map_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last one that was kept the server is given notice of a gap."""
    monkeypatch.setattr(engine_host, "EVERY", 0.0)
    with hosted(sent=4096) as (engine, connection):
        body = {"max_new_tokens": 900, "do_sample": False, "eos_token_id": 2**31 - 1}
        written = news(connection)
        connection.sendall(frame(EngineCall(0, "watch", ())))
        watched = next(message for message in written if message.answers)  # before any step is taken
        connection.sendall(b"".join(frame(Submit(i, (1, 2, i), body, True)) for i in range(1, 9)))
        until(lambda: engine.stats()["running"])
        until(lambda: not engine.stats()["running"])
        steps = [*watched.steps]
        for message in written:
            steps += message.steps
            if message.lag:
                break
        assert len(steps) < engine.stats()["steps"]
        numbers = [each.number for each in steps]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_what_fails_is_an_answer() -> None:
    """A refusal, an unknown option and a call that raises, each by its type and message; others go on."""
    with hosted() as (_, connection):
        asked = [
            Submit(0, (1, 2), {"max_new_tokens": 10**6}, True),
            Submit(1, (1, 2), {"max_new_tokens": 2, "temperatur": 1.0}, True),
            EngineCall(2, "remove_adapter", ("none", "idle")),
            Cancel(77),
            Submit(3, (1, 2), {"max_new_tokens": 2, "do_sample": False}, True),
        ]
        connection.sendall(b"".join(map(frame, asked)))
        failures = {}
        for message in news(connection):
            failures |= {each.ticket: each.failure for each in message.answers}
            if any(each.end is not None for each in message.progress) and 2 in failures:
                break
        assert failures[0].refused
        assert "1000002" in failures[0].message.replace(",", "")
        assert failures[1].kind == "ValueError"
        assert "temperatur" in failures[1].message
        assert "none" in failures[2].message
        assert failures[3] is None


@pytest.mark.parametrize("broken", [False, True])
def test_an_idle_engine_is_warmed_up(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again until nothing is missing, and behind other weights; one that cannot be serves all the same."""
    looks: list[bool] = []

    def warm_up(engine: Engine) -> bool:
        looks.append(engine.closed)
        if broken:
            raise RuntimeError("no room for a step")
        return len(looks) >= 3

    monkeypatch.setattr(engine_host, "WARM", 0.01)
    monkeypatch.setattr(Engine, "warm_up", warm_up)
    with hosted() as (_, connection):
        until(lambda: len(looks) == (1 if broken else 3))
        connection.sendall(frame(greedy(1, "Once upon", 3)))
        found: list[int] = []
        for message in news(connection):
            found += [token for _, new in tokens_of(message) for token in new]
            if any(each.end is not None for each in message.progress):
                break
        assert found == generated("Once upon", max_new_tokens=3)[0]
        if not broken:
            for ticket, name in enumerate(("weights_changed", "resume", "wake_up"), 2):
                connection.sendall(frame(EngineCall(ticket, name, ())))
                until(lambda wanted=ticket + 2: len(looks) == wanted)
    assert not any(looks)
