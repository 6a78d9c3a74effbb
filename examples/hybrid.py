"""A hybrid of Qwen3.5's shape (recurrent layers beside attention), fine-tuned with peft and served: the turns of a
chat begin with the states that the turn before has left.

pip install peft
python examples/hybrid.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_paged import Engine, demo

torch.manual_seed(0)
tokenizer = demo.tokenizer()
config = Qwen3_5TextConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
model = Qwen3_5ForCausalLM(config)  # three of its four layers keep a recurrent state
targets = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "v_proj", "up_proj", "down_proj"]
lora = LoraConfig(r=16, lora_alpha=32, target_modules=targets)
model = get_peft_model(model, lora, "rhyme")

# A few steps of plain PyTorch: the adapter learns one line by heart.
line = tokenizer("The fox and the owl went out to howl.", return_tensors="pt").input_ids
optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=2e-2)
for _ in range(60):
    loss = model(input_ids=line, labels=line).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
print(f"trained to a loss of {loss.item():.2f}")

with Engine(model, tokenizer) as engine:
    said = line[0, :4].tolist()
    for turn in range(3):
        answer = engine.submit(said, adapter="rhyme", max_new_tokens=len(line[0]) - 4).result()
        tokens = answer.sequences[0].token_ids
        print(f"turn {turn + 1}: {answer.cached_tokens} of {len(said)} tokens were there; {answer.text!r}")
        stock = model.generate(input_ids=torch.tensor([said]), max_new_tokens=len(tokens), do_sample=False)
        assert stock[0, len(said) :].tolist() == tokens, "generate() has other tokens"
        said = [*said, *tokens, *line[0, :4].tolist()]
    print("slots:", engine.stats()["states"])
