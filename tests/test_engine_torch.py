"""The rollout engine against `generate` and plain forward passes of the same model: the same tokens, the same numbers."""

import asyncio
import math
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nevergiveup.engines.torch import TorchEngine
from nevergiveup.protocols import InfrastructureError
from nevergiveup.types import Prompt

VOCAB, EOS = 40, 2
PROMPTS = [
    Prompt(f"p{i}", tokens=tuple((7 * i + j) % 37 + 3 for j in range(n))) for i, n in enumerate((3, 11, 5, 8, 1, 17))
]


def model_of(kind="llama", vocab=VOCAB, seed=0, eos=EOS, **options):
    torch.manual_seed(seed)
    common = dict(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=eos, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    config_cls, model_cls = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    return model_cls(config_cls(**common | options)).eval()


def engine_of(model, **options):
    return TorchEngine(model, **{"max_new_tokens": 12, "n_slots": 8, **options})


def sample_all(engine, requests):
    """Completions of (prompt, n, seed) requests, all asked for at once."""

    async def main():
        return await asyncio.gather(*(engine.sample(*request) for request in requests))

    return asyncio.run(main())


def plain_logprobs(model, prompt, tokens, temperature=1.0):
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt.tokens, *tokens]]), use_cache=False).logits[0].double()
    logprobs = (logits / temperature).log_softmax(-1)
    start = len(prompt.tokens) - 1
    return [logprobs[start + i, token].item() for i, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_greedy_tokens_are_those_of_generate_and_logprobs_those_of_a_plain_pass(kind, options):
    model = model_of(kind, **options)
    engine = engine_of(model, temperature=0)
    answers = sample_all(engine, [(prompt, 1, i) for i, prompt in enumerate(PROMPTS)])
    for prompt, (completion,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt.tokens])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert completion.tokens == tuple(expected[0, len(prompt.tokens) :].tolist())
        assert completion.finish == ("stop" if completion.tokens[-1] == EOS else "length")
        assert completion.logprobs == pytest.approx(plain_logprobs(model, prompt, completion.tokens), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_those_of_the_sampling_distribution(temperature):
    model = model_of()
    answers = sample_all(engine_of(model, temperature=temperature), [(prompt, 5, 3) for prompt in PROMPTS])
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        assert len({completion.tokens for completion in completions}) > 1
        for completion in completions:
            expected = plain_logprobs(model, prompt, completion.tokens, temperature)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_first_tokens_and_pairs_of_tokens_have_the_right_frequencies():
    """4,000 completions of two tokens; every frequency within 4.5 standard errors, the second given the first too."""
    model, prompt, n = model_of(vocab=6, eos=5, initializer_range=0.1), Prompt("p", tokens=(1, 3)), 4000
    (completions,) = sample_all(engine_of(model, max_new_tokens=2, n_slots=256, eos_ids=[]), [(prompt, n, 11)])
    counts = Counter(completion.tokens for completion in completions)
    for first in range(6):
        for second in range(6):
            p = math.exp(sum(plain_logprobs(model, prompt, (first, second))))
            assert abs(counts[first, second] / n - p) < 4.5 * math.sqrt(p * (1 - p) / n)


def test_a_completion_depends_on_its_seed_alone_not_on_the_crowd():
    model = model_of()
    (alone,) = sample_all(engine_of(model), [(PROMPTS[1], 4, 99)])
    crowd = sample_all(engine_of(model, n_slots=5), [(prompt, 4, 99 + i) for i, prompt in enumerate(PROMPTS[1:] * 3)])
    assert [completion.tokens for completion in crowd[0]] == [completion.tokens for completion in alone]
    (other,) = sample_all(engine_of(model), [(PROMPTS[1], 4, 100)])
    assert [completion.tokens for completion in other] != [completion.tokens for completion in alone]


def test_more_completions_than_slots_all_finish_and_nobody_waits_for_the_longest():
    engine = engine_of(model_of(), n_slots=4, max_new_tokens=30)
    (completions,) = sample_all(engine, [(PROMPTS[0], 64, 5)])
    lengths = [len(completion.tokens) for completion in completions]
    assert len(lengths) == 64
    assert min(lengths) < max(lengths)
    counters = asyncio.run(engine.counters())
    assert counters["tokens"] == sum(lengths)
    assert counters["slot_steps"] == sum(lengths) - 64  # the first token comes from the prefill
    assert counters["decode_steps"] <= (sum(lengths) - 64) / 4 + max(lengths)  # four at work, but for the last ones
    waiting = sum(max(lengths[i : i + 4]) for i in range(0, 64, 4))  # passes of batches that wait for their longest
    assert counters["decode_steps"] < waiting
    assert counters["prompts"] == 1


def test_weights_change_in_mid_sequence_without_losing_it():
    model, other = model_of(seed=0), model_of(seed=1)
    engine = engine_of(model, temperature=0, eos_ids=[])

    async def main():
        running = asyncio.create_task(engine.sample(PROMPTS[1], 1, 0))
        while (await engine.counters())["decode_steps"] < 5:
            await asyncio.sleep(0)
        await engine.load(other.state_dict(), 1)
        (across,) = await running
        (after,) = await engine.sample(PROMPTS[1], 1, 0)
        return across, after

    before = sample_all(engine_of(model_of(seed=0), temperature=0, eos_ids=[]), [(PROMPTS[1], 1, 0)])[0][0]
    across, after = asyncio.run(main())
    assert (across.version_first, across.version_last) == (0, 1)
    assert (after.version_first, after.version_last) == (1, 1)
    assert across.tokens[:6] == before.tokens[:6]
    assert across.tokens != before.tokens
    fresh = sample_all(engine_of(model_of(seed=1), temperature=0, eos_ids=[]), [(PROMPTS[1], 1, 0)])[0][0]
    assert after.tokens == fresh.tokens


def test_weights_that_do_not_fit_are_refused_and_change_nothing():
    model = model_of()
    engine = engine_of(model)
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    name = "model.norm.weight"

    def load(changed):
        asyncio.run(engine.load(changed, 1))

    with pytest.raises(ValueError, match=r"weights lack 'model\.norm\.weight'"):
        load({key: value for key, value in weights.items() if key != name})
    with pytest.raises(ValueError, match="'extra', which the model does not have"):
        load(weights | {"extra": torch.ones(1)})
    with pytest.raises(ValueError, match=r"weights have shape \(3,\) for 'model\.norm\.weight'"):
        load(weights | {name: torch.ones(3)})
    assert engine.version == 0
    assert model.state_dict()[name].eq(1).all()


def test_tied_weights_load_under_one_of_their_names():
    model = model_of(tie_word_embeddings=True)
    weights = {name: tensor * 2 for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    asyncio.run(engine_of(model).load(weights, 4))
    assert model.lm_head.weight.equal(weights["model.embed_tokens.weight"])


def test_every_eos_id_ends_a_completion_and_is_part_of_it():
    """C33: two end ids, one of them also the padding id."""
    ends = {0, 7}
    engine = engine_of(model_of(initializer_range=0.05), eos_ids=sorted(ends), max_new_tokens=100)
    (completions,) = sample_all(engine, [(PROMPTS[0], 40, 1)])
    seen = {completion.tokens[-1] for completion in completions if completion.finish == "stop"}
    assert seen == ends
    for completion in completions:
        assert ends.isdisjoint(completion.tokens[:-1])
        assert completion.finish == "stop" or len(completion.tokens) == 100
        assert len(completion.logprobs) == len(completion.tokens)


def test_one_token_is_the_shortest_completion():
    (completions,) = sample_all(engine_of(model_of(), max_new_tokens=1), [(PROMPTS[2], 3, 1)])
    assert [len(completion.tokens) for completion in completions] == [1, 1, 1]


def test_text_leaves_special_tokens_out():
    from nevergiveup.models import chains_tokenizer

    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(VOCAB - 3))]
    engine = engine_of(model_of(initializer_range=0.05), tokenizer=chains_tokenizer(words), max_new_tokens=60)
    (completions,) = sample_all(engine, [(PROMPTS[0], 8, 1)])
    assert any(completion.finish == "stop" for completion in completions)
    for completion in completions:
        assert completion.text.split() == [words[token] for token in completion.tokens if token > 2]


def test_a_prompt_that_cannot_be_served_is_refused_by_name():
    engine = engine_of(model_of(), max_context=24)
    long = Prompt("too-long", tokens=(3,) * 13)
    with pytest.raises(
        ValueError, match="too-long has 13 tokens; with max_new_tokens = 12 it needs 25, more than .* 24"
    ):
        sample_all(engine, [(long, 1, 0)])
    with pytest.raises(ValueError, match="prompt empty has no tokens"):
        sample_all(engine, [(Prompt("empty"), 1, 0)])
    with pytest.raises(ValueError, match="prompt odd has token ids outside"):
        sample_all(engine, [(Prompt("odd", tokens=(VOCAB,)), 1, 0)])


def test_an_exception_in_the_model_reaches_every_caller_now_and_later():
    model = model_of()
    engine = engine_of(model, n_slots=2)

    async def main():
        waiting = [asyncio.create_task(engine.sample(prompt, 2, 0)) for prompt in PROMPTS]
        while (await engine.counters())["decode_steps"] < 2:
            await asyncio.sleep(0)
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        failed = [result for result in results if isinstance(result, Exception)]
        assert failed
        assert all(isinstance(error, InfrastructureError) and "not finite" in str(error) for error in failed)
        with pytest.raises(InfrastructureError, match="not finite"):
            await engine.sample(PROMPTS[0], 1, 0)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_cancelled_request_frees_its_slots():
    engine = engine_of(model_of(), n_slots=4, eos_ids=[], max_new_tokens=100)

    async def main():
        lost = asyncio.create_task(engine.sample(PROMPTS[0], 4, 0))
        waits = asyncio.create_task(engine.sample(PROMPTS[2], 4, 0))
        while (await engine.counters())["decode_steps"] < 3:
            await asyncio.sleep(0)
        lost.cancel()
        completions = await waits
        assert len(completions) == 4
        assert lost.cancelled()
        return await engine.counters()

    assert asyncio.run(asyncio.wait_for(main(), 20))["decode_steps"] < 150  # not 200: nobody decoded for the lost one


def test_closing_fails_who_waits():
    engine = engine_of(model_of(), eos_ids=[], max_new_tokens=100)

    async def main():
        waiting = asyncio.create_task(engine.sample(PROMPTS[0], 2, 0))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(InfrastructureError, match="closed"):
            await waiting

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_sliding_window_shorter_than_the_context_is_refused():
    model = model_of("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding window of 16 tokens, shorter than the context of 128"):
        engine_of(model)


def test_half_precision_logprobs_are_sound():
    """The reported log-prob of a bfloat16 model is computed in float32 from its logits: no coarser than these."""
    model = model_of().to(torch.bfloat16)
    answers = sample_all(engine_of(model), [(prompt, 3, 3) for prompt in PROMPTS])
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        for completion in completions:
            assert all(logprob <= 0 for logprob in completion.logprobs)
            expected = plain_logprobs(model, prompt, completion.tokens)
            gaps = [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]
            assert sum(gaps) / len(gaps) < 0.15
