"""hf_paged.ray with Ray live: two replicas of the demo model on this machine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is an extra: pip install 'hf_paged[ray]'")

import psutil
import pyarrow as pa
import ray
import torch
from processes import LIMIT
from ray import serve
from ray_serving import DEMO, NAME, Application, free_port, kill_worker, local_ray, together, until

from hf_paged import demo
from hf_paged.ray import map_batches
from hf_paged.ray.batches import BatchJob, Worker

PROMPTS = demo.prompts()


@pytest.fixture(scope="module")
def served() -> Iterator[Application]:
    with local_ray(cpus=8):
        port = free_port()
        serve.start(http_options={"port": port})
        application = Application(port)
        application.deploy(DEMO, num_replicas=2, autoscaling_config=None)
        yield application


def greedy(prompt: str, tokens: int) -> str:
    tokenizer = demo.tokenizer()
    inputs = tokenizer(prompt, return_tensors="pt")
    found = demo.model().generate(**inputs, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_answers_are_those_of_the_model(served: Application) -> None:
    for prompt in PROMPTS[:2]:
        response = served.complete(prompt, 12)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == greedy(prompt, 12)
    assert served.client.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert served.client.get("/health").status_code == 200


def test_errors_are_the_servers(served: Application) -> None:
    assert served.complete("The fox", 100_000).status_code == 400
    refused = served.complete("The fox", model="other")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "several" in served.client.get("/metrics").json()["error"]["message"]
    assert served.client.post("/v1/completions", content=b"x").status_code == 415


def respond(served: Application, asked: str, **fields: Any) -> Any:
    body = {"input": asked, "max_output_tokens": 8, "temperature": 0, "store": False, **fields}
    return served.client.post("/v1/responses", json=body)


def test_responses_are_routed_as_chats(served: Application) -> None:
    """The same text and blocks as of the chat that they mean, also where a field asks for nothing."""
    for i in range(4):
        story = f"{i} times " + "a story about the fox and the hare " * 8
        messages = [{"role": "user", "content": story}]
        chat = {"messages": messages, "max_tokens": 8, "temperature": 0, "store": False}
        spoken = served.client.post("/v1/chat/completions", json=chat)
        assert spoken.status_code == 200, spoken.text
        response = respond(served, story)
        assert response.status_code == 200, response.text
        found = response.json()
        (item,) = found["output"]
        assert item["content"][0]["text"] == spoken.json()["choices"][0]["message"]["content"]
        usage = found["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert cached >= usage["input_tokens"] // 8 * 8 - 8 > 0
        again = served.client.post("/v1/chat/completions", json=chat).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] >= cached


def test_responses_stream_and_are_refused(served: Application) -> None:
    stream = respond(served, "The fox", stream=True)
    kinds = [line.removeprefix("event: ") for line in stream.text.splitlines() if line.startswith("event: ")]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
    assert "[DONE]" not in stream.text
    refused = respond(served, "The fox", previous_response_id="resp_1")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "previous_response_id"
    assert respond(served, "The fox", model="other").json()["error"]["code"] == "model_not_found"


def test_texts_and_ids_are_any_replicas(served: Application) -> None:
    ids = served.client.post("/tokenize", json={"prompt": "The fox"}).json()["tokens"]
    assert served.client.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith("The fox")
    for path in ("/live", "/ready", "/version", "/openapi.json"):
        assert served.client.get(path).status_code == 200
    assert served.client.get("/v1/models/demo").json()["id"] == "demo"
    for path in ("/", "/map", "/metrics"):
        assert served.client.get(path).status_code == 404
    loading = served.client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"})
    assert (loading.status_code, "user_config" in loading.text) == (404, True)


def test_a_prompt_returns_to_the_replica_that_holds_it(served: Application) -> None:
    """Each is sent again, one at a time: all its full blocks are cached there."""
    long = [prompt + " and" * 30 for prompt in PROMPTS[:4]]
    for prompt in long:
        assert served.complete(prompt, 1).status_code == 200
    for prompt in long:
        usage: dict[str, Any] = served.complete(prompt, 1).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 8 * 8 - 8


def test_a_replicas_death_loses_nothing_that_had_not_streamed(served: Application) -> None:
    """6 streams, begun one after the other, and 12 whole answers run on both replicas when one is killed."""
    before = served.actors()
    begun = [threading.Event() for _ in range(6)]

    def ask(i: int) -> Any:
        prompt = list(range(100 + 30 * i, 120 + 30 * i))  # none begins like another
        if 12 < i < 18:
            assert begun[i - 13].wait(LIMIT)
        if 12 <= i < 18:
            return served.stream(prompt, 800, begun[i - 12].set)
        assert begun[5].wait(LIMIT)
        if i < 12:
            return served.complete(prompt, 400, ignore_eos=True)
        time.sleep(0.3)
        served.kill(before[0])
        return None

    found = together(19, ask)
    for response in found[:12]:
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 400
    ended = [stream[-2].get("error") for stream in found[12:18]]
    assert all(stream[-1] == "[DONE]" for stream in found[12:18])
    lost = [error for error in ended if error]
    assert all(error["code"] == "replica_died" for error in lost)
    assert 0 < len(lost) < 6, "the streams ran on both"
    until(lambda: len(served.actors()) == 2 and before[0] not in served.actors())
    until(lambda: served.states == {"RUNNING": 2})
    assert served.complete(PROMPTS[0]).status_code == 200


def test_an_engine_that_ends_is_a_replica_that_dies(served: Application) -> None:
    lose_nothing_while(served, lambda: engines()[0].kill())


def lose_nothing_while(served: Application, kill: Callable[[], None]) -> None:
    """8 whole answers run on both replicas when something of one is killed: none is lost, and it is replaced."""
    before = served.actors()

    def ask(i: int) -> Any:
        if i < 8:
            return served.complete(list(range(100 + 30 * i, 120 + 30 * i)), 400, ignore_eos=True)
        time.sleep(0.5)
        return kill()

    for response in together(9, ask)[:8]:
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 400
    until(lambda: len(set(served.actors()) - set(before)) == 1 and served.states == {"RUNNING": 2})


def engines(rank: str | None = None) -> list[psutil.Process]:
    """The processes of this machine's replicas that compute, those of one rank."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "hf_paged.ray.engine_process" in each.cmdline() and each.environ().get("RANK") == rank:
                found.append(each)
    return found


def test_a_client_that_leaves_ends_its_request(served: Application) -> None:
    """Both replicas have five answers of 800 tokens, which take seconds, and are free at once."""
    replicas = serve.get_deployment_handle("Replica", NAME)

    def busy() -> bool:
        stats = [replicas.record_autoscaling_stats.remote() for _ in range(8)]
        return any(each.result()["rows"] for each in stats)

    with ExitStack() as streams:
        reading = []
        for first in range(500, 800, 30):  # until both have some, and none is left for `busy`
            prompt = list(range(first, first + 20))
            body = {"prompt": prompt, "max_tokens": 800, "stream": True, "ignore_eos": True, "n": 5}
            response = streams.enter_context(served.client.stream("POST", "/v1/completions", json=body))
            reading.append(response.iter_lines())  # a reader that is collected closes its stream
            next(reading[-1])
            if busy():
                break
        assert busy()
    assert until(lambda: not busy()) < 1


def test_an_update_of_weights_and_adapters_loses_nothing(served: Application, tmp_path: Path) -> None:
    """While answers of 100 tokens are under way all the time, both replicas get other weights and an adapter.
    An answer is by the old or the new ones.
    """
    folder, adapter = changed(tmp_path)
    prompt = PROMPTS[0]
    over = threading.Event()
    texts: list[str] = []

    def ask(i: int) -> None:
        while not over.is_set():
            response = served.complete(prompt, 100, ignore_eos=True)
            assert response.status_code == 200, response.text
            texts.append(response.json()["choices"][0]["text"])

    before = served.actors()
    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask, i) for i in range(4)]
        config = {"weights": str(folder), "adapters": {"poet": str(adapter)}}
        served.deploy(DEMO, num_replicas=2, autoscaling_config=None, user_config=config)
        asked = len(texts)
        until(lambda: len(texts) > asked + 8)
        over.set()
        for each in asking:
            each.result()
    assert served.actors() == before, "in place: no replica was started anew"
    new = served.complete(prompt, 100, ignore_eos=True).json()["choices"][0]["text"]
    assert len(set(texts)) == 2
    assert texts[-1] == new != texts[0]
    for _ in range(4):
        assert served.complete(prompt, model="poet").status_code == 200


def changed(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of the demo model with other weights, and of an adapter of it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = demo.model()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    model.save_pretrained(tmp_path / "weights")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(demo.model(), lora).save_pretrained(tmp_path / "adapter")
    return tmp_path / "weights", tmp_path / "adapter"


def test_replicas_of_two_ranks(served: Application, tmp_path: Path) -> None:
    """The answers of one process, also by new weights; a rank that is killed ends its replica."""

    def deploy(size: int | None, weights: dict[str, str] | None) -> None:
        args = {**DEMO, "tensor-parallel-size": size}
        served.deploy(args, num_replicas=2, autoscaling_config=None, user_config=weights)

    deploy(2, None)
    assert len(engines("0")) == len(engines("1")) == 2
    for prompt in PROMPTS[:2]:
        assert served.complete(prompt, 12).json()["choices"][0]["text"] == greedy(prompt, 12)
    lose_nothing_while(served, lambda: engines("1")[0].kill())
    folder, _ = changed(tmp_path)
    deploy(2, {"weights": str(folder)})
    assert served.complete(PROMPTS[0], 12).json()["choices"][0]["text"] != greedy(PROMPTS[0], 12)
    deploy(None, None)
    until(lambda: not engines("1"))


def test_batches_survive_a_worker(served: Application, tmp_path: Path) -> None:
    """One of two workers is killed midway: every row comes out once, with its answer; a second call computes
    nothing.
    """
    texts = {prompt: greedy(prompt, 6) for prompt in PROMPTS}
    rows = [{"id": i, "prompt": PROMPTS[i % 8]} for i in range(400)]
    rows[7]["prompt"] = "long " * 5000
    data = ray.data.from_items(rows, override_num_blocks=8)
    folder = tmp_path / "answers"

    def run() -> list[dict[str, Any]]:
        answers = map_batches(
            data, "demo", checkpoint=folder, key="id", batch_size=10, concurrency=2, num_cpus=1,
            engine={"num_blocks": 600}, max_new_tokens=6, do_sample=False,
        )  # fmt: skip
        return sorted(answers.take_all(), key=lambda row: row["id"])

    with ThreadPoolExecutor(1) as aside:
        killed = aside.submit(kill_worker, "MapWorker", folder, 4)
        found = run()
        assert killed.result()
    assert [row["id"] for row in found] == list(range(400))
    assert "tokens long" in found[7]["error"]
    assert not found[7]["generated_text"]
    for row in [*found[:7], *found[8:]]:
        assert row["error"] is None
        assert row["generated_text"] == texts[row["prompt"]]
    files = set(folder.iterdir())
    assert run() == found
    assert set(folder.iterdir()) == files


def test_batches_take_no_live_model(served: Application) -> None:
    data = ray.data.from_items([{"prompt": "The fox"}])
    with pytest.raises(TypeError, match=r"live LlamaForCausalLM.*give its path, or a function"):
        map_batches(data, demo.model())
    with pytest.raises(ValueError, match="checkpoint and key belong together"):
        map_batches(data, "demo", key="id")
    with pytest.raises(ValueError, match="unknown option 'blocks' of the engine"):
        map_batches(data, "demo", engine={"blocks": 1})
    made = map_batches(
        data, lambda: (demo.model(), demo.tokenizer()), output="said", max_new_tokens=2, num_cpus=1
    )
    assert made.take_all()[0]["finish_reason"] == "length"


def test_a_column_that_exists_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.ray.batches.answered", None)
    worker = Worker(BatchJob("demo", "prompt", "said", {}, {}))
    with pytest.raises(ValueError, match="the data set has a column 'said' already; rename it"):
        asyncio.run(worker(pa.table({"prompt": ["The fox"], "said": [""]})))
