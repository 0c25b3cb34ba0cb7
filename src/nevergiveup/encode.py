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
    on_drop: Callable[[Prompt, int, str], None],
) -> list[Prompt]:
    """The prompts, in order, with `tokens` filled in. Left out are those of more than `max_prompt_tokens`, and those whose
    text holds a control token of the model (`<|im_end|>`), which would end the turn or begin another in the middle of it.

    The template ends with the generation prompt. Where the tokenizer puts a beginning-of-sequence token before plain
    text and the template does not, it is put here: there is exactly one. Prompts that come with tokens keep them.

    on_drop: called with each prompt that is left out, its length in tokens and its control token ("": it is too long), so
    that the caller can count and tell.
    Raises ValueError when there is no chat template, a prompt is empty, or none can be kept.
    """
    chats = [prompt for prompt in prompts if not prompt.tokens]
    encoded = iter(_encode(chats, tokenizer) if chats else [])
    controls = sorted(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    kept: list[Prompt] = []
    shortest = None
    for prompt in prompts:
        filled = prompt if prompt.tokens else replace(prompt, tokens=next(encoded))
        n_tokens = len(filled.tokens)
        shortest = n_tokens if shortest is None else min(shortest, n_tokens)
        control = "" if prompt.tokens else _first_control(prompt, controls)
        if control or n_tokens > max_prompt_tokens:
            on_drop(filled, n_tokens, control)
        else:
            kept.append(filled)
    if shortest is not None and not kept and shortest <= max_prompt_tokens:
        found = next(filter(None, (_first_control(prompt, controls) for prompt in prompts)))
        raise ValueError(
            f"none of {len(prompts)} prompts can be used: all that are short enough hold control tokens of the model, as "
            f"{found}; take these out of the text, the chat template puts them in"
        )
    if shortest is not None and not kept:
        raise ValueError(
            f"all {len(prompts)} prompts are longer than max_prompt_tokens = {max_prompt_tokens} "
            f"(the shortest has {shortest}): raise it"
        )
    return kept


def _first_control(prompt: Prompt, controls: Sequence[str]) -> str:
    texts = [message["content"] for message in prompt.messages]
    return next((token for token in controls if any(token in text for text in texts)), "")


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
