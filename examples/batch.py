"""Thirty-two prompts of different lengths in one batch: the same sentences, no padding stored, and the
seconds of both caches.

python examples/batch.py                    # the tiny model of the package, on the GPU if there is one
python examples/batch.py --shape llama8b    # 32 prompts of 384 tokens, an 8B Llama with random weights, on a GPU
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged  # noqa: F401  # importing it is what teaches generate() the word
from hf_paged import demo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shape", choices=["demo", "llama8b"], default="demo")
big = parser.parse_args().shape == "llama8b"
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
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(10, 1000, (32, 384), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    length = {"max_new_tokens": 64, "min_new_tokens": 64}
else:
    model, tokenizer = demo.model().to(device), demo.tokenizer()
    length = {"max_new_tokens": 64}
    beginnings = demo.prompts()
    prompts = [f"{first}. {second}" for first in beginnings for second in beginnings[:4]]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)


def timed(**word):
    """The tokens of a warm call, and its seconds."""
    for _ in range(2):
        begin = time.perf_counter()
        tokens = model.generate(**inputs, **length, do_sample=False, **word)
        tokens.tolist()  # wait for the device
    return tokens, time.perf_counter() - begin


stock, stock_seconds = timed()
paged, paged_seconds = timed(cache_implementation="paged")

if not big:
    print(*tokenizer.batch_decode(paged[:4], skip_special_tokens=True), sep="\n")
print(f"seconds on {device}, {len(paged)} rows: stock {stock_seconds:.3f}, paged {paged_seconds:.3f}")
same = torch.equal(stock, paged)
print("the same tokens" if same else "not the same tokens")
assert (
    same or device == "cuda"
)  # a GPU adds in another order, and scores that rounding cannot tell apart may change places
