"""Adapters as models: chosen by name, loaded and unloaded while requests run, and nobody else is harmed."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import httpx
import openai
import peft
import torch
from processes import LIMIT
from serving import Served, events, generated, serving, text, tokenizer, until

from hf_paged import Engine, demo

KEY, ADMIN = "a-key", "the-operator's-key"
NEW = 10
PROMPT = "The fox"


def adapted(seed: int, name: str = "default") -> Any:
    """The demo model with an adapter that changes its answers."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(demo.model(), config, adapter_name=name).eval()


def answer(model: Any, prompt: str = PROMPT) -> str:
    ids = tokenizer()(prompt, return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=NEW, do_sample=False)
    return text(found[0, ids["input_ids"].shape[1] :].tolist())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters as peft saves them."""
    found = {}
    for seed, name in enumerate(("poet", "pirate")):
        path = tmp_path_factory.mktemp(name)
        adapted(seed).save_pretrained(path)
        found[name] = str(path)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    found = {"poet": answer(adapted(0)), "pirate": answer(adapted(1)), "demo": answer(demo.model())}
    assert len(set(found.values())) == 3
    return found


@pytest.fixture
def served(folders: dict[str, str]) -> Iterator[Served]:
    with serving(
        adapters={"poet": folders["poet"]}, api_keys=(KEY,), admin_api_keys=(ADMIN,), limits={"adapters": 2}
    ) as made:
        yield made


def change(served: Served, what: str, key: str = ADMIN, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return served.post(f"/v1/{what}_lora_adapter", body, headers=headers)


def names(served: Served) -> list[str]:
    return [each["id"] for each in served.client.get("/v1/models").json()["data"]]


def ask(served: Served, model: str, **body: Any) -> str:
    return served.complete(PROMPT, model=model, max_tokens=NEW, **body)["choices"][0]["text"]


def test_adapters_are_models(served: Served, expected: dict[str, str]) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
        models = {each.id: each for each in client.models.list()}
        assert list(models) == ["demo", "poet"]
        assert models["poet"].parent == "demo"
        assert models["demo"].parent is None
        for name in models:
            found = client.completions.create(model=name, prompt=PROMPT, max_tokens=NEW, temperature=0)
            assert found.model == name
            assert found.choices[0].text == expected[name]
        with pytest.raises(openai.NotFoundError, match="expected one of demo, poet"):
            client.completions.create(model="pirate", prompt=PROMPT)
        chat = client.chat.completions.create(
            model="poet", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert chat.model == "poet"
    assert served.complete(PROMPT, max_tokens=NEW)["choices"][0]["text"] == expected["demo"]


def test_prefixes_are_shared_under_one_adapter_and_one_key(served: Served) -> None:
    prompt = "Every night the lighthouse keeper climbed the stairs and lit the lamp"

    def cached(model: str, **options: Any) -> int:
        body = {"prompt": prompt, "model": model, "max_tokens": 1, "temperature": 0}
        usage = served.post("/v1/completions", body, **options).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("poet") == 0
    assert cached("demo") == 0
    assert cached("poet") > 0
    assert cached("poet", headers={"authorization": f"Bearer {ADMIN}"}) == 0


def test_loading_and_unloading(served: Served, folders: dict[str, str], expected: dict[str, str]) -> None:
    said = change(served, "load", lora_name="pirate", lora_path=folders["pirate"])
    assert (said.status_code, said.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    assert names(served) == ["demo", "poet", "pirate"]
    assert ask(served, "pirate") == expected["pirate"]
    assert change(served, "unload", lora_name="poet").status_code == 200
    assert names(served) == ["demo", "pirate"]
    assert served.post("/v1/completions", {"prompt": PROMPT, "model": "poet"}).status_code == 404
    assert change(served, "load", lora_name="poet", lora_path=folders["pirate"]).status_code == 200
    assert ask(served, "poet") == expected["pirate"]
    until(lambda: len(served.engine.adapters()) == 2)


def test_an_adapter_with_new_tokens(served: Served, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = demo.model()
    own = base.get_input_embeddings().weight.shape[0]
    base.resize_token_embeddings(own + 8, mean_resizing=False)
    config = peft.LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path)
    ids = [5, own + 7, 9]
    expected = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)

    def asked(name: str, **body: Any) -> httpx.Response:
        call = {"prompt": ids, "model": name, "max_tokens": NEW, "temperature": 0, **body}
        return served.post("/v1/completions", call)

    assert asked("poet").status_code == 400
    assert change(served, "load", lora_name="tokens", lora_path=str(tmp_path)).status_code == 200
    found = asked("tokens").json()["choices"][0]["text"]
    assert found == text(expected[0, len(ids) :].tolist())
    forced = asked("tokens", logit_bias={str(own + 3): 100}, return_token_ids=True)
    assert forced.json()["choices"][0]["token_ids"] == [own + 3] * NEW
    assert f"knows those from 0 to {own - 1}" in asked("poet").json()["error"]["message"]
    assert asked("poet", prompt=[5], logit_bias={str(own): 1}).status_code == 400
    assert asked("tokens", prompt=[own + 8]).status_code == 400


def test_adapters_of_several_tasks(served: Served, tmp_path: Path) -> None:
    """Each request has the task that it says. Errors call an adapter as its client does."""
    models = {"poly": _of_tasks(peft.PolyConfig(r=4, n_tasks=3, n_skills=2, task_type="CAUSAL_LM"))}
    prompts = {"num_tasks": 3, "num_virtual_tokens": 4, "num_ranks": 2, "task_type": "CAUSAL_LM"}
    models["tasks"] = _of_tasks(peft.MultitaskPromptTuningConfig(**prompts))
    assert change(served, "unload", lora_name="poet").status_code == 200
    ids = tokenizer()(PROMPT, return_tensors="pt")
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        response = change(served, "load", lora_name=name, lora_path=str(tmp_path / name))
        assert response.status_code == 200, response.text
        said = []
        for task in range(3):
            expected = model.generate(
                **ids, max_new_tokens=NEW, do_sample=False, task_ids=torch.tensor([task])
            )
            said.append(text(expected[0, -NEW:].tolist()))
            assert ask(served, name, task_ids=task) == said[-1]
        assert len(set(said)) > 1
        for wrong in ({}, {"task_ids": 3}):
            error = served.refusal(model=name, **wrong)
            assert f"'{name}' is " in error["message"]
            assert "0 to 2" in error["message"]
            assert error["param"] == "task_ids"
    chats = [
        served.post(f"/v1/{path}", {"model": "poly", "task_ids": 1, most: 4, "temperature": 0, **chat}).json()
        for path, most, chat in (
            ("chat/completions", "max_tokens", {"messages": [{"role": "user", "content": PROMPT}]}),
            ("responses", "max_output_tokens", {"input": PROMPT}),
        )
    ]
    written = chats[0]["choices"][0]["message"]["content"], chats[1]["output"][0]["content"][0]["text"]
    assert written[0] == written[1]
    assert served.refusal(model="demo", task_ids=1)["param"] == "task_ids"
    assert served.refusal(model="poly", task_ids=-1)["param"] == "task_ids"


def _of_tasks(config: Any) -> Any:
    """The demo model with an adapter that computes each task in another way."""
    torch.manual_seed(0)
    model = peft.get_peft_model(demo.model(), config).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if any(part in name for part in ("poly_", "prompt_encoder")):
                each.add_(torch.randn_like(each))
    return model


def test_an_adapter_in_use_goes_when_its_last_request_has_ended(
    served: Served, folders: dict[str, str], expected: dict[str, str]
) -> None:
    """Unloaded, and replaced under its name: a stream that runs keeps what it began with."""
    long = {"prompt": PROMPT, "model": "poet", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    alone = served.post("/v1/completions", long).json()["choices"][0]["text"]
    for way in ("replace", "unload"):
        begun = threading.Event()
        texts: list[str] = []

        def read(begun: threading.Event = begun, texts: list[str] = texts) -> None:
            with served.client.stream("POST", "/v1/completions", json={**long, "stream": True}) as response:
                lines = response.iter_lines()
                first = next(lines)
                begun.set()
                texts.append("\n".join([first, *lines]))

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(LIMIT)
        if way == "replace":
            body = {"lora_name": "poet", "lora_path": folders["pirate"]}
            assert "load_inplace" in change(served, "load", **body).json()["error"]["message"]
            assert change(served, "load", **body, load_inplace=True).status_code == 200
            assert ask(served, "poet") == expected["pirate"]
        else:
            assert change(served, "unload", lora_name="poet").status_code == 200
            assert served.post("/v1/completions", {**long, "max_tokens": 1}).status_code == 404
        thread.join(LIMIT)
        pieces = [each["choices"][0]["text"] for each in events(texts[0])]
        assert "".join(pieces) == alone
        if way == "replace":
            alone = served.post("/v1/completions", long).json()["choices"][0]["text"]
    until(lambda: not served.engine.adapters())


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"lora_name": "x", "lora_path": "/no/such/folder"}, 404, "adapter_config.json"),
        ({"lora_name": "x", "lora_path": "someone/on-the-hub"}, 404, "not a folder"),
        ({"lora_name": "x", "lora_path": "BROKEN"}, 400, "cannot be loaded"),
        ({"lora_name": "x", "lora_path": "OTHER"}, 400, "for another model"),
        ({"lora_name": "demo", "lora_path": "pirate"}, 400, "taken"),
        ({"lora_name": "", "lora_path": "pirate"}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "pirate", "lora_int_id": 1}, 400, "unknown field"),
        ({"lora_name": "x", "lora_path": "pirate", "model": "demo"}, 400, "unknown field"),
    ],
)
def test_a_failed_load_harms_no_other_request(
    served: Served, folders: dict[str, str], expected: dict[str, str], tmp_path: Path, body: dict[str, Any],
    status: int, said: str,
) -> None:  # fmt: skip
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((Path(folders["poet"]) / "adapter_config.json").read_text())
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    other = tmp_path / "other"
    peft.PeftModel.save_pretrained(_wider(), str(other))
    known = {**folders, "BROKEN": str(broken), "OTHER": str(other)}
    if "lora_path" in body:
        body = {**body, "lora_path": known.get(body["lora_path"], body["lora_path"])}
    response = change(served, "load", **body)
    assert response.status_code == status, response.text
    assert said in response.json()["error"]["message"]
    assert names(served) == ["demo", "poet"]
    assert ask(served, "poet") == expected["poet"]
    assert list(served.engine.adapters()) == ["poet"]


def _wider() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64
        )
    )
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))


def test_who_may_load(served: Served, folders: dict[str, str]) -> None:
    body = {"lora_name": "pirate", "lora_path": folders["pirate"]}
    assert change(served, "load", KEY, **body).status_code == 403
    assert change(served, "unload", KEY, lora_name="poet").status_code == 403
    assert change(served, "unload", lora_name="nobody").status_code == 404
    assert names(served) == ["demo", "poet"]
    assert change(served, "load", **body).status_code == 200
    full = change(served, "load", lora_name="third", lora_path=folders["pirate"])
    assert full.status_code == 400
    assert "--limit-adapters" in full.json()["error"]["message"]
    for allowed in (False, True):
        with serving(allow_runtime_lora_updating=allowed) as open_:
            response = open_.post("/v1/load_lora_adapter", body)
            assert response.status_code == (200 if allowed else 403)


def test_metrics_by_model(served: Served) -> None:
    ask(served, "poet")
    served.complete(PROMPT, model="demo", max_tokens=3)
    until(lambda: not served.service.admission.in_flight)
    lines = served.client.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"}).text.splitlines()
    values = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
    assert float(values['hf_paged:generation_tokens_total{model_name="poet"}']) == NEW
    assert float(values['hf_paged:generation_tokens_total{model_name="demo"}']) == 3
    assert float(values['hf_paged:e2e_request_latency_seconds_count{model_name="poet"}']) == 1
    info = [name for name in values if name.startswith("hf_paged:lora_requests_info")]
    assert len(info) == 1
    assert 'max_lora="16"' in info[0]


def test_the_adapters_of_a_peft_model() -> None:
    """By their names; the model's own name is what is active on it, as for generate()."""
    model = adapted(0, "poet")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter("pirate", config)
    wanted = {}
    for name in ("pirate", "poet"):
        model.set_adapter(name)
        wanted[name] = answer(model)
    with serving(model=model, allow_runtime_lora_updating=True) as served:
        assert names(served) == ["demo", "poet", "pirate"]
        for name, said in wanted.items():
            assert ask(served, name) == said
        assert ask(served, "demo") == wanted["poet"]
        refused = served.post("/v1/unload_lora_adapter", {"lora_name": "poet"})
        assert refused.status_code == 400
        assert "a part of the model" in refused.json()["error"]["message"]
    with (
        pytest.raises(ValueError, match="the name of the model and of an adapter"),
        serving(model=model, names=("poet",)),
    ):
        pass


def test_one_model_answers_as_generate_does(served: Served) -> None:
    """Adapters that are known change nothing for who names none."""
    assert served.complete(PROMPT, max_tokens=NEW)["choices"][0]["text"] == text(
        generated(PROMPT, max_new_tokens=NEW)[0]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": -1}, "weights of rank 8 for .*, and its config r=-1"),
        ({"r": "x"}, "its config r='x'"),
        ({"rank_pattern": {"v_proj": 4}}, "its config r=4"),
        ({"target_modules": ["zzz"]}, r"its config target_modules=.*zzz"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan for .*; expected a finite number"),
        ({"alpha_pattern": {"v_proj": float("inf")}}, "lora_alpha=inf"),
    ],
)
def test_configs_that_do_not_fit_their_weights_are_refused(
    folders: dict[str, str], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """Before any request has the adapter."""
    shutil.copytree(folders["poet"], tmp_path / "odd")
    file = tmp_path / "odd" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with Engine(demo.model(), block_size=8, num_blocks=50) as engine:
        with pytest.raises(ValueError, match=said):
            engine.add_adapter("odd", str(tmp_path / "odd"))
        engine.add_adapter("poet", folders["poet"])
