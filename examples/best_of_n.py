"""Best of n: many answers of one prompt by both caches, and the best of them by the model's own score.

python examples/best_of_n.py                    # 64 answers by the tiny model of the package, on the GPU if there is one
python examples/best_of_n.py --shape llama8b    # a prompt of 2,048 tokens, an 8B Llama with random weights, on a GPU
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import Engine, demo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shape", choices=["demo", "llama8b"], default="demo")
parser.add_argument("--samples", type=int, default=64)
options = parser.parse_args()
big, samples = options.shape == "llama8b", options.samples
device = "cuda" if torch.cuda.is_available() else "cpu"
if big and device == "cpu":
    parser.error("--shape llama8b needs a GPU")

if big:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, pad_token_id=0,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model, tokenizer = LlamaForCausalLM(config).eval(), None
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(10, 1000, (1, 2048), generator=torch.Generator().manual_seed(0)).to(device)
    new = 256
else:
    model, tokenizer = demo.model().to(device), demo.tokenizer()
    ids = tokenizer(". ".join(demo.prompts()), return_tensors="pt").input_ids.to(device)
    new = 24
sampling = {
    "do_sample": True, "top_k": 0, "num_return_sequences": samples, "max_new_tokens": new, "min_new_tokens": new,
}  # fmt: skip


def timed(call):
    """The answer of a warm call, and its seconds."""
    answer = None
    for _ in range(2):
        del answer  # and with it the memory of the first call
        torch.manual_seed(0)
        begin = time.perf_counter()
        answer = call()
        if device == "cuda":
            torch.cuda.synchronize()
    return answer, time.perf_counter() - begin


def generate(**word):
    """The answers of generate(), with its cache."""
    given = {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, **sampling, **word}
    return timed(lambda: model.generate(ids, **given))


config = model.config
dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
token = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * model.dtype.itemsize
"""Bytes of the keys and values of a token."""

stock, stock_seconds = generate()
whole = samples * (stock.sequences.shape[1] - 1)
right = stock.sequences.tolist()
del stock
paged, paged_seconds = generate(cache_implementation="paged")
tables = paged.cache.tables()
named, held = sum(map(len, tables)), len({block for row in tables for block in row})
same = paged.sequences.tolist() == right
block = paged.cache.config.block_size
del paged

with Engine(model, tokenizer) as engine:
    keywords = {**sampling, "seed": 0, "logprobs": True}
    output, engine_seconds = timed(lambda: engine.submit(ids[0].tolist(), **keywords).result())
    unread = engine.stats()["shared_reads"].get("tokens_unread", 0)
    off = engine.stats()["off"]
    why = "" if unread else off.get("shared_reads") or off.get("graphs")

best = max(output.sequences, key=lambda each: sum(note.logprob for note in each.logprobs))
if tokenizer is not None:
    print("the best answer:", tokenizer.decode(best.token_ids))
print(f"{samples} answers of a prompt of {ids.shape[1]} tokens, {new} new tokens each, on {device}")
print(f"seconds: stock {stock_seconds:.3f}, paged {paged_seconds:.3f}, engine {engine_seconds:.3f}")
print(f"MB of keys and values: stock {whole * token / 1e6:.1f}, paged {held * block * token / 1e6:.1f}")
print(f"blocks: {named} in the tables of {len(tables)} rows, {held} in memory")
print(f"tokens that the engine has not read again: {unread:,}" + (f" ({why})" if why else ""))
print("generate() has the same tokens" if same else "generate() has other tokens")
assert same or device == "cuda"  # a GPU adds in another order, and draws may come out otherwise
