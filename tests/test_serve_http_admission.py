"""The bounded queue, deadlines, states, and an engine that dies."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")

from dropout import train_with_dropout
from processes import LIMIT
from serving import connected, serving, until

from hf_paged.serve.http.admission import QueueLimit
from hf_paged.serve.http.errors import ApiError

LONG = {"prompt": "The fox", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def status(admission: QueueLimit, count: int = 1) -> int:
    try:
        with admission.place(count):
            return 200
    except ApiError as error:
        return error.status


def test_places_are_counted_and_given_back() -> None:
    admission = QueueLimit(3, lambda: False, lambda: 2.5)
    assert status(admission) == 503
    admission.state = "ready"
    assert status(admission, 3) == 200
    assert status(admission, 4) == 400
    with admission.place(2):
        assert status(admission) == 200
        with pytest.raises(ApiError) as caught, admission.place(2):
            pass
        assert caught.value.status == 429
        assert caught.value.headers == {"retry-after": "3"}
    assert admission.in_flight == 0
    admission.state = "draining"
    assert status(admission) == 503


def test_bodies_have_a_budget_together() -> None:
    """Those that do not come take it until they end; small ones are always read."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 500000\r\n\r\n"
    with serving(limits={"bodies_bytes": 500_000}) as served:
        stalled = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(2)]
        for each in stalled:
            each.sendall(head + b" " * 290_000)
        until(lambda: served.service.bodies.held > 440_000)
        large = served.post("/tokenize", {"prompt": "a" * 200_000})
        assert (large.status_code, large.headers["retry-after"]) == (429, "5")
        assert served.complete(max_tokens=1)["choices"]
        for each in stalled:
            each.close()
        until(lambda: served.service.bodies.held == 0)


def test_the_load_counts_what_is_under_way() -> None:
    with serving() as served:

        def load() -> dict[str, int]:
            return served.client.get("/load").json()

        assert load() == {"server_load": 0}
        body = {"prompt": ["The fox", "The owl"], "max_tokens": 900, "ignore_eos": True, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            next(lines)
            assert load() == {"server_load": 2}
        until(lambda: load() == {"server_load": 0})


def test_a_drain_waits_and_then_breaks_off() -> None:
    class Request:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    async def drained(ends_after: float) -> bool:
        admission = QueueLimit(3, lambda: False, lambda: 1.0)
        admission.state = "ready"
        request = Request()

        async def serve() -> None:
            with admission.place(1), admission.under_way(request):
                end = asyncio.get_running_loop().time() + ends_after
                while not request.cancelled and asyncio.get_running_loop().time() < end:
                    await asyncio.sleep(0.005)

        task = asyncio.create_task(serve())
        await asyncio.sleep(0.01)
        await admission.drain(0.5)
        assert admission.in_flight == 0
        assert status(admission) == 503
        await task
        return request.cancelled

    assert asyncio.run(drained(0.05)) is False
    assert asyncio.run(drained(60)) is True


def test_a_full_queue_is_429_and_loses_nothing() -> None:
    with serving({"max_batch_sequences": 2}, {"waiting": 2}) as served:
        with ThreadPoolExecutor(12) as pool:
            found = list(
                pool.map(lambda _: served.post("/v1/completions", {**LONG, "max_tokens": 100}), range(12))
            )
        assert {each.status_code for each in found} == {200, 429}
        for each in found:
            if each.status_code == 429:
                assert int(each.headers["retry-after"]) >= 1
                assert each.json()["error"]["type"] == "rate_limit_error"
            else:
                assert each.json()["usage"]["completion_tokens"] == 100
        assert len([each for each in found if each.status_code == 200]) >= 4
        too_many = served.post("/v1/completions", {"prompt": ["a"] * 5})
        assert too_many.status_code == 400


def test_a_deadline_ends_an_answer_or_is_504() -> None:
    with serving({"max_batch_sequences": 1}, {"request_seconds": 0.3}) as served:
        bodies = [{**LONG, "max_tokens": 1000}, {**LONG, "max_tokens": 1000, "stream": True}]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda body: served.post("/v1/completions", body), bodies))
        for response in found:
            if response.status_code == 504:
                assert response.json()["error"]["code"] == "timeout"
            else:
                assert response.status_code == 200
                assert '"finish_reason":"abort"' in response.text
        until(lambda: not served.engine.stats()["running"])


def test_an_engine_that_dies_is_503_everywhere() -> None:
    """Streams and others end with an error that says so, and the states with it."""
    with serving() as served:
        engine = served.engine
        found = {}

        def ask(stream: bool) -> None:
            found[stream] = served.post("/v1/completions", {**LONG, "stream": stream})

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        until(lambda: engine.stats()["running"] == 2)
        train_with_dropout(engine.model)
        for thread in threads:
            thread.join(LIMIT)
        # Whether the change is seen at a check of the model first, which ends its requests, is a matter of time.
        code = {503: '"code":"engine_stopped"', 500: '"code":"failed"'}[found[False].status_code]
        assert code in found[False].text.replace(" ", "")
        assert '"error"' in found[True].text
        assert found[True].text.endswith("data: [DONE]\n\n")
        for path in ("/health", "/ping", "/live", "/ready"):
            assert served.client.get(path).status_code == 503
        assert served.post("/v1/completions", LONG).status_code == 503
        until(lambda: not served.service.admission.in_flight)


def test_a_model_that_cannot_be_warmed_up_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged import Engine, demo
    from hf_paged.serve.http.options import ServerOptions
    from hf_paged.serve.openai.service import Service
    from hf_paged.serve.server import run

    model = demo.model()
    tokenizer = demo.tokenizer()
    client = connected(Engine(model, num_blocks=100), tokenizer)
    service = Service.of(client, tokenizer, ServerOptions(port=0))
    model.generation_config.dola_layers = "high"
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run(service)))
    thread.start()
    thread.join(LIMIT)
    assert codes == [1]


def test_a_broken_tokenizer_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one body and in the middle of a stream: the message says nothing of the server's inside."""
    with serving() as served:
        with monkeypatch.context() as patch:
            patch.setattr(served.service.tokenizer, "shown", lambda tokens: 1 / 0)
            found = served.post("/v1/completions", {"prompt": "The fox", "max_tokens": 4})
            assert found.status_code == 500
            assert found.json()["error"]["message"] == "the server failed; see its log"
            streamed = served.post("/v1/completions", {"prompt": "The fox", "max_tokens": 4, "stream": True})
            assert "the server failed" in streamed.text
            assert streamed.text.endswith("data: [DONE]\n\n")
        served.complete()


def test_a_request_that_fails_is_500_and_no_other_is() -> None:
    """A NaN in the logits of one request is that request's error."""
    import torch

    from hf_paged.engine.sampling import columns

    def broken(scores: torch.Tensor, *others: Any) -> torch.Tensor:
        return scores * float("nan")

    with serving() as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "with_counts_off", broken)
        body = {"prompt": "The fox", "max_tokens": 4, "presence_penalty": 1.0, "temperature": 0}
        found = served.post("/v1/completions", body)
        assert found.status_code == 500
        assert found.json()["error"]["type"] == "server_error"
        streamed = served.post("/v1/completions", {**body, "stream": True})
        assert streamed.status_code == 200
        assert '"error"' in streamed.text
        served.complete()


def test_a_second_signal_ends_at_once() -> None:
    """The first one drains; the states and new requests say so."""
    with serving(limits={"drain_seconds": 120.0}) as served:  # however busy the machine is
        answer: list[int] = []
        thread = threading.Thread(
            target=lambda: answer.append(
                served.post("/v1/completions", {**LONG, "max_tokens": 400}).json()["usage"][
                    "completion_tokens"
                ]
            )
        )
        thread.start()
        until(lambda: served.engine.stats()["running"] == 1)
        served.server.handle_exit(signal.SIGINT, None)
        until(lambda: served.service.admission.state == "draining")
        assert served.client.get("/ready").status_code == 503
        assert served.client.get("/health").status_code == 200
        thread.join(LIMIT)
        assert answer == [400]
        until(lambda: served.server.should_exit)
        assert not served.server.force_exit
        assert served.server.exit_code == 0
        served.server.handle_exit(signal.SIGINT, None)
        assert served.server.force_exit
        assert served.server.exit_code == 130
