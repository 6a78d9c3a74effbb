"""The routes for training loops, behind --dev, and the requests of TRL's client for vLLM's server."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from processes import LIMIT
from safetensors.torch import save_file
from serving import Served, generated, ids, serving, until

from hf_paged import demo


def post(served: Served, path: str, status: int = 200, /, **body: object) -> dict[str, object]:
    answer = served.post(path, body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_there_are_none_without_the_flag() -> None:
    with serving() as served:
        post(served, "/pause", 404)
        post(served, "/load_weights", 404, path="/tmp")


def test_requests_wait_while_it_is_paused_and_are_answered_as_before() -> None:
    with serving(dev=True) as served:
        post(served, "/pause?mode=keep")
        assert served.client.get("/is_paused").json() == {"is_paused": True}
        answers: list[str] = []
        thread = threading.Thread(
            target=lambda: answers.append(served.complete("The fox", max_tokens=8)["choices"][0]["text"])
        )
        thread.start()
        until(lambda: served.service.admission.in_flight)
        thread.join(0.2)
        assert not answers
        post(served, "/resume")
        thread.join(LIMIT)
        assert answers == [served.complete("The fox", max_tokens=8)["choices"][0]["text"]]
        assert served.client.get("/is_paused").json() == {"is_paused": False}
        post(served, "/sleep?level=2")
        post(served, "/wake_up")
        assert served.complete("The fox", max_tokens=8)["choices"][0]["text"] == answers[0]
        assert served.post("/pause?mode=never", {}).status_code == 400
        assert served.client.get("/get_world_size").json() == {"world_size": 1}


def test_weights_are_read_from_files_and_prefixes_forgotten(tmp_path: Path) -> None:
    """The answers are those of the new weights, and what was cached of the old ones is not found."""
    other = demo.model()
    weights = {name: each.detach() * 1.5 for name, each in other.named_parameters() if "norm" in name}
    save_file(weights, tmp_path / "model.safetensors")
    with serving(dev=True) as served:
        before = served.complete("The fox and the owl", max_tokens=12)
        assert post(served, "/load_weights", path=str(tmp_path)) == {"loaded": len(weights)}
        after = served.complete("The fox and the owl", max_tokens=12)
        assert after["choices"][0]["text"] != before["choices"][0]["text"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert served.complete("The fox and the owl", max_tokens=1)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        assert post(served, "/reset_prefix_cache") == {"success": True}
        again = served.complete("The fox and the owl", max_tokens=12)
        assert again["choices"] == after["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        post(served, "/load_weights", 404, path=str(tmp_path / "none"))
        save_file({"none": weights[next(iter(weights))]}, tmp_path / "model.safetensors")
        assert "none" in str(post(served, "/load_weights", 400, path=str(tmp_path)))


def test_blocks_are_not_forgotten_under_requests() -> None:
    with serving(dev=True) as served:
        body = {"prompt": "The fox", "max_tokens": 900, "ignore_eos": True}
        thread = threading.Thread(target=served.post, args=("/v1/completions", body))
        thread.start()
        until(lambda: served.engine.stats()["running"])
        assert "pause" in str(post(served, "/reset_prefix_cache", 409))
        post(served, "/pause")  # by default what runs ends
        thread.join(LIMIT)
        post(served, "/reset_prefix_cache")
        post(served, "/resume")
        served.complete()


def test_an_admin_key_alone_may_where_there_is_one() -> None:
    with serving(dev=True, api_keys=("k",), admin_api_keys=("a",)) as served:
        post(served, "/pause", 403)
        admin = {"authorization": "Bearer a"}
        assert served.client.post("/pause", headers=admin).status_code == 200
        assert served.client.post("/resume", headers=admin).status_code == 200


def test_the_requests_of_trl_are_answered_in_the_form_that_it_reads() -> None:
    """As VLLMClient.generate() and chat() send them: ids of prompts and answers, tokens named by their ids."""
    sampling = {
        "n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "max_tokens": 6, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    prompts = [ids("The fox"), ids("The owl")]
    with serving(dev=True) as served:
        found = post(served, "/v1/completions", model="demo", prompt=prompts, logprobs=0, **sampling)
        choices = found["choices"]
        assert [each["prompt_token_ids"] for each in choices[::2]] == prompts
        for choice in choices:
            names = choice["logprobs"]["tokens"]
            assert [int(name.removeprefix("token_id:")) for name in names] == choice["token_ids"]
            assert all(
                name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True)
            )
        messages = [{"role": "user", "content": "Tell"}]
        chat = post(
            served, "/v1/chat/completions", model="demo", messages=messages, logprobs=True, top_logprobs=0, **sampling
        )  # fmt: skip
        assert chat["prompt_token_ids"] == chat["choices"][0]["prompt_token_ids"]
        content = chat["choices"][0]["logprobs"]["content"]
        assert [f"token_id:{token}" for token in chat["choices"][0]["token_ids"]] == [
            each["token"] for each in content
        ]
        greedy = post(
            served, "/v1/completions", prompt=prompts, max_tokens=6, temperature=0, return_token_ids=True
        )
        assert [each["token_ids"] for each in greedy["choices"]] == [
            generated(each, max_new_tokens=6)[0] for each in ("The fox", "The owl")
        ]


def test_options_that_a_route_does_not_know_are_refused_and_change_nothing() -> None:
    with serving(dev=True) as served:
        for path, body, *said in (
            ("/pause", {"mode": "keep"}, "'mode (in the body)'", "?mode=... in its query"),
            ("/pause?Mode=keep", {}, "'Mode'", "?mode=..."),
            ("/pause?mode=never", {}, "'keep' or 'recompute', got 'never'; see GET /openapi.json"),
            ("/resume?mode=keep", {}, "'mode'", "/resume takes no options"),
            ("/load_weights?path=x", {}, "'path'", "/load_weights takes {'path': ...} in its body"),
            ("/sleep", {"level": 2}, "'level (in the body)'", "?level=..."),
        ):
            found = str(post(served, path, 400, **body))
            for each in said:
                assert each in found.replace('\\"', "'").replace('"', "'")
        assert served.client.get("/is_paused").json() == {"is_paused": False}


def test_pauses_that_wait_hold_up_no_other_calls() -> None:
    """As many as there are threads for other calls: /metrics and /resume are answered."""
    with serving(dev=True) as served:
        body = {"prompt": "The fox", "max_tokens": 400, "ignore_eos": True}
        threads = [threading.Thread(target=served.post, args=("/v1/completions", body))]
        threads += [threading.Thread(target=served.post, args=("/pause?mode=wait", {})) for _ in range(5)]
        threads[0].start()
        until(lambda: served.engine.stats()["running"])
        for each in threads[1:]:
            each.start()
        threads[1].join(0.2)
        assert served.client.get("/metrics").status_code == 200
        post(served, "/resume")
        assert threads[0].is_alive()
        for each in threads:
            each.join(LIMIT)
        post(served, "/resume")


def test_files_that_are_no_weights_are_the_clients_error_and_change_nothing(tmp_path: Path) -> None:
    weights = {name: each.detach() * 1.5 for name, each in demo.model().named_parameters() if "norm" in name}
    save_file(weights, tmp_path / "a.safetensors")
    with serving(dev=True, api_keys=("k",), admin_api_keys=("a",)) as served:
        admin = {"authorization": "Bearer a"}
        before = served.complete("The fox", max_tokens=8)["choices"]
        for content in (b"", b"x" * 99):
            (tmp_path / "b.safetensors").write_bytes(content)
            found = served.post("/load_weights", {"path": str(tmp_path)}, headers=admin)
            assert found.status_code == 400
            assert "b.safetensors is not in the form of safetensors" in found.json()["error"]["message"]
        assert served.complete("The fox", max_tokens=8)["choices"] == before
        for path, status in (("a" * 4000, 404), ("a" * 5000, 400), ("", 400)):
            assert served.post("/load_weights", {"path": path}, headers=admin).status_code == status
        # Other keys do not learn which files there are.
        assert {
            served.post("/load_weights", {"path": each}).status_code for each in ("/none", str(tmp_path))
        } == {403}
