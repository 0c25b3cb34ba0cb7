"""The rollout engine against the model itself: the same tokens, the same log-probabilities, the right distribution.

Tiny random models in float32, in which a plain forward pass and the engine agree to rounding.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nevergiveup.engines.sampling import BLOCK, sample_tokens, streams, uniforms
from nevergiveup.engines.torch import TorchEngine
from nevergiveup.models import word_tokenizer
from nevergiveup.protocols import InfrastructureError
from nevergiveup.types import Completion, Prompt, completion_seeds

T = TypeVar("T")
VOCAB = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # far from uniform, so that mistakes show
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config).eval()


def llama(**changes: Any) -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**SIZES, **changes}))


MODELS: dict[str, Callable[[], Any]] = {
    "llama, grouped queries": llama,
    "llama, one key head a query head": lambda: llama(num_key_value_heads=4),
    "qwen2, biases, tied": lambda: build(Qwen2ForCausalLM, Qwen2Config(**{**SIZES, "tie_word_embeddings": True})),
    "qwen3, normed queries": lambda: build(Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=12)),
    "granite, by its own forward": lambda: build(
        GraniteForCausalLM,
        GraniteConfig(**SIZES, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    ),
    "gpt2, learned positions": lambda: build(
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.4, eos_token_id=None
        ),
    ),
}


def prompts(*lengths: int, seed: int = 1) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(id=f"p{i}", tokens=tuple(row)) for i, row in enumerate(rows)]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 60)  # a hang is a failure

    return asyncio.run(bounded())


def sample_all(engine: TorchEngine, rows: Sequence[Prompt], n: int, seed: int = 0) -> list[list[Completion]]:
    async def gather() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.sample(row, n, seed + 1000 * i) for i, row in enumerate(rows)))

    return run(gather())


@torch.inference_mode()
def plain_logprobs(model: Any, prompt: Prompt, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """[completion tokens, V], by one forward pass without a cache."""
    ids = torch.tensor([prompt.tokens + completion.tokens])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt.tokens) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def assert_logprobs(model: Any, prompt: Prompt, completion: Completion, temperature: float = 1.0) -> None:
    expected = plain_logprobs(model, prompt, completion, temperature)
    chosen = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), chosen, atol=2e-5, rtol=0)


# The same as the model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_generate_and_a_plain_forward_pass(name: str) -> None:
    model = MODELS[name]()
    rows = prompts(3, 21, 9, 9, 1, 33)
    engine = TorchEngine(model, temperature=0, max_new_tokens=24, n_slots=8)
    for prompt, completions in zip(rows, sample_all(engine, rows, 2), strict=True):
        output = model.generate(
            torch.tensor([prompt.tokens]),
            attention_mask=torch.ones(1, len(prompt.tokens), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[0, len(prompt.tokens) :]
        logprobs = torch.cat(output.logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        for completion in completions:
            assert completion.tokens == tuple(tokens.tolist())
            assert completion.finish == "length"
            torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, atol=2e-5, rtol=0)
            assert_logprobs(model, prompt, completion)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(name: str, temperature: float) -> None:
    model = MODELS[name]()
    rows = prompts(5, 1, 17, 30, 2, 5, 8)
    engine = TorchEngine(model, temperature=temperature, max_new_tokens=20, n_slots=6, eos_ids=[3, 4, 5])
    lengths = set()
    for prompt, completions in zip(rows, sample_all(engine, rows, 5), strict=True):
        for completion in completions:
            lengths.add(len(completion.tokens))
            assert_logprobs(model, prompt, completion, temperature)
    assert len(lengths) > 3  # slots were given back and refilled at different times


def test_half_precision_stays_close() -> None:
    model = llama().to(torch.bfloat16)
    rows = prompts(5, 12, 20)
    for prompt, completions in zip(rows, sample_all(TorchEngine(model, max_new_tokens=12), rows, 12), strict=True):
        for completion in completions:
            expected = plain_logprobs(model, prompt, completion)
            chosen = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            assert float((torch.tensor(completion.logprobs) - chosen).abs().mean()) < 0.1


def test_long_and_short_sequences_through_the_same_slots() -> None:
    """The cache grows for the long prompt, shrinks when only short ones are left, and grows again."""
    model = llama()
    engine = TorchEngine(model, max_new_tokens=40, n_slots=3, eos_ids=[1, 2])

    async def waves() -> list[tuple[Prompt, list[Completion]]]:
        done = []
        for lengths in ((80, 2), (3, 4, 2), (2, 60), (5,)):
            rows = prompts(*lengths, seed=lengths[0])
            many = await asyncio.gather(*(engine.sample(row, 2, 7) for row in rows))
            done += list(zip(rows, many, strict=True))
        return done

    for prompt, completions in run(waves()):
        for completion in completions:
            assert_logprobs(model, prompt, completion)


# The right distribution


def assert_frequencies(counts: Counter[Any], probabilities: dict[Any, float], n: int) -> None:
    assert sum(probabilities.values()) == pytest.approx(1)
    assert counts.keys() <= probabilities.keys()
    for event, p in probabilities.items():
        assert abs(counts[event] / n - p) <= 4 * math.sqrt(p * (1 - p) / n) + 1 / n, event


def test_tokens_follow_the_distribution_and_do_not_depend_on_each_other() -> None:
    """Joint frequencies of two successive tokens, and of the first tokens of neighbouring completions, at 4 standard errors."""
    model = llama(vocab_size=5, initializer_range=0.2)
    prompt, n, temperature = Prompt(id="p", tokens=(1, 4, 2)), 6000, 0.7
    engine = TorchEngine(model, temperature=temperature, max_new_tokens=2, n_slots=512)
    completions = run(engine.sample(prompt, n, 11))

    with torch.inference_mode():
        ids = torch.tensor([[*prompt.tokens, first] for first in range(5)])
        logprobs = (model(input_ids=ids).logits[:, -2:].double() / temperature).log_softmax(-1)
    first = logprobs[0, 0].exp().tolist()
    second = logprobs[:, 1].exp().tolist()
    pairs = {(a, b): first[a] * second[a][b] for a in range(5) for b in range(5)}
    assert_frequencies(Counter((c.tokens[0], c.tokens[1]) for c in completions), pairs, n)

    neighbours = Counter((a.tokens[0], b.tokens[0]) for a, b in zip(completions[::2], completions[1::2], strict=True))
    assert_frequencies(neighbours, {(a, b): first[a] * first[b] for a in range(5) for b in range(5)}, n // 2)


@pytest.mark.parametrize("n_vocab", [BLOCK, 3 * BLOCK + 17, 8 * BLOCK])
def test_large_vocabularies_are_searched_like_small_ones(n_vocab: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(400, n_vocab)) * 3
    logits[:, rng.random(n_vocab) < 0.3] = -np.inf
    uniform = rng.random(400)
    uniform[:2] = 0, 1 - 2.0**-53  # the ends
    tokens, logprobs, top = sample_tokens(torch.tensor(logits), 0.5, torch.tensor(uniform), 9)
    weights = np.exp(2 * (logits - logits.max(1, keepdims=True)))
    shares = np.cumsum(weights, 1) / weights.sum(1, keepdims=True)
    expected = np.array([np.searchsorted(row, u, side="right") for row, u in zip(shares, uniform, strict=True)])
    assert (tokens.numpy() == expected)[2:].all()
    assert np.isfinite(logits[np.arange(400), tokens.numpy()]).all()  # never a token of probability 0
    chosen = np.log(weights[np.arange(400), tokens.numpy()] / weights.sum(1))
    np.testing.assert_allclose(logprobs.numpy(), chosen, atol=2e-6)
    assert top is not None
    best = np.argsort(-logits, axis=1)[:, :9]
    assert (top[0].numpy() == best).all()
    expected_top = np.log(np.take_along_axis(weights, best, 1) / weights.sum(1, keepdims=True))
    np.testing.assert_allclose(top[1].numpy(), expected_top, atol=2e-6)


def test_unlikely_tokens_keep_their_order_and_their_logprobs() -> None:
    """Where float32 has no number for the probability: below e^-104."""
    logits = torch.tensor([[0.0, 5.0, -3.0, 2.0, 4.75], [5.0, 4.984375, 2.0, 0.0, -3.0]])
    drawn = sample_tokens(logits, 1 / 64, torch.tensor([0.5, 0.5], dtype=torch.float64), 5)
    assert drawn.top is not None
    assert drawn.top[0].tolist() == [[1, 4, 3, 0, 2], [0, 1, 2, 3, 4]]
    expected = (64 * logits.double()).log_softmax(-1).sort(descending=True).values
    assert expected[1, 1] == pytest.approx(-1.3132617)  # the sum is not the greatest alone
    torch.testing.assert_close(drawn.top[1].double(), expected, atol=2e-7, rtol=1e-7)


def test_two_token_example_of_the_case_list() -> None:
    """Logits [2, 0] at temperature 0.5: token 0 has log-probability -0.018150."""
    token, logprob, *_ = sample_tokens(torch.tensor([[2.0, 0.0]]), 0.5, torch.tensor([0.3], dtype=torch.float64))
    assert token.item() == 0
    assert logprob.item() == pytest.approx(-0.018150, abs=1e-6)


def test_random_numbers_are_the_documented_hash_and_uniform() -> None:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    seeds = completion_seeds(2**63 - 5, 3)
    index = np.array([0, 1, 500])
    expected = [
        (mix((mix(s) + (int(i) + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
        for s, i in zip(seeds, index, strict=True)
    ]
    assert uniforms(streams(np.array(seeds)), index).tolist() == expected

    many = streams(np.array(completion_seeds(0, 500)))
    u = np.array([uniforms(many, np.full(500, i)) for i in range(200)])
    n = u.size
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs((u**2).mean() - 1 / 3) < 4 * math.sqrt(4 / 45 / n)
    centred = u - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):  # next token; next completion
        assert abs((a * b).mean()) < 4 / 12 / math.sqrt(a.size)


# Seeds, slots, order


def test_a_completion_depends_on_its_own_seed_alone() -> None:
    model = llama()
    target, *others = prompts(6, 4, 11, 6, 25, 2, 9)
    alone = sample_all(TorchEngine(model, max_new_tokens=16, eos_ids=[7]), [target], 4, seed=99)[0]

    async def crowded() -> list[Completion]:
        engine = TorchEngine(model, max_new_tokens=16, n_slots=5, eos_ids=[7])
        before = [asyncio.create_task(engine.sample(row, 3, i)) for i, row in enumerate(others)]
        for _ in range(9):
            await asyncio.sleep(0)
        mine = asyncio.create_task(engine.sample(target, 6, 99))
        await asyncio.gather(*before)
        return await mine

    def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
        return [completion.tokens for completion in completions]

    assert tokens(run(crowded()))[:4] == tokens(alone)
    assert len(set(tokens(alone))) == 4  # and different seeds give different completions
    again = sample_all(TorchEngine(model, max_new_tokens=16, eos_ids=[7]), [target], 4, seed=100)[0]
    assert tokens(again) != tokens(alone)


def test_the_same_calls_give_the_same_completions_bit_by_bit() -> None:
    model = llama()
    rows = prompts(3, 8, 5, 13, 2)

    def once() -> list[list[Completion]]:
        return sample_all(TorchEngine(model, max_new_tokens=12, n_slots=4, eos_ids=[5, 6]), rows, 3)

    assert once() == once()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
@pytest.mark.parametrize(("n_top", "n_slots"), [(1, 5), (5, 1), (5, 5), (5, 64), (VOCAB, 5)])
def test_the_most_likely_tokens_come_along(n_top: int, n_slots: int, temperature: float) -> None:
    """At each place of completions that share rows and use slots again, against a plain forward pass of the model."""
    model = llama()
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 9, "n_slots": n_slots}
    options["eos_ids"] = list(range(0, VOCAB, 4))  # some end with their very first token
    rows = prompts(2, 9, 4, 7, 5, 12)
    engine = TorchEngine(model, n_top=n_top, **options)
    n_outside, lengths = 0, set()
    for prompt, completions in zip(rows, sample_all(engine, rows, 4), strict=True):
        for completion in completions:
            ids, logprobs = completion.top_ids, completion.top_logprobs
            assert ids is not None
            assert logprobs is not None
            assert len(ids) == len(logprobs) == len(completion.tokens)
            lengths.add(len(ids))
            plain, told = plain_logprobs(model, prompt, completion, temperature or 1.0), torch.tensor(logprobs).double()
            assert torch.allclose(told, plain.topk(n_top, dim=-1).values, atol=2e-5)
            assert torch.allclose(told, plain.gather(1, torch.tensor(ids)), atol=2e-5)
            for token, logprob, top, values in zip(completion.tokens, completion.logprobs, ids, logprobs, strict=True):
                assert len(set(top)) == n_top
                assert list(values) == sorted(values, reverse=True)
                assert token not in top or values[top.index(token)] == logprob, "bit for bit the same number"
                n_outside += token not in top
                assert temperature > 0 or token == top[0]
            if n_top == VOCAB:
                assert told.exp().sum(-1).tolist() == pytest.approx([1.0] * len(ids), abs=1e-5)
    assert len(lengths) > 1
    assert min(lengths) == 1
    assert (n_outside > 0) == (temperature > 0 and n_top < VOCAB)
    without = sample_all(TorchEngine(model, **options), rows, 4)
    assert all(completion.top_ids is None and completion.top_logprobs is None for row in without for completion in row)
    again = sample_all(TorchEngine(model, n_top=n_top, **options), rows, 4)
    assert [[replace(c, top_ids=None, top_logprobs=None) for c in row] for row in again] == without


def test_log_probs_of_the_most_unlikely_tokens_are_exact_too() -> None:
    """Down to -87 float32 holds the probability; to -104 but a few bits of it; below, nothing."""
    logits = torch.tensor([[0.0, -80.0, -90.0, -100.0, -103.5, -120.0]])
    _, _, top = sample_tokens(logits, 1.0, torch.tensor([0.5], dtype=torch.float64), n_top=6)
    assert top is not None
    assert top[0].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert top[1][0].tolist() == pytest.approx(logits[0].tolist(), abs=1e-5)


def test_slots_are_refilled_at_once() -> None:
    """Whoever ends makes room for the next: slots are idle only at the very end, when nothing waits any more."""
    n_slots, longest = 4, 40
    engine = TorchEngine(llama(), max_new_tokens=longest, n_slots=n_slots, eos_ids=list(range(0, VOCAB, 4)))
    rows = prompts(*[5] * 30)
    groups = sample_all(engine, rows, 3)
    lengths = [len(completion.tokens) for completions in groups for completion in completions]
    assert max(lengths) > 3 * sum(lengths) / len(lengths)  # waiting for the longest would cost a lot
    counters = run(engine.counters())
    assert counters["completions"] == 90
    assert counters["tokens"] == sum(lengths)
    assert counters["prompts"] == 30  # one prefill a prompt
    assert counters["prompt_tokens"] == 150
    assert counters["slot_steps"] == sum(length - 1 for length in lengths)  # the first token comes from the prefill
    assert n_slots * counters["decode_steps"] - counters["slot_steps"] <= (n_slots - 1) * longest


def test_the_oldest_prompt_is_next_whatever_its_length() -> None:
    """A short prompt is not passed over for the many long ones behind it, though prompts alike are prefilled together."""
    engine = TorchEngine(llama(), max_new_tokens=6, n_slots=4)
    order = []

    async def ask(row: Prompt) -> None:
        await engine.sample(row, 2, 0)
        order.append(len(row.tokens))

    async def all_of_them() -> None:
        await asyncio.gather(*(ask(row) for row in prompts(90, 92, 3, *[95] * 10)))

    run(all_of_them())
    assert order.index(3) <= 3


def test_more_completions_than_slots() -> None:
    model = llama()
    prompt = prompts(7)[0]
    few = run(TorchEngine(model, max_new_tokens=9, n_slots=3, eos_ids=[2]).sample(prompt, 20, 5))
    many = run(TorchEngine(model, max_new_tokens=9, n_slots=64, eos_ids=[2]).sample(prompt, 20, 5))
    assert [c.tokens for c in few] == [c.tokens for c in many]
    assert len(few) == 20


@pytest.mark.parametrize("n_slots", [1, 2])
def test_smallest_sizes(n_slots: int) -> None:
    model = llama()
    (completion,) = run(TorchEngine(model, max_new_tokens=1, n_slots=n_slots).sample(prompts(1)[0], 1, 0))
    assert len(completion.tokens) == len(completion.logprobs) == 1
    assert completion.finish == "length"
    for completion in run(TorchEngine(model, max_new_tokens=5, n_slots=n_slots).sample(prompts(4)[0], 3, 0)):
        assert_logprobs(model, prompts(4)[0], completion)


# Ends


def test_any_of_several_end_tokens_ends_a_completion_and_belongs_to_it() -> None:
    engine = TorchEngine(llama(), max_new_tokens=12, eos_ids=[2, 7])
    seen: Counter[Any] = Counter()
    for completion in run(engine.sample(prompts(4)[0], 200, 3)):
        ends = [i for i, token in enumerate(completion.tokens) if token in (2, 7)]
        if completion.finish == "stop":
            assert ends == [len(completion.tokens) - 1]
        else:
            assert not ends
            assert len(completion.tokens) == 12
        seen[completion.tokens[-1] if ends else "length"] += 1
    assert min(seen[2], seen[7], seen["length"]) > 0


@pytest.mark.parametrize("eos", [2, [2, 7], None])
def test_end_tokens_come_from_the_generation_config(eos: int | list[int] | None) -> None:
    model = llama()
    model.generation_config.eos_token_id = eos
    ends = {2} if eos == 2 else set(eos or ())
    completions = run(TorchEngine(model, max_new_tokens=12).sample(prompts(4)[0], 100, 3))
    assert {c.tokens[-1] for c in completions if c.finish == "stop"} == ends


def test_padding_may_be_the_end_token() -> None:
    """The pad id is the end id, prompts of unequal lengths are padded, one contains that id, and the last token may be it."""
    model = llama(pad_token_id=2, eos_token_id=2)
    rows = [*prompts(3, 14), Prompt(id="with", tokens=(2, 5, 2))]
    engine = TorchEngine(model, max_new_tokens=8)
    finishes = set()
    for prompt, completions in zip(rows, sample_all(engine, rows, 40), strict=True):
        for completion in completions:
            finishes.add(completion.finish)
            assert 2 not in completion.tokens[:-1]
            assert (completion.tokens[-1] == 2) == (completion.finish == "stop")
            assert_logprobs(model, prompt, completion)
    assert finishes == {"stop", "length"}


def test_text_is_decoded_without_special_tokens() -> None:
    words = [f"w{i}" for i in range(VOCAB - 3)] + ["<bos>", "<eos>", "<pad>"]
    tokenizer = word_tokenizer(words)
    end = words.index("<eos>")
    engine = TorchEngine(llama(), tokenizer=tokenizer, max_new_tokens=40, eos_ids=[end])
    completion = next(c for c in run(engine.sample(prompts(3)[0], 60, 0)) if c.finish == "stop" and len(c.tokens) > 1)
    assert completion.text == " ".join(words[token] for token in completion.tokens if token < VOCAB - 3)


# Weights


def changed(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator) for name, weight in model.named_parameters()
    }


def test_weights_change_in_mid_sequence() -> None:
    """Sequences go on: earlier tokens by the old weights, later ones by the new, over the old keys and values."""
    model, reference = llama(), llama()
    new = changed(model)
    prompt = prompts(6)[0]
    engine = TorchEngine(model, max_new_tokens=10, version=4)
    n_old = 0

    async def swap() -> tuple[list[Completion], list[Completion]]:
        nonlocal n_old
        task = asyncio.create_task(engine.sample(prompt, 3, 8))
        while (await engine.counters())["decode_steps"] < 3:
            await asyncio.sleep(0)
        n_old = 1 + int((await engine.counters())["decode_steps"])
        await engine.load(new, 5)
        assert engine.version == 5
        running = await task
        return running, await engine.sample(prompt, 3, 8)

    running, later = run(swap())
    reference.load_state_dict(new, strict=False)
    old = llama()
    for completion in running:
        assert (completion.version_first, completion.version_last) == (4, 5)
        with torch.inference_mode():
            head = torch.tensor([prompt.tokens + completion.tokens[: n_old - 1]])
            kept = old(input_ids=head, use_cache=True)
            rest = torch.tensor([completion.tokens[n_old - 1 : -1]])
            logits = torch.cat(
                [kept.logits[0, len(prompt.tokens) - 1 :], reference(input_ids=rest, cache=kept.cache).logits[0]]
            )
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-5, rtol=0)
    for completion in later:
        assert (completion.version_first, completion.version_last) == (5, 5)
        assert_logprobs(reference, prompt, completion)


def test_tied_weights_load_under_any_of_their_names() -> None:
    model = llama(tie_word_embeddings=True)
    engine = TorchEngine(model, max_new_tokens=2)
    new = changed(model)
    assert "lm_head.weight" not in new
    run(engine.load(new, 1))
    torch.testing.assert_close(model.lm_head.weight, new["model.embed_tokens.weight"])
    other = {**new, "model.embed_tokens.weight": new["model.embed_tokens.weight"] + 1}
    renamed = {"lm_head.weight" if name == "model.embed_tokens.weight" else name: w for name, w in other.items()}
    run(engine.load(renamed, 2))
    torch.testing.assert_close(model.model.embed_tokens.weight, other["model.embed_tokens.weight"])
    run(engine.load({**new, "lm_head.weight": new["model.embed_tokens.weight"].clone()}, 3))
    with pytest.raises(ValueError, match=r"lm_head\.weight.* tied"):
        run(engine.load({**new, "lm_head.weight": new["model.embed_tokens.weight"] + 1}, 4))
    assert engine.version == 3


def test_wrong_weights_are_refused_and_change_nothing() -> None:
    model = llama()
    engine = TorchEngine(model, max_new_tokens=2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    new = changed(model)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"lack '{name}'"):
        run(engine.load({k: v for k, v in new.items() if k != name}, 1))
    with pytest.raises(ValueError, match=r"'model\.extra'"):
        run(engine.load({**new, "model.extra": new[name]}, 1))
    with pytest.raises(ValueError, match=rf"shape \(3,\) for '{name}'"):
        run(engine.load({**new, name: torch.zeros(3)}, 1))
    assert engine.version == 0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


# Trouble


class BreaksAfter(torch.nn.Linear):
    """An output layer that raises from its n-th call on."""

    n_calls = 0
    limit = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        if self.n_calls > self.limit:
            raise RuntimeError("boom")
        return super().forward(x)


def test_a_failing_model_reaches_every_caller() -> None:
    model = llama()
    head = BreaksAfter(32, VOCAB, bias=False)
    model.lm_head = head
    head.limit = 10_000
    engine = TorchEngine(model, max_new_tokens=20, n_slots=4)
    head.limit = head.n_calls + 5

    async def attempts() -> None:
        rows = prompts(3, 4, 5, 6)  # running and queued
        results = await asyncio.gather(*(engine.sample(row, 3, 0) for row in rows), return_exceptions=True)
        results += await asyncio.gather(engine.sample(rows[0], 1, 0), return_exceptions=True)  # later
        for result in results:
            assert isinstance(result, InfrastructureError)
            assert "boom" in str(result)
            assert isinstance(result.__cause__, RuntimeError)

    run(attempts())


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = llama()
    engine = TorchEngine(model, max_new_tokens=3)
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    with pytest.raises(InfrastructureError, match="not finite"):
        run(engine.sample(prompts(3)[0], 2, 0))


def test_cancelling_frees_the_slots() -> None:
    model = llama()
    engine = TorchEngine(model, max_new_tokens=100, n_slots=4)

    async def cancel() -> None:
        rows = prompts(5, 6, 7)
        running, queued, wanted = (asyncio.create_task(engine.sample(row, 4, 0)) for row in rows)
        while (await engine.counters())["decode_steps"] < 5:
            await asyncio.sleep(0)
        running.cancel()
        queued.cancel()
        for completion in await wanted:
            assert_logprobs(model, rows[2], completion)
        assert running.cancelled()
        assert queued.cancelled()
        counters = await engine.counters()
        assert counters["completions"] == 4
        assert counters["decode_steps"] < 5 + 105  # nothing was decoded for those that nobody waits for
        assert len(await engine.sample(rows[0], 4, 0)) == 4

    run(cancel())


def test_one_completion_stops_mattering_without_disturbing_its_neighbours() -> None:
    """The rows that a cancelled request leaves behind are taken by others; theirs stay right."""
    model = llama()
    engine = TorchEngine(model, max_new_tokens=30, n_slots=9, eos_ids=[4])

    async def mixed() -> None:
        rows = prompts(5, 6, 7, 8, 9)
        tasks = [asyncio.create_task(engine.sample(row, 3, i)) for i, row in enumerate(rows)]
        for i, n_turns in ((1, 5), (0, 4)):
            for _ in range(n_turns):
                await asyncio.sleep(0)
            tasks[i].cancel()
        for row, task in zip(rows[2:], tasks[2:], strict=True):
            for completion in await task:
                assert_logprobs(model, row, completion)

    run(mixed())


def test_closing_fails_those_who_wait_and_those_who_come() -> None:
    engine = TorchEngine(llama(), max_new_tokens=100, n_slots=2)

    async def close() -> None:
        rows = prompts(3, 4)
        tasks = [asyncio.create_task(engine.sample(row, 2, 0)) for row in rows]
        for _ in range(6):
            await asyncio.sleep(0)
        await engine.close()
        results = await asyncio.gather(*tasks, engine.sample(rows[0], 1, 0), return_exceptions=True)
        assert all(isinstance(result, InfrastructureError) and "closed" in str(result) for result in results)

    run(close())


def test_an_engine_outlives_its_event_loop() -> None:
    engine = TorchEngine(llama(), max_new_tokens=50)
    prompt = prompts(3)[0]

    async def leave_running() -> None:
        task = asyncio.create_task(engine.sample(prompt, 2, 0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()

    run(leave_running())
    assert len(run(engine.sample(prompt, 2, 0))) == 2


def test_the_loop_gets_a_turn_between_steps_and_time_is_accounted_for() -> None:
    engine = TorchEngine(llama(), max_new_tokens=30, n_slots=2)

    async def watch() -> None:
        await asyncio.sleep(0.05)
        task = asyncio.create_task(engine.sample(prompts(3)[0], 2, 0))
        steps = []
        while not task.done():
            steps.append((await engine.counters())["decode_steps"])
            await asyncio.sleep(0)
        assert set(steps) >= set(range(1, 29))  # every step was seen from outside
        at_rest = await engine.counters()
        await asyncio.sleep(0.05)
        later = await engine.counters()
        assert at_rest["waiting_s"] >= 0.05
        assert later["waiting_s"] - at_rest["waiting_s"] >= 0.04
        assert later["busy_s"] == at_rest["busy_s"] > 0

    run(watch())


# Refused


def test_prompts_that_cannot_be_served() -> None:
    engine = TorchEngine(llama(), max_new_tokens=10, max_context=20)
    good = prompts(10)[0]
    assert len(run(engine.sample(good, 1, 0))) == 1
    with pytest.raises(ValueError, match=r"p0 has 11 tokens; .* 21, more than the context of 20"):
        run(engine.sample(prompts(11)[0], 1, 0))
    with pytest.raises(ValueError, match="no tokens"):
        run(engine.sample(replace(good, tokens=()), 1, 0))
    with pytest.raises(ValueError, match="vocabulary of 40"):
        run(engine.sample(replace(good, tokens=(3, 40)), 1, 0))
    with pytest.raises(ValueError, match="n must be"):
        run(engine.sample(good, 0, 0))
    assert run(engine.counters())["prompts"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"n_slots": 0}, "n_slots"),
        ({"n_top": -1}, "n_top must be from 0 to the model's vocabulary of 40, not -1"),
        ({"n_top": 41}, "n_top must be from 0 to the model's vocabulary of 40, not 41"),
        ({"eos_ids": [40]}, "eos_ids"),
        ({"max_context": 129}, "max_context"),
        ({"max_context": 8}, "max_context"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchEngine(llama(), **{"max_new_tokens": 8, **changes})


def test_a_sliding_window_is_refused_unless_nothing_slides() -> None:
    model = build(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=24, head_dim=8))
    with pytest.raises(ValueError, match=r"window of 24 tokens.* set max_context to at most 24"):
        TorchEngine(model, max_new_tokens=8)
    prompt = prompts(16)[0]
    for completion in run(TorchEngine(model, max_new_tokens=8, max_context=24).sample(prompt, 4, 0)):
        assert_logprobs(model, prompt, completion)


def test_recurrent_state_is_refused() -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="MambaForCausalLM cannot be served"):
        TorchEngine(build(MambaForCausalLM, config), max_new_tokens=8, max_context=64)


def test_attention_that_is_more_than_softmax_is_refused() -> None:
    sizes = {**SIZES, "head_dim": 8, "pad_token_id": 0, "sliding_window": 128, "attn_logit_softcapping": 1.0}
    model = build(Gemma2ForCausalLM, Gemma2Config(**sizes, attn_implementation="eager"))
    with pytest.raises(ValueError, match="'softcap'"):
        TorchEngine(model, max_new_tokens=8)
