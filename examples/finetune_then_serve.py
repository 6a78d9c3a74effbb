"""Two styles, fine-tuned with peft and Trainer, served in one batch beside the model they began from. Then
one of them is trained further while the engine serves the other. A third one has a new token, and embeddings
and a head of its own.

pip install peft
python examples/finetune_then_serve.py
"""

import tempfile
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from hf_paged import Engine, demo

torch.manual_seed(0)
model, tokenizer = demo.model(), demo.tokenizer()
tokenizer.add_tokens(["<moral>"])
model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
inputs = tokenizer(demo.prompts() * 6, return_tensors="pt", padding=True)
told = model.generate(**inputs, do_sample=True, max_new_tokens=60, cache_implementation="paged")
stories = tokenizer.batch_decode(told, skip_special_tokens=True)  # to be rewritten in each style

model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"), "loud")
model.add_adapter(
    "moonlit", LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"])
)


def train(name: str, rewrite: Callable[[str], str], steps: int, *callbacks: TrainerCallback) -> None:
    """Optimizer steps on one adapter. The other one and the model below stay as they are."""
    model.set_adapter(name)
    rows = [tokenizer(rewrite(story), truncation=True, max_length=96) for story in stories]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            report_to=[],
            save_strategy="no",
        )
        Trainer(model, options, collator, rows, callbacks=list(callbacks)).train()
    model.eval()


train("loud", lambda story: story.replace(".", "!"), 30)
train("moonlit", lambda story: story.replace(".", ". The moon shone."), 20)

# One batch, three answers.
prompt, options = "The old bear slept", {"do_sample": False, "max_new_tokens": 40}
engine = Engine(model, tokenizer)
handles = {name: engine.submit(prompt, adapter=name, **options) for name in (None, "loud", "moonlit")}
for name, handle in handles.items():
    print(f"{name or 'the model':9}: {prompt}{handle.result().text}")

# generate() has the same tokens, a row for each.
rows = tokenizer([prompt] * 3, return_tensors="pt").to(model.device)
names = ["__base__", "loud", "moonlit"]
paged = model.generate(**rows, **options, adapter_names=names, cache_implementation="paged")
same = tokenizer.batch_decode(paged, skip_special_tokens=True) == [
    prompt + handle.result().text for handle in handles.values()
]
print("generate() has the same tokens" if same else "generate() has other tokens")


class ServeMeanwhile(TrainerCallback):
    """Steps of the engine between the optimizer's."""

    def on_step_end(self, *_: object, **__: object) -> None:
        """A token for every running request."""
        model.eval()
        engine.step()
        model.train()


served = engine.submit(prompt, adapter="loud", **options)
engine.step()
train("moonlit", lambda story: story.replace(".", ". Nobody slept."), 20, ServeMeanwhile())
print(f"loud     : {prompt}{served.result().text}")
print(f"moonlit  : {prompt}{engine.submit(prompt, adapter='moonlit', **options).result().text}")

# A new token needs rows of the embeddings and of the head: they are saved with the adapter, whole.
tied = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
model.add_adapter("moral", LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], **tied))
train("moral", lambda story: story.split(".")[0] + ".<moral> Sleep well.", 20)
handles = {name: engine.submit(prompt, adapter=name, **options) for name in (None, "loud", "moral")}
for name, handle in handles.items():
    text = tokenizer.decode(handle.result().sequences[0].token_ids)
    print(f"{name or 'the model':9}: {prompt}{text}")
print(
    f"moral has {engine.adapters()['moral'].bytes / 1e6:.1f} MB, loud {engine.adapters()['loud'].bytes / 1e6:.1f} MB"
)
engine.close()

# The folder of this adapter, served beside the model without the token.
with tempfile.TemporaryDirectory() as folder, Engine(demo.model(), tokenizer) as plain:
    model.save_pretrained(folder, selected_adapters=["moral"])
    plain.add_adapter("moral", f"{folder}/moral")
    served, alone = (plain.submit(prompt, adapter=name, **options).result() for name in ("moral", None))
    known = plain.adapters()["moral"].vocabulary
same = served.sequences == handles["moral"].result().sequences
print(f"from its folder, with {known} tokens: {'the same answer' if same else 'another answer'}")
print(f"the model, with one token less: {prompt}{alone.text}")
