"""One adapter with everything that LoRA in peft can train, answered by the object that was trained: paged generate()
and the engine give the tokens of peft's own generate().

The adapter has DoRA on linear layers, on the embeddings and on the head, and whole norms (`modules_to_save`).
Servers that load an adapter into LoRA kernels of their own take low-rank products, and refuse or ignore the rest.
The last answer is what the products of the linear layers alone would say.

pip install peft
python examples/one_adapter.py
"""

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from hf_paged import Engine, demo

torch.manual_seed(0)
LINEAR = ["q_proj", "v_proj", "down_proj"]
tokenizer = demo.tokenizer()


def base():
    """The demo model with a head of its own; its embeddings are its head otherwise."""
    model = demo.model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
    return model


everything = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=[*LINEAR, "embed_tokens", "lm_head"],
    use_dora=True,
    modules_to_save=["norm"],
)
model = get_peft_model(base(), everything, "loud")

# Train it: the model's own stories, shouted.
inputs = tokenizer(demo.prompts(), return_tensors="pt", padding=True)
told = model.generate(**inputs, do_sample=False, max_new_tokens=40, cache_implementation="paged")
stories = [each.replace(".", "!") for each in tokenizer.batch_decode(told, skip_special_tokens=True)]
rows = tokenizer(stories, return_tensors="pt", padding=True)
labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=5e-3)
model.train()
for _ in range(20):
    optimizer.zero_grad()
    model(**rows, labels=labels).loss.backward()
    optimizer.step()
model.eval()

# The same object answers, in every mode of generate() and in the engine.
prompt, length = "The old bear slept", {"max_new_tokens": 40}
question = tokenizer(prompt, return_tensors="pt")
engine = Engine(model, tokenizer)
modes = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4},
    "drawn": {"do_sample": True},
}
for name, mode in modes.items():
    torch.manual_seed(1)
    stock = model.generate(**question, **mode, **length)
    torch.manual_seed(1)
    paged = model.generate(**question, **mode, **length, cache_implementation="paged")
    same = {"paged generate()": torch.equal(stock, paged)}
    if name != "drawn":  # the engine draws by a generator of its own
        answer = engine.generate(prompt, **mode, **length).sequences[0].token_ids
        same["engine"] = answer == stock[0, question["input_ids"].shape[1] :].tolist()
    print(f"{name}: {tokenizer.decode(stock[0], skip_special_tokens=True)}")
    print(f"    peft's tokens in {sum(same.values())} of {len(same)}: {', '.join(same)}")

# One request has it, and the next one has the model alone, in one batch.
handles = [engine.submit(prompt, do_sample=False, adapter=adapter, **length) for adapter in ("loud", None)]
for name, handle in zip(("loud", "model alone"), handles, strict=True):
    print(f"{name}: {prompt}{handle.result().text}")
engine.close()

# What is left where only low-rank products of linear layers are taken.
trained = get_peft_model_state_dict(model, adapter_name="loud", save_embedding_layers=False)
products = {
    name: tensor
    for name, tensor in trained.items()
    if name.endswith(("lora_A.weight", "lora_B.weight")) and "lm_head" not in name
}
left = get_peft_model(base(), LoraConfig(r=8, lora_alpha=16, target_modules=LINEAR))
set_peft_model_state_dict(left, products)
answer = left.eval().generate(**question, do_sample=False, **length, cache_implementation="paged")
print(f"products alone: {tokenizer.decode(answer[0], skip_special_tokens=True)}")
