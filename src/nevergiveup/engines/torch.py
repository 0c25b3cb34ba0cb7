"""Rollout engine for any Hugging Face causal language model, on CPU or GPU. Layer 3.

A prompt is prefilled once for all its completions. Running sequences sit in slots of a static key/value cache and are
decoded together; a slot is refilled as soon as its sequence ends, so nobody waits for the longest. There are no
threads: a pump coroutine runs one forward pass, then yields to the event loop. The same calls in the same order give
the same completions, and weights can be swapped between any two passes.

Shape suffixes: B rows of a forward pass, N completions sampled at once, L prompt tokens (padded), V vocabulary.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache, get_layer_types_and_kwargs

from nevergiveup.protocols import InfrastructureError, Weights
from nevergiveup.types import Completion, Finish, Prompt, completion_seeds

PREFILL_TOKENS = 2048
"""Padded prompt tokens in one prefill pass at most (one prompt always fits): bounds memory and the time to the next yield."""

COLUMN_STEP = 16
"""The length of the key/value cache is a multiple of this."""

ROW_STEP = 16
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
        self._running: list[_Sequence | None] = [None] * n_slots
        self._n_running = 0
        self._cache = _SlotCache(n_slots)
        # Half precision on CPUs compiles a kernel for every new shape: do with few row counts.
        self._row_step = ROW_STEP if self._device.type == "cpu" and model.dtype != torch.float32 else 1
        # By slot, on the device: newest token (not yet in the cache), its position, index among the new, seed.
        self._token_B = torch.zeros(n_slots, dtype=torch.long, device=self._device)
        self._position_B = torch.zeros_like(self._token_B)
        self._index_B = torch.zeros_like(self._token_B)
        self._seed_B = torch.zeros_like(self._token_B)
        # By slot, on the host: everything sampled so far, and the position again.
        self._tokens = np.zeros((n_slots, max_new_tokens), dtype=np.int64)
        self._logprobs = np.zeros((n_slots, max_new_tokens), dtype=np.float32)
        self._n_new = np.zeros(n_slots, dtype=np.int64)
        self._position = np.zeros(n_slots, dtype=np.int64)

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
        while self._queue or self._ready or self._n_running:
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
        running = (sequence.request for sequence in (*self._ready, *self._running) if sequence is not None)
        for request in dict.fromkeys((*self._queue, *running)):
            if not request.future.done():
                error = InfrastructureError(reason)
                error.__cause__ = self._cause
                request.future.set_exception(error)

    def _drop(self, request: _Request) -> None:
        """Forget a request that nobody waits for any more, and free its slots."""
        if request in self._queue:
            self._queue.remove(request)
        self._ready = deque(sequence for sequence in self._ready if sequence.request is not request)
        for slot, sequence in enumerate(self._running):
            if sequence is not None and sequence.request is request:
                self._running[slot] = None
                self._n_running -= 1

    # The work: prefill prompts, give sequences slots, decode one token for every slot in use.

    def _step(self) -> None:
        if self._queue and len(self._ready) < self._n_slots - self._n_running:
            self._prefill()
        self._place()
        if self._n_running:
            self._decode()

    def _prefill(self) -> None:
        """One pass over waiting prompts of similar length, and the first token of all their completions."""
        n_free = self._n_slots - self._n_running - len(self._ready)
        window = []
        for request in self._queue:
            if n_free <= 0:
                break
            window.append(request)
            n_free -= len(request.seeds)
        window.sort(key=lambda request: -len(request.prompt.tokens))
        longest = len(window[0].prompt.tokens)
        least = longest - max(COLUMN_STEP, longest // 4)
        batch = [r for r in window[: max(1, PREFILL_TOKENS // longest)] if len(r.prompt.tokens) >= least]
        for request in batch:
            self._queue.remove(request)

        prefilled, logits_BV = _prefill(self._model, [request.prompt.tokens for request in batch])
        sequences = [
            _Sequence(request, i, seed, self.version, prefilled, row)
            for row, request in enumerate(batch)
            for i, seed in enumerate(request.seeds)
        ]
        seed_N = self._on_device([sequence.seed for sequence in sequences])
        logits_NV = logits_BV[self._on_device([sequence.row for sequence in sequences])]
        tokens_N, logprobs_N = sample_tokens(logits_NV, self._temperature, uniforms(seed_N, torch.zeros_like(seed_N)))
        for sequence, token, logprob in zip(sequences, tokens_N.tolist(), logprobs_N.tolist(), strict=True):
            if self._is_end_V[token] or self._max_new == 1:
                self._finish(sequence, (token,), (logprob,))
            else:
                sequence.token, sequence.logprob = token, logprob
                self._ready.append(sequence)
        self._counters["prompts"] += len(batch)
        self._counters["prompt_tokens"] += sum(len(request.prompt.tokens) for request in batch)

    def _place(self) -> None:
        """Give free slots to sequences that are ready: their prompt's keys and values are copied into the slot."""
        free = [slot for slot, sequence in enumerate(self._running) if sequence is None] if self._ready else []
        placed = [(slot, self._ready.popleft()) for slot in free[: len(self._ready)]]
        if not placed:
            return
        for slot, sequence in placed:
            self._running[slot] = sequence
            n_prompt = len(sequence.request.prompt.tokens)
            self._tokens[slot, 0], self._logprobs[slot, 0] = sequence.token, sequence.logprob
            self._n_new[slot], self._position[slot] = 1, n_prompt
        self._n_running += len(placed)
        slots = self._on_device([slot for slot, _ in placed])
        self._token_B[slots] = self._on_device([sequence.token for _, sequence in placed])
        self._seed_B[slots] = self._on_device([sequence.seed for _, sequence in placed])
        self._position_B[slots] = self._on_device([len(sequence.request.prompt.tokens) for _, sequence in placed])
        self._index_B[slots] = 1
        for prefilled, group in itertools.groupby(placed, key=lambda pair: pair[1].prefilled):
            pairs = list(group)
            self._cache.fill(
                self._on_device([slot for slot, _ in pairs]),
                prefilled,
                self._on_device([sequence.row for _, sequence in pairs]),
            )

    def _close_ranks(self) -> None:
        """Move the last sequences into holes, so that the slots in use are the first ones."""
        n = self._n_running
        holes = [slot for slot in range(n) if self._running[slot] is None]
        if not holes:
            return
        movers = [slot for slot in range(n, self._n_slots) if self._running[slot] is not None]
        for hole, mover in zip(holes, movers, strict=True):
            self._running[hole], self._running[mover] = self._running[mover], None
        for array in (self._tokens, self._logprobs, self._n_new, self._position):
            array[holes] = array[movers]
        to, source = self._on_device(holes), self._on_device(movers)
        for state in (self._token_B, self._position_B, self._index_B, self._seed_B):
            state[to] = state[source]
        self._cache.move(source, to)

    def _decode(self) -> None:
        """One token for every sequence that has a slot."""
        self._close_ranks()
        n = self._n_running
        self._cache.fit(int(self._position[:n].max()) + 1)
        n_rows = min(-(-n // self._row_step) * self._row_step, self._n_slots)
        self._position_B[n:n_rows] = 0  # free slots that only fill up the pass: they may write where nobody reads
        logits_BV = _decode(self._model, self._cache, self._token_B[:n_rows], self._position_B[:n_rows])[:n]
        tokens_B, logprobs_B = sample_tokens(
            logits_BV, self._temperature, uniforms(self._seed_B[:n], self._index_B[:n])
        )
        self._token_B[:n] = tokens_B
        self._position_B[:n] += 1
        self._index_B[:n] += 1

        tokens, slots = tokens_B.cpu().numpy(), np.arange(n)
        self._tokens[slots, self._n_new[:n]] = tokens
        self._logprobs[slots, self._n_new[:n]] = logprobs_B.cpu().numpy()
        self._n_new[:n] += 1
        self._position[:n] += 1
        self._counters["decode_steps"] += 1
        self._counters["slot_steps"] += n
        for slot in np.flatnonzero(self._is_end_V[tokens] | (self._n_new[:n] == self._max_new)).tolist():
            sequence, n_new = self._running[slot], self._n_new[slot]
            assert sequence is not None
            self._running[slot] = None
            self._n_running -= 1
            self._finish(
                sequence, tuple(self._tokens[slot, :n_new].tolist()), tuple(self._logprobs[slot, :n_new].tolist())
            )

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
        return torch.tensor(values, dtype=torch.long, device=self._device)


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
    """One completion in the making. prefilled, row: where the keys and values of its prompt are."""

    request: _Request
    index: int
    seed: int
    version_first: int
    prefilled: DynamicCache
    row: int
    token: int = 0
    logprob: float = 0.0


class _SlotCache(Cache):
    """Keys and values of the running sequences, position = column; for each layer [slots * heads, columns, head_dim].

    There are always just as many columns as the longest sequence needs now (to the next step): attention reads whole,
    contiguous tensors, which batched products need to be fast, and short sequences are cheap.
    """

    def __init__(self, n_slots: int) -> None:
        super().__init__(layers=[])
        self._n_slots = n_slots
        self._n_heads = 0
        self._n_columns = 0
        self._sides: tuple[list[Tensor], list[Tensor]] = ([], [])  # keys, values

    def fit(self, n_columns: int) -> None:
        """Make room for n_columns; give room back when less than half is needed."""
        if self._n_columns // 2 < n_columns <= self._n_columns:
            return
        self._n_columns = -(-max(n_columns, n_columns * 17 // 16) // COLUMN_STEP) * COLUMN_STEP
        for side in self._sides:
            for i, old in enumerate(side):
                n_kept = min(old.shape[1], self._n_columns)
                # Zeros, not empty: a masked NaN would still be a NaN.
                side[i] = old.new_zeros(old.shape[0], self._n_columns, old.shape[2])
                side[i][:, :n_kept] = old[:, :n_kept]

    def fill(self, slots: Tensor, prefilled: DynamicCache, rows: Tensor) -> None:
        """Copy the given rows of a prefilled cache into slots."""
        n = prefilled.get_seq_length()
        if not self._n_heads:
            self._n_heads = prefilled.layers[0].keys.shape[1]
            for side, name in zip(self._sides, ("keys", "values"), strict=True):
                for layer in prefilled.layers:
                    _, n_heads, _, head_dim = getattr(layer, name).shape
                    side.append(getattr(layer, name).new_zeros(self._n_slots * n_heads, 0, head_dim))
        self.fit(max(n, self._n_columns))
        for side, name in zip(self._sides, ("keys", "values"), strict=True):
            for i, layer in enumerate(prefilled.layers):
                by_slot = side[i].unflatten(0, (self._n_slots, self._n_heads))
                by_slot[slots, :, :n] = getattr(layer, name)[rows]

    def move(self, source: Tensor, to: Tensor) -> None:
        for side in self._sides:
            for one in side:
                by_slot = one.unflatten(0, (self._n_slots, self._n_heads))
                by_slot[to] = by_slot[source]

    def aim(self, position_B: Tensor, dtype: torch.dtype) -> Tensor:
        """The next pass writes row b at column position_B[b] of slot b. Returns its additive mask [B * heads, 1, 1, columns]."""
        n = len(position_B) * self._n_heads
        position_N = position_B.repeat_interleave(self._n_heads)
        self._target_N = torch.arange(0, n * self._n_columns, self._n_columns, device=position_B.device) + position_N
        is_ahead = torch.arange(self._n_columns, device=position_B.device) > position_N[:, None]
        return (is_ahead.to(dtype) * torch.finfo(dtype).min)[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        seen = []
        for side, new in zip(self._sides, (key_states, value_states), strict=True):
            all_slots, head_dim = side[layer_idx], new.shape[3]
            all_slots.view(-1, head_dim).index_copy_(0, self._target_N, new.reshape(-1, head_dim))
            seen.append(all_slots[: len(self._target_N)])
        return seen[0], seen[1]


def _prefill(model: Any, prompts: Sequence[Sequence[int]]) -> tuple[DynamicCache, Tensor]:
    """Keys and values of the prompts, and the logits [B, V] after the last token of each."""
    device, longest = model.device, max(map(len, prompts))
    padded = [(*prompt, *(0,) * (longest - len(prompt))) for prompt in prompts]
    prefilled = DynamicCache()
    # Padding is on the right, where causal attention never looks; its keys are overwritten or masked later.
    output = model(
        input_ids=torch.tensor(padded, device=device),
        position_ids=torch.arange(longest, device=device)[None],
        cache=prefilled,
        use_cache=True,
        logits_to_keep=torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device),
    )
    return prefilled, output.logits[:, 0]


def _decode(model: Any, cache: _SlotCache, token_B: Tensor, position_B: Tensor) -> Tensor:
    """Logits [B, V] after one more token for each of the first B slots."""
    config = model.config.get_text_config(decoder=True)
    usual, config._attn_implementation = config._attn_implementation, _ATTENTION
    try:
        output = model(
            input_ids=token_B[:, None],
            attention_mask=cache.aim(position_B, model.dtype),
            position_ids=position_B[:, None],
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
    """Attention of one new token a sequence: two batched products, which on CPUs are several times faster than the fused kernels.

    query [B, heads, 1, dim]; key, value [B * key heads, columns, dim] and mask as _SlotCache gives them.
    """
    if unknown := [name for name, option in options.items() if option is not None and name not in _HARMLESS]:
        raise ValueError(f"the model asks for attention with {unknown[0]!r}, which the engine does not offer")
    n, _, _, head_dim = query.shape
    query = query.reshape(key.shape[0], -1, head_dim)  # the query heads of one key head side by side
    scores = torch.baddbmm(attention_mask[:, 0], query, key.transpose(1, 2), alpha=scaling)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights, value).view(n, 1, -1, value.shape[2]), None


def uniforms(seed_N: Tensor, index_N: Tensor) -> Tensor:
    """One number of [0, 1) (float64, 53 bits) for each pair of seed and token index (int64), independent of all others.

    Counter-based, so it depends on nothing else: two rounds of the splitmix64 finaliser (Steele et al. 2014,
    doi 10.1145/2714064.2660195), the index entering between them. int64 products wrap, as they must.
    """
    hash_N = _mix(_mix(seed_N) + (index_N + 1) * _signed(0x9E3779B97F4A7C15))
    return _shift(hash_N, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift of 64 unsigned bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def sample_tokens(logits_NV: Tensor, temperature: float, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row and its natural log-probability (float32), by inverting the cumulative distribution.

    Temperature 0 takes the most likely token, with its log-probability at temperature 1.
    """
    logits_NV = logits_NV.float()
    if temperature not in (0, 1):
        logits_NV = logits_NV / temperature
    top_N1 = logits_NV.amax(-1, keepdim=True)
    weights_NV = (logits_NV - top_N1).exp_()
    if (n_vocab := weights_NV.shape[1]) <= BLOCK:
        total_N = weights_NV.sum(-1, dtype=torch.float64)
        tokens_N, _ = _invert(weights_NV, uniform_N * total_N)
    else:  # first a block of the vocabulary, then a token in it: one pass over all weights instead of three
        blocks = F.pad(weights_NV, (0, -n_vocab % BLOCK)).unflatten(1, (-1, BLOCK))
        sums = blocks.sum(-1)
        total_N = sums.sum(-1, dtype=torch.float64)
        block_N, rest_N = _invert(sums, uniform_N * total_N)
        within_N, _ = _invert(blocks[torch.arange(len(blocks), device=blocks.device), block_N], rest_N)
        tokens_N = block_N * BLOCK + within_N
    if temperature == 0:
        tokens_N = logits_NV.argmax(-1)
    tokens_N = tokens_N.clamp_(max=n_vocab - 1)  # NaN ends here; the caller looks at the log-probability
    logprobs_N = logits_NV.gather(1, tokens_N[:, None])[:, 0] - top_N1[:, 0] - total_N.log().float()
    return tokens_N, logprobs_N


def _invert(weights_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Index where the running sum (float64) of each row first exceeds the target, and what is left of the target there.

    An index of weight 0 is never returned.
    """
    cumulative_NV = weights_NV.cumsum(-1, dtype=torch.float64)
    target_N1 = torch.minimum(target_N[:, None], cumulative_NV[:, -1:] * (1 - 2.0**-53))
    index_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True)
    before_N1 = F.pad(cumulative_NV, (1, 0)).gather(1, index_N1)
    return index_N1[:, 0], (target_N1 - before_N1)[:, 0]


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
    cache, slots = _SlotCache(2), torch.arange(2, device=model.device)
    prefilled, _ = _prefill(model, [tokens[:cut] for cut in cuts])
    cache.fill(slots, prefilled, slots)
    cache.fit(max(cuts) + 1)
    next_B = torch.tensor([tokens[cut] for cut in cuts], device=model.device)
    ours_BV = _decode(model, cache, next_B, torch.tensor(cuts, device=model.device))
    plain_BV = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0, cuts]
    error, spread = (ours_BV - plain_BV).abs().max().item(), (plain_BV.amax() - plain_BV.amin()).item()
    tolerance = 0.01 if model.dtype == torch.float32 else 0.25  # half precision is that coarse on odd inputs
    if not error <= tolerance * spread:
        raise ValueError(
            f"{type(model).__name__} cannot be served: with the key/value cache its logits are off by {error:.2g} "
            f"(they span {spread:.2g})"
        )
