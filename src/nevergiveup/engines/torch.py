"""Rollout engine for any Hugging Face causal language model, on CPU or GPU. Layer 3.

A prompt is prefilled once for all its completions. Running sequences have slots and are decoded together, over rows of a
static key/value cache; completions of a prompt share a row for as long as their tokens are the same. A slot is refilled
as soon as its sequence ends, so nobody waits for the longest. There are no threads: a pump coroutine runs one forward
pass, then yields to the event loop. The same calls in the same order give the same completions, and weights can be
swapped between any two passes.

Shape suffixes: B rows of a forward pass, N sequences sampled at once, V vocabulary.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from nevergiveup.protocols import InfrastructureError, Weights
from nevergiveup.types import Completion, Finish, Prompt, completion_seeds

Array: TypeAlias = "np.ndarray[Any, Any]"

PREFILL_TOKENS = 2048
"""Padded prompt tokens in one prefill pass at most (one prompt always fits): bounds memory and the time to the next yield."""

COLUMN_STEP = 16
"""The length of the key/value cache is a multiple of this."""

ROW_STEP = 32
"""Half precision on CPUs: rows of a decode pass are a multiple of this."""

BLOCK = 256
"""Tokens in one block of the vocabulary when sampling."""


_COUNTERS = ("completions", "tokens", "prompts", "prompt_tokens", "decode_steps", "slot_steps", "busy_s", "waiting_s")


class TorchEngine:
    """Engine (see protocols) over a causal LM that is already built, on the device and in the dtype it was given.

    model: its forward must take `input_ids, attention_mask, position_ids, cache, logits_to_keep`; full attention only.
    tokenizer: decodes `Completion.text` (special tokens left out); without one the text is empty.
    temperature: divides the logits before sampling; the returned log-probs are those of the divided logits. 0 is greedy,
        with log-probs at temperature 1.
    max_new_tokens: tokens of a completion at most, the end-of-sequence token included.
    n_slots: sequences decoded together at most.
    eos_ids: ids that end a completion; default: those of `model.generation_config`.
    version: policy version of the weights that the model holds now.
    max_context: prompt + new tokens at most; default: `max_position_embeddings` of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        temperature: float = 1.0,
        max_new_tokens: int,
        n_slots: int = 128,
        eos_ids: Sequence[int] | None = None,
        version: int = 0,
        max_context: int | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, not {temperature}")
        if max_new_tokens < 1 or n_slots < 1:
            raise ValueError(f"max_new_tokens and n_slots must be at least 1, not {max_new_tokens} and {n_slots}")
        config: Any = model.config
        self.version = version
        self.max_context: int = config.get_text_config(decoder=True).max_position_embeddings
        if max_context is not None:
            self.max_context = max_context
        AttentionInterface.register(_ATTENTION, _attend)
        _refuse_unless_servable(model, self.max_context)
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._max_new = max_new_tokens
        self._n_slots = n_slots
        self._n_vocab: int = config.get_text_config(decoder=True).vocab_size
        self._is_end_V = np.zeros(self._n_vocab, dtype=bool)
        self._is_end_V[_default_eos_ids(model) if eos_ids is None else list(eos_ids)] = True

        self._queue: deque[_Request] = deque()  # not prefilled yet, oldest first
        self._ready: deque[_Sequence] = deque()  # prefilled, first token sampled, waiting for a slot
        self._cache = _RowCache(n_slots)
        self._n_rows = 0
        # Half precision on CPUs compiles a kernel for every new shape: do with few row counts.
        self._row_step = ROW_STEP if self._device.type == "cpu" and model.dtype != torch.float32 else 1
        self._slots: Array = np.zeros(0, dtype=np.int64)  # those in use, ordered by row
        self._free = list(range(n_slots))[::-1]
        # By slot. It all lives on the host: the device gets what a pass needs, and its results are read after each.
        self._sequences: list[_Sequence | None] = [None] * n_slots
        self._row = np.zeros(n_slots, dtype=np.int64)
        self._tokens = np.zeros((n_slots, max_new_tokens), dtype=np.int64)
        self._logprobs = np.zeros((n_slots, max_new_tokens), dtype=np.float32)
        self._n_new = np.zeros(n_slots, dtype=np.int64)
        self._newest = np.zeros(n_slots, dtype=np.int64)  # the newest token, which is not in the cache yet
        self._position = np.zeros(n_slots, dtype=np.int64)  # and its position
        self._seed = np.zeros(n_slots, dtype=np.uint64)

        self._pump: asyncio.Task[None] | None = None
        self._failure: str | None = None  # why nothing can be sampled any more
        self._cause: BaseException | None = None
        self._waiting_since: float | None = time.perf_counter()
        self._counters = dict.fromkeys(_COUNTERS, 0.0)

    # The public side: all of it runs between two forward passes, because nothing here waits inside one.

    async def sample(self, prompt: Prompt, n: int, seed: int) -> list[Completion]:
        """n completions of `prompt.tokens`; completion i is drawn with `completion_seeds(seed, n)[i]` alone.

        Raises ValueError for a prompt that cannot be served (empty, too long for the context, ids outside the
        vocabulary), and InfrastructureError when the engine has failed or is closed.
        """
        if n < 1:
            raise ValueError(f"prompt {prompt.id}: n must be at least 1, not {n}")
        if not prompt.tokens:
            raise ValueError(f"prompt {prompt.id} has no tokens: encode it before it is sampled")
        if len(prompt.tokens) + self._max_new > self.max_context:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens; with max_new_tokens = {self._max_new} it needs "
                f"{len(prompt.tokens) + self._max_new}, more than the context of {self.max_context}"
            )
        if min(prompt.tokens) < 0 or max(prompt.tokens) >= self._n_vocab:
            raise ValueError(f"prompt {prompt.id} has token ids outside the model's vocabulary of {self._n_vocab}")
        if self._failure is not None:
            raise InfrastructureError(self._failure) from self._cause
        request = _Request(prompt, completion_seeds(seed, n), asyncio.get_running_loop().create_future())
        self._queue.append(request)
        if self._waiting_since is not None:
            self._counters["waiting_s"] += time.perf_counter() - self._waiting_since
            self._waiting_since = None
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(self._after_pump)
        try:
            return await request.future
        finally:
            if request.n_missing:  # the caller was cancelled, or the engine failed
                self._drop(request)

    async def load(self, weights: Weights, version: int) -> None:
        """Copy the weights into the model. Running sequences go on with the keys and values they have.

        Names and shapes must be those of the model (a tied parameter under any of its names); otherwise ValueError, and
        nothing is changed.
        """
        known = self._model.state_dict(keep_vars=True)
        if unexpected := sorted(weights.keys() - known.keys()):
            raise ValueError(f"weights have {unexpected[0]!r}, which the model does not have ({_more(unexpected)})")
        given = {id(known[name]) for name in weights}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        if missing := sorted(name for name, parameter in parameters.items() if id(parameter) not in given):
            raise ValueError(f"weights lack {missing[0]!r}, which the model has ({_more(missing)})")
        first: dict[int, str] = {}
        for name, tensor in weights.items():
            if tensor.shape != known[name].shape:
                raise ValueError(
                    f"weights have shape {tuple(tensor.shape)} for {name!r}; the model has {tuple(known[name].shape)}"
                )
            twin = first.setdefault(id(known[name]), name)
            if twin != name and not torch.equal(weights[twin], tensor):
                raise ValueError(
                    f"weights differ between {twin!r} and {name!r}, which are one tied parameter of the model"
                )
        with torch.no_grad():
            for name in first.values():
                known[name].copy_(weights[name])
        self.version = version

    async def counters(self) -> dict[str, float]:
        """Totals since the engine was built; take differences for an interval.

        tokens, completions (finished), prompts and prompt_tokens (prefilled), decode_steps, slot_steps (sum of slots in
        use over the decode steps: slot_steps / decode_steps is the mean), busy_s (in forward passes and sampling),
        waiting_s (no sequence to decode: idle), both in seconds.
        """
        counters = dict(self._counters)
        if self._waiting_since is not None:
            counters["waiting_s"] += time.perf_counter() - self._waiting_since
        return counters

    async def close(self) -> None:
        """Stop. Whoever waits for completions gets InfrastructureError."""
        self._failure = self._failure or "the rollout engine is closed"
        if self._pump is not None:
            self._pump.cancel()
        self._fail(self._failure)

    # The pump: one forward pass, then a turn for everyone else in the loop.

    async def _run(self) -> None:
        while self._queue or self._ready or len(self._slots):
            start = time.perf_counter()
            with torch.inference_mode():
                self._step()
            self._counters["busy_s"] += time.perf_counter() - start
            await asyncio.sleep(0)

    def _after_pump(self, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            self._fail("the rollout engine was stopped")
        elif (error := pump.exception()) is not None:
            self._failure, self._cause = f"the rollout engine failed: {type(error).__name__}: {error}", error
            self._fail(self._failure)
        if self._waiting_since is None:
            self._waiting_since = time.perf_counter()

    def _fail(self, reason: str) -> None:
        """Give everyone who waits an InfrastructureError; each then drops its own request."""
        begun = (*self._ready, *(self._sequences[slot] for slot in self._slots))
        for request in dict.fromkeys((*self._queue, *(sequence.request for sequence in begun if sequence))):
            if not request.future.done():
                error = InfrastructureError(reason)
                error.__cause__ = self._cause
                request.future.set_exception(error)

    def _drop(self, request: _Request) -> None:
        """Forget a request that nobody waits for any more, and free its slots."""
        if request in self._queue:
            self._queue.remove(request)
        self._ready = deque(sequence for sequence in self._ready if sequence.request is not request)
        held = [slot for slot in self._slots.tolist() if self._sequences[slot].request is request]  # type: ignore[union-attr]
        self._release(np.array(held, dtype=np.int64))

    def _release(self, slots: Array) -> None:
        self._slots = self._slots[~np.isin(self._slots, slots)]
        for slot in slots.tolist():
            self._sequences[slot] = None
            self._free.append(slot)

    # The work: prefill prompts, give sequences slots, decode one token for every slot in use.

    def _step(self) -> None:
        if self._queue and len(self._ready) < len(self._free):
            self._prefill()
        self._place()
        if len(self._slots):
            self._decode()

    def _prefill(self) -> None:
        """One pass over waiting prompts of similar length, and the first token of all their completions."""
        n_free = len(self._free) - len(self._ready)
        window = []
        for request in self._queue:
            if n_free <= 0:
                break
            window.append(request)
            n_free -= len(request.seeds)
        window.sort(key=lambda request: -len(request.prompt.tokens))
        longest = len(window[0].prompt.tokens)
        least = longest - max(16, longest // 4)
        batch = [r for r in window[: max(1, PREFILL_TOKENS // longest)] if len(r.prompt.tokens) >= least]
        for request in batch:
            self._queue.remove(request)

        prefilled, logits_BV = _prefill(self._model, [request.prompt.tokens for request in batch])
        sequences = [
            _Sequence(request, i, seed, self.version, prefilled, prompt_row)
            for prompt_row, request in enumerate(batch)
            for i, seed in enumerate(request.seeds)
        ]
        seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
        tokens_N, logprobs_N = self._draw(
            logits_BV[self._on_device([sequence.prompt_row for sequence in sequences])],
            uniforms(seeds, np.zeros_like(seeds)),
        )
        for sequence, token, logprob in zip(sequences, tokens_N.tolist(), logprobs_N.tolist(), strict=True):
            if self._is_end_V[token] or self._max_new == 1:
                self._finish(sequence, (token,), (logprob,))
            else:
                sequence.token, sequence.logprob = token, logprob
                self._ready.append(sequence)
        self._counters["prompts"] += len(batch)
        self._counters["prompt_tokens"] += sum(len(request.prompt.tokens) for request in batch)

    def _place(self) -> None:
        """Give free slots to sequences that are ready, and every slot its row: one for all sequences alike so far.

        The rows in use are the first ones. A row that is needed twice is copied, a hole is filled with the last.
        """
        old, row_of = self._slots, self._row[self._slots]
        _, first, group_of = np.unique(
            row_of * self._n_vocab + self._newest[old], return_index=True, return_inverse=True
        )
        source = row_of[first]  # ascending

        arrivals: dict[tuple[int, int, int], list[int]] = {}  # sequences alike -> their slots
        while self._ready and self._free:
            sequence, slot = self._ready.popleft(), self._free.pop()
            arrivals.setdefault((id(sequence.prefilled), sequence.prompt_row, sequence.token), []).append(slot)
            self._sequences[slot] = sequence
            self._tokens[slot, 0] = self._newest[slot] = sequence.token
            self._logprobs[slot, 0] = sequence.logprob
            self._position[slot] = len(sequence.request.prompt.tokens)
            self._seed[slot] = sequence.seed
            self._n_new[slot] = 1

        self._n_rows = len(source) + len(arrivals)
        stays = source < self._n_rows
        stays[1:] &= source[1:] != source[:-1]
        is_free = np.ones(self._n_rows, dtype=bool)
        is_free[source[stays]] = False
        free = np.flatnonzero(is_free)
        n_moves = len(source) - int(stays.sum())
        target = source.copy()
        target[~stays] = free[:n_moves]
        self._row[old] = target[group_of]
        self._cache.arrange(self._n_rows, self._on_device(source[~stays]), self._on_device(free[:n_moves]))

        groups = list(arrivals.values())
        for row, group in zip(free[n_moves:], groups, strict=True):
            self._row[group] = row
        for prefilled, same in itertools.groupby(groups, key=lambda group: self._sequences[group[0]].prefilled):  # type: ignore[union-attr]
            heads = [group[0] for group in same]
            prompt_rows = [self._sequences[slot].prompt_row for slot in heads]  # type: ignore[union-attr]
            self._cache.fill(self._on_device(self._row[heads]), prefilled, self._on_device(prompt_rows))
        slots = np.concatenate([old, np.array([slot for group in groups for slot in group], dtype=np.int64)])
        self._slots = slots[np.argsort(self._row[slots], kind="stable")]

    def _decode(self) -> None:
        """One token for every sequence that has a slot."""
        slots, n = self._slots, self._n_rows
        row_of = self._row[slots]
        # Free rows may fill up the pass; they write where nobody reads.
        tokens, position = np.zeros((2, min(-(-n // self._row_step) * self._row_step, self._n_slots)), dtype=np.int64)
        tokens[row_of], position[row_of] = self._newest[slots], self._position[slots]
        logits_BV = _decode(self._model, self._cache, tokens, position)[:n]
        logits_NV = logits_BV if n == len(slots) else logits_BV[self._on_device(row_of)]
        tokens_N, logprobs_N = self._draw(logits_NV, uniforms(self._seed[slots], self._n_new[slots]))

        drawn, n_new = tokens_N.cpu().numpy(), self._n_new[slots]
        self._newest[slots] = self._tokens[slots, n_new] = drawn
        self._logprobs[slots, n_new] = logprobs_N.cpu().numpy()
        self._n_new[slots] += 1
        self._position[slots] += 1
        self._counters["decode_steps"] += 1
        self._counters["slot_steps"] += len(slots)
        if len(ended := slots[self._is_end_V[drawn] | (n_new + 1 == self._max_new)]):
            lengths = self._n_new[ended].tolist()
            tokens_of = self._tokens[ended, : max(lengths)].tolist()
            logprobs_of = self._logprobs[ended, : max(lengths)].tolist()
            for slot, length, token_list, logprob_list in zip(
                ended.tolist(), lengths, tokens_of, logprobs_of, strict=True
            ):
                self._finish(self._sequences[slot], tuple(token_list[:length]), tuple(logprob_list[:length]))  # type: ignore[arg-type]
            self._release(ended)

    def _draw(self, logits_NV: Tensor, uniform: Array) -> tuple[Tensor, Tensor]:
        tokens_N, logprobs_N = sample_tokens(logits_NV, self._temperature, torch.from_numpy(uniform).to(self._device))
        if not logprobs_N.isfinite().all():
            raise ValueError(f"the model's logits are not finite (policy version {self.version})")
        return tokens_N, logprobs_N

    def _finish(self, sequence: _Sequence, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        request = sequence.request
        finish: Finish = "stop" if self._is_end_V[tokens[-1]] else "length"
        text = "" if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
        request.completions[sequence.index] = Completion(
            tokens, logprobs, text, finish, version_first=sequence.version_first, version_last=self.version
        )
        request.n_missing -= 1
        self._counters["completions"] += 1
        self._counters["tokens"] += len(tokens)
        if not request.n_missing and not request.future.done():
            request.future.set_result([request.completions[i] for i in range(len(request.seeds))])

    def _on_device(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self._device)


@dataclass(eq=False, slots=True)
class _Request:
    """One call of `sample`."""

    prompt: Prompt
    seeds: tuple[int, ...]
    future: asyncio.Future[list[Completion]]
    completions: dict[int, Completion] = field(default_factory=dict)
    n_missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_missing = len(self.seeds)


@dataclass(eq=False, slots=True)
class _Sequence:
    """One completion in the making. prefilled, prompt_row: where the keys and values of its prompt are."""

    request: _Request
    index: int
    seed: int
    version_first: int
    prefilled: _PromptCache
    prompt_row: int
    token: int = 0
    logprob: float = 0.0


class _PromptCache(Cache):
    """Keys and values of prefilled prompts: for each layer [prompts, heads, columns, head_dim], position = column."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.sides: list[Tensor] = []  # keys and values by turns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.sides += key_states, value_states
        return key_states, value_states


class _RowCache(Cache):
    """Keys and values of running sequences, position = column: for each layer [rows * heads, columns, head_dim].

    There are always just as many columns as the longest sequence needs now (to the next step). So attention reads whole,
    contiguous tensors, as fast batched products want them, and short sequences are cheap.
    """

    def __init__(self, n_rows: int) -> None:
        super().__init__(layers=[])
        self._n_rows = n_rows
        self._n_used = 0
        self._n_heads = 0
        self._n_columns = 0
        self._memory: list[Tensor] = []  # keys and values by turns, flat; only ever grows
        self._sides: list[Tensor] = []  # the same in its present shape

    def arrange(self, n_used: int, source: Tensor, target: Tensor) -> None:
        """Copy source rows to target rows; from now on, the first n_used rows matter."""
        self._n_used = n_used
        if len(source):
            for side in self._sides:
                by_row = side.unflatten(0, (self._n_rows, self._n_heads))
                by_row.index_copy_(0, target, by_row.index_select(0, source))

    def fill(self, rows: Tensor, prompts: _PromptCache, prompt_rows: Tensor) -> None:
        """Copy prompts into rows."""
        _, self._n_heads, n_columns, _ = prompts.sides[0].shape
        if not self._sides:
            self._memory = [side.new_zeros(0) for side in prompts.sides]
            self._sides = [side.new_zeros(self._n_rows * self._n_heads, 0, side.shape[3]) for side in prompts.sides]
        self._fit(max(n_columns, self._n_columns))
        for side, prompt_side in zip(self._sides, prompts.sides, strict=True):
            by_row = side.unflatten(0, (self._n_rows, self._n_heads))
            by_row[:, :, :n_columns].index_copy_(0, rows, prompt_side.index_select(0, prompt_rows))

    def _fit(self, n_columns: int) -> None:
        if self._n_columns // 2 < n_columns <= self._n_columns:
            return
        self._n_columns = -(-max(n_columns, n_columns * 17 // 16) // COLUMN_STEP) * COLUMN_STEP
        for i, old in enumerate(self._sides):
            shape = (old.shape[0], self._n_columns, old.shape[2])
            n_used, n_kept = self._n_used * self._n_heads, min(old.shape[1], self._n_columns)
            kept = old[:n_used, :n_kept].clone()
            if math.prod(shape) > len(self._memory[i]):
                self._memory[i] = old.new_zeros(math.prod(shape))  # not empty: NaN shines through any mask
            self._sides[i] = self._memory[i][: math.prod(shape)].view(shape)
            self._sides[i][:n_used, :n_kept] = kept

    def aim(self, position: Array, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The next pass writes row b at column position[b] of row b. Returns its additive mask [B * heads, 1, 1, columns]."""
        self._fit(int(position.max()) + 1)
        n = len(position) * self._n_heads
        targets = np.repeat(position, self._n_heads) + np.arange(0, n * self._n_columns, self._n_columns)
        self._target_N = torch.from_numpy(targets).to(device)
        masked = np.arange(self._n_columns) > position[:, None]
        mask_BC = torch.from_numpy(masked).to(device).to(dtype).mul_(torch.finfo(dtype).min)
        return mask_BC[:, None].expand(-1, self._n_heads, -1).reshape(n, 1, 1, self._n_columns)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        seen = []
        for side, new in zip(self._sides[2 * layer_idx : 2 * layer_idx + 2], (key_states, value_states), strict=True):
            side.view(-1, new.shape[3]).index_copy_(0, self._target_N, new.reshape(-1, new.shape[3]))
            seen.append(side[: len(self._target_N)])
        return seen[0], seen[1]


def _prefill(model: Any, prompts: Sequence[Sequence[int]]) -> tuple[_PromptCache, Tensor]:
    """Keys and values of the prompts, and the logits [B, V] after the last token of each."""
    longest, cache = max(map(len, prompts)), _PromptCache()
    padded = [(*prompt, *(0,) * (longest - len(prompt))) for prompt in prompts]
    # Padding is on the right, where causal attention never looks; its keys are overwritten or masked later.
    output = model(
        input_ids=torch.tensor(padded, device=model.device),
        position_ids=torch.arange(longest, device=model.device)[None],
        cache=cache,
        use_cache=True,
        logits_to_keep=torch.tensor([[len(prompt) - 1] for prompt in prompts], device=model.device),
    )
    return cache, output.logits[:, 0]


def _decode(model: Any, cache: _RowCache, tokens: Array, position: Array) -> Tensor:
    """Logits [B, V] after one more token for each of the first B rows: its id, and its position."""
    config = model.config.get_text_config(decoder=True)
    usual, config._attn_implementation = config._attn_implementation, _ATTENTION
    try:
        output = model(
            input_ids=torch.from_numpy(tokens[:, None]).to(model.device),
            attention_mask=cache.aim(position, model.device, model.dtype),
            position_ids=torch.from_numpy(position[:, None]).to(model.device),
            cache=cache,
            use_cache=True,
        )
    finally:
        config._attn_implementation = usual
    return output.logits[:, -1]


_ATTENTION = "nevergiveup_decode"
_HARMLESS = {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "output_attentions"}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one new token a row, as two batched products: on CPUs several times faster than the fused kernels.

    query [B, heads, 1, dim]; key, value [B * key heads, columns, dim] and mask as _RowCache gives them.
    """
    if unknown := [name for name, option in options.items() if option is not None and name not in _HARMLESS]:
        raise ValueError(f"the model asks for attention with {unknown[0]!r}, which the engine does not offer")
    n, _, _, head_dim = query.shape
    query = query.reshape(key.shape[0], -1, head_dim)  # the query heads of one key head side by side
    scores = torch.baddbmm(attention_mask[:, 0], query, key.transpose(1, 2), alpha=scaling)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights, value).view(n, 1, -1, value.shape[2]), None


def uniforms(seeds: Array, index: Array) -> Array:
    """One number of [0, 1) (float64, 53 bits) for each pair of seed and token index, independent of all others.

    Counter-based: it depends on nothing else. Two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014,
    doi 10.1145/2660193.2660195), the index entering between them.
    """
    keys = _mix(seeds.astype(np.uint64)) + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_tokens(logits_NV: Tensor, temperature: float, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row and its natural log-probability (float32), by inverting the cumulative distribution.

    Temperature 0 takes the most likely token, with its log-probability at temperature 1. The arithmetic is float32 with
    float64 sums, whatever the logits are. Logits that are not finite give a log-probability that is not.
    """
    logits_NV = logits_NV.float()
    if temperature not in (0, 1):
        logits_NV = logits_NV / temperature
    weights_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)).exp_()
    if temperature == 0:
        token_N1, total_N1 = logits_NV.argmax(-1, keepdim=True), weights_NV.sum(-1, keepdim=True, dtype=torch.float64)
    elif (n_vocab := weights_NV.shape[1]) <= BLOCK:
        token_N1, sums_NV, _ = _search(weights_NV, uniform_N[:, None])
        total_N1 = sums_NV[:, -1:]
    else:  # first a block of the vocabulary, then a token in it: one pass over all weights instead of several
        blocks = F.pad(weights_NV, (0, -n_vocab % BLOCK)).unflatten(1, (-1, BLOCK))
        block_N1, sums_NV, target_N1 = _search(blocks.sum(-1), uniform_N[:, None])
        total_N1 = sums_NV[:, -1:]
        below_N1 = F.pad(sums_NV, (1, 0)).gather(1, block_N1)
        share_N1 = (target_N1 - below_N1) / (sums_NV.gather(1, block_N1) - below_N1)
        within_N1, _, _ = _search(
            blocks.take_along_dim(block_N1[:, :, None], 1)[:, 0], share_N1.clamp_(0, 1 - 2.0**-53)
        )
        token_N1 = (block_N1 * BLOCK + within_N1).clamp_(max=n_vocab - 1)
    return token_N1[:, 0], (weights_NV.gather(1, token_N1) / total_N1).log()[:, 0].float()


def _search(weights_NV: Tensor, share_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index where the running sum of each row first exceeds a share [0, 1) of its total, which is never an index of
    weight 0; the running sums; and the share as a sum."""
    sums_NV = weights_NV.cumsum(-1, dtype=torch.float64)
    target_N1 = share_N1 * sums_NV[:, -1:]
    index_N1 = torch.searchsorted(sums_NV, target_N1, right=True)
    return index_N1.clamp_(max=weights_NV.shape[1] - 1), sums_NV, target_N1  # with NaN it runs off the end


def _more(names: Sequence[str]) -> str:
    return "the only one" if len(names) == 1 else f"the first of {len(names)}"


def _default_eos_ids(model: Any) -> list[int]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _refuse_unless_servable(model: Any, max_context: int) -> None:
    """ValueError unless the keys and values of past tokens are all the state of the model, and plain attention its use."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    needed = {"input_ids", "attention_mask", "position_ids", "cache", "logits_to_keep"}
    if not (
        needed <= set(inspect.signature(model.forward).parameters)
        and model._supports_attention_backend
        and not model.config.is_encoder_decoder
        and not getattr(model, "_is_stateful", False)
    ):
        raise ValueError(
            f"{name} cannot be served: the engine needs a decoder-only model with a key/value cache, positions as an "
            "argument, and attention through transformers' AttentionInterface"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} uses attention {config._attn_implementation!r}: load it with attn_implementation='sdpa' or 'eager'"
        )
    for kind, options in zip(*get_layer_types_and_kwargs(config), strict=True):
        if kind == "sliding_attention" and options["sliding_window"] < max_context:
            raise ValueError(
                f"{name} has a sliding window of {options['sliding_window']} tokens, shorter than the context of "
                f"{max_context}: set max_context to at most {options['sliding_window']}"
            )
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"{name} has layers of type {kind!r}; the engine can serve full attention only")
    _try_out(model)


@torch.inference_mode()
def _try_out(model: Any) -> None:
    """ValueError unless two prompts of different lengths and one more token give what a plain forward pass gives."""
    tokens = torch.linspace(0.3, 0.6, 6).mul(model.config.get_text_config(decoder=True).vocab_size).long().tolist()
    cuts = [5, 2]
    cache, rows = _RowCache(2), torch.arange(2, device=model.device)
    prefilled, _ = _prefill(model, [tokens[:cut] for cut in cuts])
    cache.arrange(2, rows[:0], rows[:0])
    cache.fill(rows, prefilled, rows)
    ours_BV = _decode(model, cache, np.array([tokens[cut] for cut in cuts]), np.array(cuts))
    plain_BV = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0, cuts]
    error, spread = (ours_BV - plain_BV).abs().max().item(), (plain_BV.amax() - plain_BV.amin()).item()
    tolerance = 0.01 if model.dtype == torch.float32 else 0.25  # half precision is that coarse on odd inputs
    if not error <= tolerance * spread:
        raise ValueError(
            f"{type(model).__name__} cannot be served: with the key/value cache its logits are off by {error:.2g} "
            f"(they span {spread:.2g})"
        )
