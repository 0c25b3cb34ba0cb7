"""Small models made here rather than fetched: tokenizer, tiny Llama, supervised warm-up and exact pass rates.

Layer 3. torch and transformers. What comes out are ordinary Hugging Face objects, which engines and learners treat like
any other model.

Shapes: B sequences, T positions (padded on the right; attention is causal, so padding changes nothing), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

TokenIds: TypeAlias = Sequence[int]
Pair: TypeAlias = tuple[TokenIds, TokenIds]
"""(prompt tokens, completion tokens)."""

IGNORED = -100  # a position that is no completion token


def word_tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whitespace-separated words; the id of a word is its place in `vocabulary`.

    `vocabulary` holds "<bos>", "<eos>" and "<pad>". Nothing is added to a text when it is encoded.
    """
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Without a decoder words are joined by spaces, which is the inverse of the split.
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(
    vocab_size: int,
    *,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    max_positions: int,
    seed: int,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
) -> LlamaForCausalLM:
    """An untrained Llama in float32; 0.4 million parameters with the default sizes. Weights depend on `seed` alone."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max_positions,
        # With the usual 0.02, made for wide models, a narrow one needs several times as many steps to leave the ground.
        initializer_range=hidden**-0.5,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    with torch.random.fork_rng(devices=[]):  # leaves the generator of the caller alone
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def fit_supervised(
    model: PreTrainedModel,
    draw: Callable[[], Sequence[Pair]],
    n_steps: int,
    *,
    lr: float = 4e-3,
    n_warmup: int = 50,
    max_grad_norm: float = 1.0,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """Teach `model` to write the completions: AdamW, cosine schedule, cross-entropy of the completion tokens only.

    draw: the pairs of one batch, called once a step.
    lr: reached after `n_warmup` steps of linear warm-up, 0 at the end.
    progress: called after each step with the number of steps done and the loss (nats a token).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def factor(step: int) -> float:
        if step < n_warmup:
            return (step + 1) / n_warmup
        return 0.5 * (1 + math.cos(math.pi * (step - n_warmup) / max(1, n_steps - n_warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for step in range(n_steps):
        tokens_BT, targets_BT = _pad(draw(), model.device)
        logits_BTV = model(tokens_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, loss.item())
    model.eval()  # type: ignore[no-untyped-call]


@torch.inference_mode()
def exact_pass_rate(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    targets: Sequence[TokenIds],
    temperature: float = 1.0,
    batch_size: int = 512,
) -> list[float]:
    """The probability that prompts[i] is completed by exactly targets[i]: the product of the token probabilities.

    It is pass@1 where `targets` are the only right completions (end of sequence included). No sampling, no noise.
    """
    pairs = list(zip(prompts, targets, strict=True))
    rates: list[float] = []
    for start in range(0, len(pairs), batch_size):
        tokens_BT, targets_BT = _pad(pairs[start : start + batch_size], model.device)
        logprobs_BTV = F.log_softmax(model(tokens_BT, use_cache=False).logits.float() / temperature, dim=-1)
        wanted_BT = targets_BT != IGNORED
        chosen_BT1 = logprobs_BTV.gather(-1, targets_BT.clamp(min=0).unsqueeze(-1))
        rates += chosen_BT1.squeeze(-1).where(wanted_BT, 0.0).sum(dim=1).exp().tolist()
    return rates


def _pad(pairs: Sequence[Pair], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and shifted targets of a batch, [B, T] each: targets[b, t] is the completion token after position t."""
    longest = max(len(prompt) + len(completion) for prompt, completion in pairs) - 1
    tokens_BT = torch.zeros(len(pairs), longest, dtype=torch.long)
    targets_BT = torch.full((len(pairs), longest), IGNORED)
    for b, (prompt, completion) in enumerate(pairs):
        sequence = (*prompt, *completion)
        tokens_BT[b, : len(sequence) - 1] = torch.tensor(sequence[:-1])
        targets_BT[b, len(prompt) - 1 : len(sequence) - 1] = torch.tensor(tuple(completion))
    return tokens_BT.to(device), targets_BT.to(device)
