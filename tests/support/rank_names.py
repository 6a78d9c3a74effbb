"""Which cases of rank_cases.py run on how many ranks, and which ranks end in them."""

from __future__ import annotations

CASES: list[tuple[int, str, tuple[int, ...]]] = [
    (2, "chunks_recomputation_and_hits", ()),
    (2, "swap", ()),
    (2, "steps_ahead_of_their_tokens", ()),
    (2, "windows", ()),
    (2, "other_families", ()),
    (2, "captured_steps", ()),
    (2, "scores_of_prompts", ()),
    (2, "long_messages", ()),
    (2, "processors_and_criteria", ()),
    (2, "pause_and_new_weights", ()),
    (2, "a_thread_that_waits", ()),
    (2, "an_error_of_all_ranks", ()),
    (2, "the_smallest_rank_decides", ()),
    (2, "wrong_uses", ()),
    (2, "adapters_in_few_places", ()),
    (2, "adapters_and_swap", ()),
    (2, "adapters_of_other_families", ()),
    (2, "adapters_that_come_and_go", ()),
    (2, "layers_divided_in_another_way", ()),
    (2, "heads_that_ranks_do_not_divide", ()),
    (2, "words_of_rank_0", ()),
    (2, "generate", ()),
    (2, "draws_of_ranks", ()),
    (2, "weights_divided_by_fsdp", ()),
    (2, "weights_that_fsdp_gathers", ()),
    (3, "chunks_recomputation_and_hits", ()),
    (3, "adapters_in_few_places", ()),
    (3, "a_rank_that_raises", ()),
    (3, "a_rank_that_cannot_take_an_adapter", ()),
    (3, "a_rank_that_hangs", ()),
    (3, "a_rank_that_dies", (1,)),
]
"""In this order: faults last, since they leave no process group."""
