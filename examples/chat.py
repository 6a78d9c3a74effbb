"""A chat: each turn's prompt repeats all earlier turns, and with prefix caching only its new tokens are computed.

python examples/chat.py                    # the tiny model of the package, on the GPU if there is one
python examples/chat.py --shape small      # a larger model with random weights: answers mean nothing, times do
python examples/chat.py path/of/a/model    # any model with a chat template

The system prompt is `--system` tokens long, an answer `--new`. Turns are timed with and without
`prefix_caching`, after one to warm up.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_paged
from hf_paged import demo

QUESTIONS = [
    "Tell me a story about the lighthouse keeper.",
    "Tell me about the moon.",
    "And then?",
    "Why is the sky blue?",
    "Tell me a story about the mouse.",
]
SHAPES = {
    "small": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2},
    "llama8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip


def load(path, shape, device):
    """The model of a path, of a shape with random weights, or the one that comes with the package; and a
    tokenizer.
    """
    if path:
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(
            device
        ).eval(), AutoTokenizer.from_pretrained(path)
    if shape == "demo":
        return demo.model().to(device), demo.tokenizer()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = LlamaForCausalLM(
            LlamaConfig(**SHAPES[shape], vocab_size=848, max_position_embeddings=8192)
        ).eval()
    torch.set_default_dtype(torch.float32)
    return model, demo.tokenizer()


def system_prompt(tokenizer, tokens):
    """Sentences that are about `tokens` tokens long together."""
    text = " ".join(demo.prompts()) + " "
    text *= 1 + tokens // len(tokenizer(text).input_ids)
    return tokenizer.decode(tokenizer(text).input_ids[:tokens], skip_special_tokens=True)


def chat(model, tokenizer, system, turns, new, cache_config):
    """Ask question after question; the answers, and for each turn its seconds and the tokens of its prompt
    that were computed.
    """
    messages, said, figures = [{"role": "system", "content": system}], [], []
    for question in QUESTIONS[:turns]:
        messages.append({"role": "user", "content": question})
        told = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        prompt, before = told.input_ids.shape[1], hf_paged.stats(model).reused
        begin = time.perf_counter()
        output = model.generate(
            **told,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="paged",
            cache_config=cache_config,
        )
        answer = tokenizer.decode(
            output[0, prompt:].tolist(), skip_special_tokens=True
        )  # which waits for the device
        seconds, reused = time.perf_counter() - begin, hf_paged.stats(model).reused - before
        figures.append((seconds, prompt - reused, reused))
        messages.append({"role": "assistant", "content": answer})
        said.append(output[0, prompt:].tolist())
    return said, messages[1:], figures


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="a folder with a model and its tokenizer")
parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
parser.add_argument("--system", type=int, default=640, help="tokens of the system prompt")
parser.add_argument("--new", type=int, default=24, help="tokens of an answer, at most")
parser.add_argument("--turns", type=int, default=4, choices=range(2, len(QUESTIONS) + 1))
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
if options.shape == "llama8b" and device == "cpu":
    parser.error("--shape llama8b needs a GPU")
model, tokenizer = load(options.model, options.shape, device)
system = system_prompt(tokenizer, options.system)

found = {}
for way, cache_config in (("reused", {"prefix_caching": True}), ("computed anew", {})):
    chat(model, tokenizer, system, 2, options.new, cache_config)
    hf_paged.release(model)
    found[way] = chat(model, tokenizer, system, options.turns, options.new, cache_config)

said, messages, figures = found["reused"]
for message in messages:
    print(f"{'>' if message['role'] == 'user' else ' '} {message['content']}")
print(f"\nturn   seconds  computed  reused   without: seconds  computed   ({device})")
for turn, ((seconds, computed, reused), (plain, whole, _)) in enumerate(
    zip(figures, found["computed anew"][2], strict=True), 1
):
    print(f"{turn:4}{seconds:10.3f}{computed:10}{reused:8}{plain:18.3f}{whole:10}")
for way, (_, _, ((first, *_), (second, *_), *_)) in found.items():
    print(f"the second turn takes {second / first:.2f} of the first, prompts {way}")
same = said == found["computed anew"][0]
print("the same tokens" if same else "not the same tokens")
assert (
    same or device == "cuda"
)  # a GPU adds in another order, and scores that rounding cannot tell apart may change places
