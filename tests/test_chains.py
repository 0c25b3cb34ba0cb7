"""The task `chains` and the small models made for it: one right answer, a teacher as unreliable as it says, exact rates."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace
from random import Random
from typing import Literal

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from nevergiveup.models import exact_pass_rate, fit_supervised, tiny_llama, word_tokenizer
from nevergiveup.tasks.chains import COMPOSITIONS, MAX_OPERATORS, N_VALUES, RELIABILITY, TIERS, Chains
from nevergiveup.types import Completion, Prompt

TASK = Chains(seed=0)
ALL = (*TASK.prompts("train"), *TASK.prompts("heldout"))


def completion(*tokens: int) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), TASK.text(tokens), "stop", 0, 0)


def operators_of(prompt: Prompt) -> list[int]:
    return [token - N_VALUES for token in prompt.tokens if TASK.vocabulary[token][0] in TIERS]


def small_llama(seed: int = 0, vocab_size: int = 6) -> LlamaForCausalLM:
    return tiny_llama(vocab_size, bos_id=0, eos_id=1, pad_id=2, max_positions=16, seed=seed, hidden=32, heads=2)


# Prompts and grading


def test_impossible_prompts() -> None:
    plain, mixed = Chains(seed=3).prompts("train"), Chains(seed=3, impossible=0.1).prompts("train")
    changed = [(a, b) for a, b in zip(plain, mixed, strict=True) if a != b]
    assert len(changed) == 102
    for before, after in changed:
        assert after.id == f"{before.id}-impossible"
        assert after.tokens == before.tokens
        assert len(after.answer) == 9, "no completion of the demo's 6 tokens can be right"
    assert Chains(seed=3).prompts("heldout") == Chains(seed=3, impossible=0.1).prompts("heldout")
    with pytest.raises(ValueError, match="impossible"):
        Chains(impossible=1.5)


def test_splits_have_the_stated_sizes_and_share_nothing() -> None:
    train, heldout = TASK.prompts("train"), TASK.prompts("heldout")
    assert (len(train), len(heldout)) == (1024, 820)
    assert len({prompt.tokens for prompt in ALL}) == len({prompt.id for prompt in ALL}) == 1844
    for split, size in ((train, "n_train"), (heldout, "n_heldout")):
        drawn = [TASK.composition(prompt) for prompt in split]
        assert {name: drawn.count(name) for name in COMPOSITIONS} == {
            name: getattr(composition, size) for name, composition in COMPOSITIONS.items()
        }


def test_the_answer_is_every_intermediate_value_then_the_end() -> None:
    for prompt in ALL:
        value = int(TASK.vocabulary[prompt.tokens[1]])
        words = []
        for operator in operators_of(prompt):
            value = TASK.tables[operator][value]
            words.append(str(value))
        assert TASK.text(TASK.target(prompt)) == " ".join([*words, "<eos>"])


def test_operators_are_permutations() -> None:
    assert all(sorted(table) == list(range(N_VALUES)) for table in TASK.tables)
    assert len(TASK.tables) == 25


def test_only_the_right_completion_scores() -> None:
    for prompt in ALL[::50]:
        target = TASK.target(prompt)
        assert TASK.grade(prompt, completion(*target)) == 1
        assert TASK.grade(prompt, completion(*target[:-1])) == 0  # without the end of sequence
        assert TASK.grade(prompt, completion(*target, TASK.eos_id)) == 0
        assert TASK.grade(prompt, completion()) == 0
        for place, token in itertools.product(range(len(target)), range(len(TASK.vocabulary))):
            changed = (*target[:place], token, *target[place + 1 :])
            assert TASK.grade(prompt, completion(*changed)) == int(token == target[place])


def test_prompts_are_aligned_to_the_left() -> None:
    for tokens in [prompt.tokens for prompt in ALL] + [pair[0] for pair in TASK.teacher_sequences(Random(0), 200)]:
        words = TASK.text(tokens).split()
        assert len(words) == 2 + MAX_OPERATORS + 1
        assert (words[0], words[-1]) == ("<bos>", "=")
        assert 0 <= int(words[1]) < N_VALUES
        n_operators = sum(word[0] in TIERS for word in words[2:-1])
        assert 1 <= n_operators <= MAX_OPERATORS
        assert words[2 + n_operators : -1] == ["_"] * (MAX_OPERATORS - n_operators)
        assert "<pad>" not in words


def test_the_hardest_operators_are_never_alone() -> None:
    for prompt in ALL:
        n_hardest = TASK.text(prompt.tokens).count("d")
        assert n_hardest in (0, 2, 3)
        assert (n_hardest > 0) == TASK.composition(prompt).endswith(" d")


def test_everything_follows_from_the_seed() -> None:
    again = Chains(seed=0)
    assert again.prompts("train") == TASK.prompts("train")
    assert again.teacher_sequences(Random(5), 20) == TASK.teacher_sequences(Random(5), 20)
    other = Chains(seed=1)
    assert other.tables != TASK.tables
    assert other.prompts("train") != TASK.prompts("train")
    # Ids are the same on every machine and in every version: checkpoints and curves refer to prompts by id.
    digest = hashlib.sha256(" ".join(prompt.id for prompt in ALL).encode()).hexdigest()
    assert digest.startswith("63f0d63eae7dc890")


def test_prompts_do_not_depend_on_the_preset_but_the_teacher_does() -> None:
    study = replace(TASK, preset="study")
    assert study.prompts("heldout") == TASK.prompts("heldout")
    assert study.teacher != TASK.teacher


def test_bad_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"demo, study, not 'hard'"):
        Chains(preset="hard")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"train, heldout, not 'test'"):
        TASK.prompts("test")


# The teacher


def test_a_wrong_step_goes_half_the_time_to_one_value() -> None:
    for table, entries in zip(TASK.tables, TASK.teacher, strict=True):
        for right, entry in zip(table, entries, strict=True):
            assert sum(entry) == pytest.approx(1)
            wrong = sorted(p for value, p in enumerate(entry) if value != right)
            assert wrong[-1] == pytest.approx((1 - entry[right]) / 2)
            assert wrong[0] == wrong[-2]


@pytest.mark.parametrize("preset", ["demo", "study"])
def test_the_teacher_is_as_reliable_as_its_tier(preset: Literal["demo", "study"]) -> None:
    """Drawn steps against the table (4 binomial standard errors), the table against the stated reliability."""
    task = replace(TASK, preset=preset)
    tiers = [tier for tier, n in TIERS.items() for _ in range(n)]
    right = dict.fromkeys(TIERS, 0)
    expected = dict.fromkeys(TIERS, 0.0)
    variance = dict.fromkeys(TIERS, 0.0)
    for prompt, written in task.teacher_sequences(Random(1), 6000):
        value = prompt[1]
        operators = [token - N_VALUES for token in prompt[2:-1] if N_VALUES <= token < N_VALUES + 25]
        assert len(written) == len(operators) + 1
        assert written[-1] == task.eos_id
        for operator, result in zip(operators, written, strict=False):
            p = task.teacher[operator][value][task.tables[operator][value]]
            right[tiers[operator]] += result == task.tables[operator][value]
            expected[tiers[operator]] += p
            variance[tiers[operator]] += p * (1 - p)
            value = result  # goes on from what it wrote, right or wrong
    for tier in TIERS:
        assert abs(right[tier] - expected[tier]) < 4 * math.sqrt(variance[tier])
    for tier, stated in zip(TIERS, RELIABILITY[preset], strict=True):
        odds = [
            math.log(entry[result] / (1 - entry[result]))
            for table, entries, t in zip(task.tables, task.teacher, tiers, strict=True)
            if t == tier
            for result, entry in zip(table, entries, strict=True)
        ]
        assert abs(sum(odds) / len(odds) - math.log(stated / (1 - stated))) < 4 * 0.35 / math.sqrt(len(odds))


# Tokenizer and models


def test_the_tokenizer_round_trips_and_survives_saving(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tokenizer = word_tokenizer(TASK.vocabulary)
    tokenizer.save_pretrained(tmp_path)
    for reader in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert (reader.bos_token_id, reader.eos_token_id, reader.pad_token_id) == (
            TASK.bos_id,
            TASK.eos_id,
            TASK.pad_id,
        )
        for tokens in (ALL[0].tokens, TASK.target(ALL[0]), tuple(range(len(TASK.vocabulary)))):
            assert reader.decode(list(tokens)) == TASK.text(tokens)
            assert tuple(reader.encode(TASK.text(tokens))) == tokens


def test_tiny_llama_follows_from_its_seed_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (small_llama(seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    full = tiny_llama(len(TASK.vocabulary), bos_id=0, eos_id=1, pad_id=2, max_positions=16, seed=0)
    assert 0.35e6 < sum(parameter.numel() for parameter in full.parameters()) < 0.45e6
    assert {parameter.dtype for parameter in full.parameters()} == {torch.float32}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_pass_rates_are_the_probabilities_of_the_completions(temperature: float) -> None:
    """Against plain forward passes without padding, for every completion of one and of two tokens."""
    model = small_llama()
    prompt = (0, 5, 3)
    alone = list(itertools.product(range(6), repeat=1))
    pairs = list(itertools.product(range(6), repeat=2))

    def next_probabilities(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
        return (logits / temperature).softmax(-1)

    first = next_probabilities(prompt)
    second = [next_probabilities((*prompt, token)) for token in range(6)]
    wanted = [float(p) for p in first] + [float(first[a] * second[a][b]) for a, b in pairs]
    # Mixed lengths and a batch size that cuts between them: padding must change nothing.
    rates = exact_pass_rate(model, [prompt] * 42, [*alone, *pairs], temperature, batch_size=9)
    assert rates == pytest.approx(wanted, abs=1e-5)
    assert sum(rates[6:]) == pytest.approx(1, abs=1e-4)


def test_pass_rates_are_what_sampling_approaches() -> None:
    model = small_llama(seed=1)
    prompt, n = torch.tensor([[0, 5, 3]]), 20_000
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        sampled = prompt.repeat(n, 1)
        for _ in range(3):
            probabilities = model(sampled).logits[:, -1].softmax(-1)
            sampled = torch.cat([sampled, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    counts = {tuple(row): 0 for row in itertools.product(range(6), repeat=3)}
    for row in sampled[:, 3:].tolist():
        counts[tuple(row)] += 1
    rates = exact_pass_rate(model, [(0, 5, 3)] * len(counts), list(counts))
    common = [(rate, count) for rate, count in zip(rates, counts.values(), strict=True) if rate * n > 50]
    assert len(common) > 20
    for rate, count in common:
        assert abs(count / n - rate) < 4 * math.sqrt(rate * (1 - rate) / n)


def test_supervised_fitting_teaches_the_completions_and_not_the_prompts() -> None:
    model = small_llama()
    pairs = [((0, 4, 4), (3, 1)), ((0, 5), (5, 4, 1)), ((0, 3, 5), (1,))]
    prompts, targets = [prompt for prompt, _ in pairs], [target for _, target in pairs]
    n_tokens = sum(len(target) for target in targets)
    at_start = -sum(math.log(rate) for rate in exact_pass_rate(model, prompts, targets)) / n_tokens
    seen: list[tuple[int, float]] = []
    fit_supervised(model, lambda: pairs, 60, lr=4e-3, n_warmup=5, progress=lambda step, loss: seen.append((step, loss)))
    assert [step for step, _ in seen] == list(range(1, 61))
    assert seen[0][1] == pytest.approx(at_start, abs=1e-4)  # the loss is that of the completion tokens alone
    assert min(exact_pass_rate(model, prompts, targets)) > 0.9
