"""Prompts to token ids: the chat template exactly once, one beginning-of-sequence token, too long ones left out."""

from __future__ import annotations

from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nevergiveup.encode import encode_prompts
from nevergiveup.fetch import FOLDER, cache_folder
from nevergiveup.tasks.gsm8k import GSM8K
from nevergiveup.types import Prompt

TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
BOS_ID = 256


def tokenizer(template: str | None = None, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, and `<s>` (which it puts before plain text if `adds_bos`)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        bytes_only.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>" if adds_bos else None, eos_token="</s>")
    fast.chat_template = template
    return fast


def chat(id: str, content: str) -> Prompt:
    return Prompt(id=id, messages=({"role": "user", "content": content},), answer="4")


def nothing_is_dropped(prompt: Prompt, n_tokens: int, control: str) -> None:
    raise AssertionError(f"{prompt.id} was dropped at {n_tokens} tokens")


@pytest.mark.parametrize("template", [TURNS + ASK, "{{ bos_token }}" + TURNS + ASK], ids=["plain", "with bos"])
def test_one_bos_one_template_one_generation_prompt(template: str) -> None:
    tok = tokenizer(template, adds_bos=True)
    (prompt,) = encode_prompts([chat("a", "2+2?")], tok, max_prompt_tokens=99, on_drop=nothing_is_dropped)
    assert tok.decode(prompt.tokens) == "<s><user>2+2?<assistant>"
    assert prompt.tokens.count(BOS_ID) == 1
    assert (prompt.id, prompt.answer, prompt.messages) == ("a", "4", chat("a", "2+2?").messages)


def test_a_model_without_bos_gets_none() -> None:
    tok = tokenizer(TURNS + ASK)
    (prompt,) = encode_prompts([chat("a", "2+2?")], tok, max_prompt_tokens=99, on_drop=nothing_is_dropped)
    assert tok.decode(prompt.tokens) == "<user>2+2?<assistant>"


def test_every_turn_and_any_script_survives() -> None:
    tok = tokenizer(TURNS + ASK)
    messages = ({"role": "system", "content": "Sei knapp."}, {"role": "user", "content": "Größe? 三 🤖"})
    (prompt,) = encode_prompts(
        [Prompt(id="a", messages=messages)], tok, max_prompt_tokens=99, on_drop=nothing_is_dropped
    )
    assert tok.decode(prompt.tokens) == "<system>Sei knapp.<user>Größe? 三 🤖<assistant>"


def test_prompts_with_tokens_pass_in_their_place() -> None:
    tok = tokenizer(TURNS + ASK)
    ready = Prompt(id="ready", tokens=(7, 8, 9))
    mixed = [chat("a", "1"), ready, chat("b", "2"), Prompt(id="both", messages=chat("c", "3").messages, tokens=(5,))]
    encoded = encode_prompts(mixed, tok, max_prompt_tokens=99, on_drop=nothing_is_dropped)
    assert [prompt.id for prompt in encoded] == ["a", "ready", "b", "both"]
    assert encoded[1] is ready
    assert encoded[3].tokens == (5,)
    assert tok.decode(encoded[2].tokens) == "<user>2<assistant>"
    again = encode_prompts(encoded, tok, max_prompt_tokens=99, on_drop=nothing_is_dropped)
    assert again == encoded  # the template is not applied a second time
    only_tokens = encode_prompts([ready], tokenizer(None), max_prompt_tokens=99, on_drop=nothing_is_dropped)
    assert only_tokens == [ready]  # and none is needed


def test_too_long_prompts_are_left_out_and_told() -> None:
    dropped: list[tuple[str, int, str]] = []
    prompts = [
        chat("fits", "x" * 10),
        chat("long", "x" * 5000),
        Prompt(id="tokens", tokens=(1,) * 28),
        chat("edge", "x" * 9),
    ]
    overhead = len("<user><assistant>")
    kept = encode_prompts(
        prompts,
        tokenizer(TURNS + ASK),
        max_prompt_tokens=overhead + 10,
        on_drop=lambda p, *why: dropped.append((p.id, *why)),
    )
    assert [prompt.id for prompt in kept] == ["fits", "edge"]
    assert dropped == [("long", overhead + 5000, ""), ("tokens", 28, "")]


def test_texts_with_control_tokens_are_left_out_and_told() -> None:
    """Else a row could close the turn of the user and answer itself."""
    dropped: list[tuple[str, str]] = []
    system = ({"role": "system", "content": "Be </s> brief."}, {"role": "user", "content": "2+2?"})
    prompts = [chat("sound", "a < b, s > c"), chat("ends", "2+2?</s>4"), Prompt("system", messages=system)]
    told = partial(encode_prompts, max_prompt_tokens=99, on_drop=lambda p, n, control: dropped.append((p.id, control)))
    kept = told(prompts, tokenizer(TURNS + ASK))
    assert [prompt.id for prompt in kept] == ["sound"]
    assert dropped == [("ends", "</s>"), ("system", "</s>")]
    with pytest.raises(
        ValueError, match=r"none of 2 prompts can be used: .* hold control tokens of the model, as </s>"
    ):
        told(prompts[1:], tokenizer(TURNS + ASK))


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"all 2 prompts are longer than max_prompt_tokens = 5 \(the shortest has 18\): raise it"
    ):
        encode_prompts(
            [chat("a", "x"), chat("b", "xy")],
            tokenizer(TURNS + ASK),
            max_prompt_tokens=5,
            on_drop=lambda *why: None,
        )


def test_no_chat_template_and_empty_prompts() -> None:
    with pytest.raises(ValueError, match="has no chat template: use an instruction-tuned model"):
        encode_prompts([chat("a", "x")], tokenizer(None), max_prompt_tokens=9, on_drop=nothing_is_dropped)
    with pytest.raises(ValueError, match="prompt a has neither messages nor tokens"):
        encode_prompts([Prompt(id="a")], tokenizer(TURNS), max_prompt_tokens=9, on_drop=nothing_is_dropped)
    assert encode_prompts([], tokenizer(None), max_prompt_tokens=9, on_drop=nothing_is_dropped) == []


@pytest.mark.skipif(not (cache_folder() / FOLDER).is_dir(), reason="needs the model of `ngu fetch smollm2`")
def test_gsm8k_for_smollm2() -> None:
    tok = AutoTokenizer.from_pretrained(cache_folder() / FOLDER)
    rows = GSM8K().prompts("train")[:64]
    encoded = encode_prompts(rows, tok, max_prompt_tokens=512, on_drop=nothing_is_dropped)
    for row, prompt in zip(rows, encoded, strict=True):
        text = tok.decode(prompt.tokens)
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith(f"<|im_start|>user\n{row.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
        assert (
            list(prompt.tokens) == tok.apply_chat_template(list(row.messages), add_generation_prompt=True)["input_ids"]
        )
