"""A conversation on one kept cache, forked to try two answers without computing the past again.

python examples/fork.py
"""

import copy

import torch

import hf_paged
from hf_paged import demo

model, tokenizer = demo.model(), demo.tokenizer()
cache = hf_paged.PagedCache(model, block_size=8)
messages: list[dict[str, str]] = []
past: dict[int, torch.Tensor] = {}
"""The tokens that each cache has seen: a cache is only good for a prompt that begins with them."""


def answer(question: str, cache: hf_paged.PagedCache, **how: object) -> str:
    """The model's reply to one more message."""
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    seen = cache.get_seq_length()
    assert torch.equal(inputs.input_ids[0, :seen], past.get(id(cache), inputs.input_ids[0])[:seen]), (
        "the template rewrote the past"
    )
    output = model.generate(**inputs, cache=cache, max_new_tokens=40, **how)
    past[id(cache)] = output[0]
    text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip()
    print(f"[{seen} of {inputs.input_ids.shape[1]} tokens were there already]\n> {question}\n{text}\n")
    return text


messages.append(
    {
        "role": "assistant",
        "content": answer("Tell me a story about the lighthouse keeper.", cache, do_sample=False),
    }
)
before = copy.deepcopy(cache)  # shares every block
past[id(before)] = past[id(cache)]
torch.manual_seed(3)
answer("And then?", cache, do_sample=True, top_p=0.9)
messages.pop()
answer("Tell me about the moon.", before, do_sample=True, top_p=0.9)
