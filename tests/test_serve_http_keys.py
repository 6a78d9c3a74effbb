"""API keys, salts, hosts and origins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")

from serving import Served, serving, until

from hf_paged import demo
from hf_paged.serve.http.keys import Keys, bearer

LONG = " ".join(demo.prompts())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(api_keys=("first-key", "second-key")) as made:
        yield made


def asking(key: str | None) -> dict[str, str]:
    return {"authorization": "" if key is None else f"Bearer {key}"}


def test_a_key_is_known_or_not() -> None:
    keys = Keys(("one", "two"))
    assert not keys.open
    assert keys.tenant("one") != keys.tenant("two")
    assert keys.tenant("two").name == "key-1"
    for other in (None, "", "on", "onee", "ONE", "one two", "\udc80", "\u00e9"):
        assert keys.tenant(other) is None
    assert Keys(()).open
    assert Keys(()).tenant(None).salt is None


def test_keys_have_salts_of_their_own() -> None:
    keys, again = Keys(("one", "two")), Keys(("one", "two"))
    salts = [keys.tenant(key).salt for key in ("one", "two")]
    assert len({*salts, again.tenant("one").salt}) == 3
    assert "one" not in salts[0]
    assert Keys(("one", "two"), share_prefixes=True).tenant("one").salt is None
    tenant = keys.tenant("one")
    assert (
        len({tenant.salted("a"), tenant.salted("b"), tenant.salted(None), keys.tenant("two").salted("a")})
        == 4
    )


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant time: neither the first key's match nor a wrong one ends the comparison."""
    import hmac

    calls = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: calls.append(len(a)) or compare(a, b))
    keys = Keys(("one", "two", "three"))
    for key in ("one", "three", "none"):
        keys.tenant(key)
    assert calls == [32] * 9


def test_the_header(served: Served) -> None:
    assert bearer("Bearer  a ") == "a"
    assert bearer("bearer a") == "a"
    for other in (None, "", "Basic a", "Bearer", "Bearer ", "a"):
        assert bearer(other) is None
    for key, status in (("first-key", 200), ("second-key", 200), ("third", 401), (None, 401)):
        response = served.client.get("/v1/models", headers=asking(key))
        assert response.status_code == status
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_nothing_of_a_body_is_read_without_a_key(served: Served, path: str) -> None:
    assert served.post(path, {"nonsense": 1}, headers=asking("wrong")).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/version", "/openapi.json", "/v1/models", "/nope", "/health/", "/%2Fhealth", "/HEALTH"],
)
def test_other_paths_need_a_key(served: Served, path: str) -> None:
    assert served.client.get(path, headers=asking(None)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/live", "/ready"])
def test_states_need_none(served: Served, path: str) -> None:
    assert served.client.get(path, headers=asking(None)).status_code == 200


def test_keys_do_not_find_each_others_prefixes(served: Served) -> None:
    def cached(key: str) -> int:
        body = {"prompt": LONG, "max_tokens": 1, "temperature": 0}
        response = served.post("/v1/completions", body, headers=asking(key))
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key") == 0
    assert cached("first-key") > 16
    assert cached("second-key") == 0
    assert cached("second-key") > 16


def test_c43_a_key_keeps_its_share_of_the_cache() -> None:
    """C43: what one key floods the server with evicts its own prefixes; also if each request has a salt."""
    shares = {"key-1": 2.0}
    with serving({"num_blocks": 64, "cache_shares": shares}, api_keys=("loud", "quiet"), admin_api_keys=("boss",)) as served:  # fmt: skip

        def ask(key: str, prompt: list[int], **more: object) -> int:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
            answer = served.post("/v1/completions", body, headers=asking(key)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        mine = [[10 + i, *range(20, 99)] for i in range(3)]  # 80 tokens, 10 blocks each: 30 of 64
        for prompt in mine:
            ask("quiet", prompt)
        for i in range(30):
            ask("loud", [100 + i, *range(20, 119)], cache_salt=str(i))
        assert [ask("quiet", prompt) for prompt in mine] == [79] * 3
        refused = served.client.get("/metrics", headers=asking("loud"))
        assert refused.status_code == 403
        assert "admin key" in refused.json()["error"]["message"]
        metrics = served.client.get("/metrics", headers=asking("boss")).text
        assert 'hf_paged:prefix_cache_blocks{model_name="demo",tenant="key-1"} 30' in metrics
        assert 'hf_paged:prefix_cache_lost_blocks_total{model_name="demo",tenant="key-1"}' not in metrics


def test_c43_the_servers_own_answers_have_no_share() -> None:
    """C43: two keys divide the pool. What the server computes before it is ready is nobody's."""
    with serving({"num_blocks": 64}, api_keys=("loud", "quiet"), admin_api_keys=("boss",)) as served:

        def ask(key: str, first: int, new: int) -> int:
            body = {
                "prompt": [first, *range(20, 99)],
                "max_tokens": new,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = served.post("/v1/completions", body, headers=asking(key)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        for i in range(3):  # 80 tokens, 10 blocks each: 30 of 64
            ask("quiet", 10 + i, 1)
        with ThreadPoolExecutor(
            8
        ) as clients:  # answers that grow into all that they may have, while they run
            list(clients.map(lambda i: ask("loud", 100 + i, 60), range(16)))
        assert [ask("quiet", 10 + i, 1) for i in range(3)] == [79] * 3
        metrics = served.client.get("/metrics", headers=asking("boss")).text
        assert 'prefix_cache_blocks{model_name="demo",tenant="key-1"} 30' in metrics
        assert 'prefix_cache_blocks{model_name="demo",tenant=""}' not in metrics


def test_logs_have_neither_keys_nor_prompts(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="hf_paged.serve"):
        served.post("/v1/completions", {"prompt": "a secret prompt", "max_tokens": 2, "cache_salt": "salty"})
        served.post("/v1/completions", {"prompt": 7, "secret-field": "secret value"})
        served.client.get("/v1/models", headers=asking("wrong-secret"))
        until(lambda: len(caplog.records) >= 3)
    lines = [str(vars(record)) for record in caplog.records if record.name == "hf_paged.serve"]
    for line in lines:
        assert not any(word in line for word in ("secret", "first-key", "salty"))
    facts = vars(caplog.records[0])
    assert facts["tenant"] == "key-0"
    assert facts["completion_tokens"] == 2
    assert facts["route"] == "/v1/completions"


def test_request_ids_come_back(served: Served) -> None:
    assert served.client.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    found = served.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "abc-2"}
    )
    assert found.json()["id"] == "cmpl-abc-2"
    for odd in ("a b", "x" * 129, '"', "a\tb"):
        made = served.client.get("/version", headers={"x-request-id": odd}).headers["x-request-id"]
        assert made != odd
        assert made.isalnum()
    assert served.client.get("/nope").headers["x-request-id"]
