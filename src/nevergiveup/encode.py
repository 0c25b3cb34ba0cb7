"""Turns the chat of a prompt into the token ids that the policy sees: the chat template, applied exactly once.

Layer 3. Takes a Hugging Face tokenizer; imports no library of that kind itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nevergiveup.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    on_drop: Callable[[Prompt, int], None],
) -> list[Prompt]:
    """The prompts, in order, with `tokens` filled in; those of more than `max_prompt_tokens` are left out.

    The template ends with the generation prompt. Where the tokenizer puts a beginning-of-sequence token before plain
    text and the template does not, it is put here: there is exactly one. Prompts that come with tokens keep them.

    on_drop: called with each prompt that is left out and its length in tokens, so that the caller can count and tell.
    Raises ValueError when there is no chat template, a prompt is empty, or every prompt is too long.
    """
    chats = [prompt for prompt in prompts if not prompt.tokens]
    encoded = iter(_encode(chats, tokenizer) if chats else [])
    kept: list[Prompt] = []
    shortest = None
    for prompt in prompts:
        filled = prompt if prompt.tokens else replace(prompt, tokens=next(encoded))
        n_tokens = len(filled.tokens)
        shortest = n_tokens if shortest is None else min(shortest, n_tokens)
        if n_tokens <= max_prompt_tokens:
            kept.append(filled)
        else:
            on_drop(filled, n_tokens)
    if shortest is not None and not kept:
        raise ValueError(
            f"all {len(prompts)} prompts are longer than max_prompt_tokens = {max_prompt_tokens} "
            f"(the shortest has {shortest}): raise it"
        )
    return kept


def _encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    for prompt in prompts:
        if not prompt.messages:
            raise ValueError(f"prompt {prompt.id} has neither messages nor tokens")
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use an instruction-tuned model, "
            "or put a chat_template.jinja into the model folder"
        )
    texts = tokenizer.apply_chat_template(
        [[dict(message) for message in prompt.messages] for prompt in prompts],
        tokenize=False,
        add_generation_prompt=True,
    )
    # The template writes the special tokens itself: letting the tokenizer add its own would double the first one.
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a")["input_ids"][0] == bos:
        rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
    return [tuple(row) for row in rows]
