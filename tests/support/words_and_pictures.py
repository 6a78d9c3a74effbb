"""A tiny random Llava over the demo's words with its processor, and pictures for it."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from hf_paged import demo


def llava() -> tuple[Any, Any]:
    """The model, and its processor, which needs pillow."""
    tokenizer = demo.tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    vision = tf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        projection_dim=32,
    )
    text = tf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config = tf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>")
    )
    torch.manual_seed(0)
    model = tf.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    images = tf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' "
        "%}<image>{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    processor = tf.LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1, chat_template=template,
    )  # fmt: skip
    return model, processor


def picture(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(
        torch.randint(
            0, 256, (40, 40, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        ).numpy()
    )
