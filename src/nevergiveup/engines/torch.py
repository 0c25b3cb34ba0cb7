"""Rollout engine for any Hugging Face causal language model, on CPU or GPU. Layer 3.

A prompt is prefilled once for all its completions. Running sequences have slots and are decoded together, over rows of a
static key/value cache; completions of a prompt share a row for as long as their tokens are the same. A slot is refilled
as soon as its sequence ends, so nobody waits for the longest. There are no threads: a pump coroutine runs one forward
pass, then yields to the event loop. The same calls in the same order give the same completions, and weights can be
swapped between any two passes.

Shapes: B rows of a forward pass, N sequences sampled at once, V vocabulary.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nevergiveup.engines.forward import Forward, PromptCache
from nevergiveup.engines.sampling import sample_tokens, streams, uniforms
from nevergiveup.protocols import InfrastructureError, Weights
from nevergiveup.types import Completion, Finish, Prompt, completion_seeds

Array: TypeAlias = "np.ndarray[Any, Any]"
_Top: TypeAlias = tuple[Array, Array]
"""Ids and log-probabilities of the most likely tokens of one place, or of several."""

PREFILL_TOKENS = 1024
"""Padded prompt tokens in one prefill pass at most (one prompt always fits): bounds memory and the time to the next yield."""

_COUNTERS = ("completions", "tokens", "prompts", "prompt_tokens", "decode_steps", "slot_steps", "busy_s", "waiting_s")


class TorchEngine:
    """Engine (see protocols) over a causal LM that is already built, on the device and in the dtype it was given.

    model: a transformers causal LM; what cannot be served (sliding window, recurrent state) is refused.
    tokenizer: decodes `Completion.text` (special tokens left out); without one the text is empty.
    temperature: divides the logits before sampling; the returned log-probs are those of the divided logits. 0 is greedy,
        with log-probs at temperature 1.
    max_new_tokens: tokens of a completion at most, the end-of-sequence token included.
    n_top: so many of the most likely ids at each place come with a completion (`top_ids`, `top_logprobs`); 0: none do.
    n_slots: sequences decoded together at most.
    eos_ids: ids that end a completion; default: those of `model.generation_config`.
    version: policy version of the weights that the model holds now.
    max_context: prompt + new tokens at most; default: `max_position_embeddings` of the model.

    Raises ValueError for settings out of range and for a model that it cannot serve.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        temperature: float = 1.0,
        max_new_tokens: int,
        n_slots: int = 128,
        n_top: int = 0,
        eos_ids: Sequence[int] | None = None,
        version: int = 0,
        max_context: int | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, not {temperature}")
        if max_new_tokens < 1 or n_slots < 1:
            raise ValueError(f"max_new_tokens and n_slots must be at least 1, not {max_new_tokens} and {n_slots}")
        config = model.config.get_text_config(decoder=True)
        self.version = version
        most = getattr(config, "max_position_embeddings", sys.maxsize)
        self.max_context: int = most if max_context is None else max_context
        if not max_new_tokens < self.max_context <= most:
            raise ValueError(
                f"max_context must be more than max_new_tokens = {max_new_tokens} and at most the model's {most}, "
                f"not {self.max_context}"
            )
        self._forward = Forward(model.eval(), n_rows=n_slots, max_context=self.max_context)
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._max_new = max_new_tokens
        self._n_vocab: int = config.vocab_size
        if not 0 <= n_top <= self._n_vocab:
            raise ValueError(f"n_top must be from 0 to the model's vocabulary of {self._n_vocab}, not {n_top}")
        self._n_top = n_top
        ends = _default_eos_ids(model) if eos_ids is None else list(eos_ids)
        if any(not 0 <= end < self._n_vocab for end in ends):
            raise ValueError(f"eos_ids must be in the model's vocabulary of {self._n_vocab}, not {ends}")
        self._is_end_V = np.zeros(self._n_vocab, dtype=bool)
        self._is_end_V[ends] = True

        self._open: dict[_Request, None] = {}  # waited for, in order
        self._queue: deque[_Request] = deque()  # not prefilled yet, oldest first
        self._ready: deque[_Sequence] = deque()  # prefilled, first token sampled, waiting for a slot
        self._slots: Array = np.zeros(0, dtype=np.int64)  # in use, ordered by row
        self._n_rows = 0
        self._free = list(range(n_slots))[::-1]
        # By slot. It all lives on the host: the device gets what a pass needs, and its results are read after each.
        self._sequences: dict[int, _Sequence] = {}
        self._row = np.zeros(n_slots, dtype=np.int64)
        self._stream = np.zeros(n_slots, dtype=np.uint64)  # of random numbers
        self._tokens = np.zeros((n_slots, max_new_tokens), dtype=np.int64)
        self._logprobs = np.zeros((n_slots, max_new_tokens), dtype=np.float32)
        self._top_ids = np.zeros((n_slots, max_new_tokens, n_top), dtype=np.int64)
        self._top_logprobs = np.zeros((n_slots, max_new_tokens, n_top), dtype=np.float32)
        self._n_new = np.zeros(n_slots, dtype=np.int64)
        self._newest = np.zeros(n_slots, dtype=np.int64)  # the newest token, which is not in the cache yet
        self._position = np.zeros(n_slots, dtype=np.int64)  # and its position

        self._pump: asyncio.Task[None] | None = None
        self._failure: str | None = None  # why nothing can be sampled any more
        self._cause: BaseException | None = None
        self._waiting_since: float | None = time.perf_counter()
        self._counters = dict.fromkeys(_COUNTERS, 0.0)

    # The public side: all of it runs between two forward passes, because nothing waits inside one.

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
        self._open[request] = None
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
            del self._open[request]
            if request.n_missing:  # the caller was cancelled, or the engine failed
                self._drop(request)

    async def load(self, weights: Weights, version: int) -> None:
        """Copy the weights into the model. Running sequences go on with the keys and values they have.

        Names and shapes must be those of the model (a tied parameter under any of its names); otherwise ValueError, and
        nothing is changed.
        """
        known = self._forward.model.state_dict(keep_vars=True)
        if unexpected := sorted(weights.keys() - known.keys()):
            raise ValueError(f"weights have {unexpected[0]!r}, which the model does not have ({_of(unexpected)})")
        given = {id(known[name]) for name in weights}
        parameters = dict(self._forward.model.named_parameters(remove_duplicate=False))
        if missing := sorted(name for name, parameter in parameters.items() if id(parameter) not in given):
            raise ValueError(f"weights lack {missing[0]!r}, which the model has ({_of(missing)})")
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

        completions and tokens (finished), prompts and prompt_tokens (prefilled), decode_steps, slot_steps (sum of slots
        in use over the decode steps: slot_steps / decode_steps is the mean), busy_s (in forward passes and sampling),
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

    # The pump: one step, then a turn for everyone else in the loop.

    async def _run(self) -> None:
        while self._queue or self._ready or self._sequences:
            start = time.perf_counter()
            with torch.inference_mode():
                self._step()
            self._counters["busy_s"] += time.perf_counter() - start
            await asyncio.sleep(0)
        self._forward.cache.clear()  # its width must not depend on what ran before, nor the last bits of what comes

    def _after_pump(self, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            self._fail("the rollout engine was stopped")
        elif (error := pump.exception()) is not None:
            self._failure, self._cause = f"the rollout engine failed: {type(error).__name__}: {error}", error
            self._fail(self._failure)
        if self._waiting_since is None and pump is self._pump:  # no new one has begun
            self._waiting_since = time.perf_counter()

    def _fail(self, reason: str) -> None:
        """Give everyone who waits an InfrastructureError; each then drops its own request."""
        for request in self._open:
            if not request.future.done():
                error = InfrastructureError(reason)
                error.__cause__ = self._cause
                request.future.set_exception(error)

    def _drop(self, request: _Request) -> None:
        """Forget a request that nobody waits for any more, and free its slots."""
        if request in self._queue:
            self._queue.remove(request)
        self._ready = deque(sequence for sequence in self._ready if sequence.request is not request)
        self._release(np.array([self._sequences[slot].request is request for slot in self._slots.tolist()], dtype=bool))

    def _release(self, is_over: Array) -> None:
        """Free those of the slots in use."""
        over = self._slots[is_over].tolist()
        for slot in over:
            del self._sequences[slot]
        self._free += over
        self._slots = self._slots[~is_over]

    # The work: prefill prompts, give sequences slots and rows, decode one token for each.

    def _step(self) -> None:
        if self._queue and len(self._ready) < len(self._free):
            self._prefill()
        self._place()
        if self._sequences:
            self._decode()

    def _prefill(self) -> None:
        """One pass over the oldest waiting prompt and others of about its length; the first token of all completions."""
        n_free, window = len(self._free) - len(self._ready), []
        for request in self._queue:
            if n_free <= 0:
                break
            window.append(request)
            n_free -= len(request.seeds)
        length = len(window[0].prompt.tokens)
        window.sort(key=lambda request: abs(len(request.prompt.tokens) - length))
        batch, longest = list[_Request](), 0
        for request in window:
            longest = max(longest, len(request.prompt.tokens))
            is_alike = abs(len(request.prompt.tokens) - length) <= max(16, length // 4)
            if batch and not (is_alike and longest * (len(batch) + 1) <= PREFILL_TOKENS):
                break
            batch.append(request)
            self._queue.remove(request)

        cache, logits_BV = self._forward.prefill([request.prompt.tokens for request in batch])
        stream_N = streams(np.array([seed for request in batch for seed in request.seeds]))
        prompt_rows = np.repeat(np.arange(len(batch)), [len(request.seeds) for request in batch])
        first_N = np.zeros_like(stream_N)
        tokens, logprobs, top = self._draw(logits_BV[self._on_device(prompt_rows)], stream_N, first_N)
        tops = itertools.repeat(None, len(tokens)) if top is None else zip(*top, strict=True)
        firsts = zip(tokens.tolist(), logprobs.tolist(), tops, strict=True)
        for prompt_row, request in enumerate(batch):
            origin = _Origin(cache, prompt_row)
            for i, (token, logprob, its_top) in enumerate(itertools.islice(firsts, len(request.seeds))):
                if self._is_end_V[token] or self._max_new == 1:
                    only = its_top and (its_top[0][None], its_top[1][None])
                    self._finish(request, i, self.version, [token], [logprob], only)
                else:
                    self._ready.append(_Sequence(request, i, self.version, token, logprob, its_top, origin))
        self._counters["prompts"] += len(batch)
        self._counters["prompt_tokens"] += sum(len(request.prompt.tokens) for request in batch)

    def _place(self) -> None:
        """Give free slots to sequences that are ready, and every slot its row: one for all sequences alike so far.

        The rows in use are the first ones: a row that splits is copied, and the last ones move into holes.
        """
        n_slots, origins, new_rows = len(self._row), list[_Origin](), list[int]()
        new = [self._ready.popleft() for _ in range(min(len(self._free), len(self._ready)))]
        new_slots = [self._free.pop() for _ in new]
        for sequence in new:  # a row beyond the last, for each prompt: to be filled instead of copied
            if sequence.origin is not None and (not origins or origins[-1] is not sequence.origin):
                origins.append(sequence.origin)
            new_rows.append(n_slots + len(origins) - 1)
        self._sequences.update(zip(new_slots, new, strict=True))
        self._row[new_slots] = new_rows
        self._stream[new_slots] = streams(np.array([sequence.request.seeds[sequence.index] for sequence in new]))
        self._position[new_slots] = [len(sequence.request.prompt.tokens) for sequence in new]
        self._newest[new_slots] = self._tokens[new_slots, 0] = [sequence.token for sequence in new]
        self._logprobs[new_slots, 0] = [sequence.logprob for sequence in new]
        if self._n_top:
            for slot, sequence in zip(new_slots, new, strict=True):
                if sequence.top is not None:
                    self._top_ids[slot, 0], self._top_logprobs[slot, 0] = sequence.top
        self._n_new[new_slots] = 1

        slots = np.concatenate([self._slots, np.array(new_slots, dtype=np.int64)])
        rows = self._row[slots]
        alike = rows * self._n_vocab + self._newest[slots]  # sequences are, if they were and their newest tokens are
        _, first, group_of = np.unique(alike, return_index=True, return_inverse=True)
        source = rows[first]  # ascending
        self._n_rows = len(source)
        stays = source < self._n_rows
        stays[1:] &= source[1:] != source[:-1]
        is_hole = np.ones(self._n_rows, dtype=bool)
        is_hole[source[stays]] = False
        target = source.copy()
        target[~stays] = np.flatnonzero(is_hole)
        moves, comes = ~stays & (source < n_slots), source >= n_slots
        self._forward.cache.arrange(self._n_rows, source[moves], target[moves])
        fills = [(row, origins[i]) for row, i in zip(target[comes].tolist(), source[comes] - n_slots, strict=True)]
        for cache, some in itertools.groupby(fills, lambda fill: fill[1].cache):
            pairs = np.array([(row, origin.prompt_row) for row, origin in some])
            self._forward.cache.fill(pairs[:, 0], cache, pairs[:, 1])
        for sequence in new:
            sequence.origin = None  # its cache is as large as all the prompts of its pass
        self._row[slots] = target[group_of]
        self._slots = slots[np.argsort(self._row[slots], kind="stable")]

    def _decode(self) -> None:
        """One token for every sequence that has a slot."""
        slots, row_of = self._slots, self._row[self._slots]
        token_B, position_B = np.zeros((2, self._n_rows), dtype=np.int64)
        token_B[row_of], position_B[row_of] = self._newest[slots], self._position[slots]
        logits_NV = self._forward.decode(token_B, position_B)
        if self._n_rows < len(slots):
            logits_NV = logits_NV[self._on_device(row_of)]
        n_new = self._n_new[slots]
        tokens, logprobs, top = self._draw(logits_NV, self._stream[slots], n_new)

        self._newest[slots] = self._tokens[slots, n_new] = tokens
        self._logprobs[slots, n_new] = logprobs
        if top is not None:
            self._top_ids[slots, n_new], self._top_logprobs[slots, n_new] = top
        self._n_new[slots] = n_new + 1
        self._position[slots] += 1
        self._counters["decode_steps"] += 1
        self._counters["slot_steps"] += len(slots)
        is_over = self._is_end_V[tokens] | (n_new + 1 == self._max_new)
        if len(over := slots[is_over]):
            lengths = self._n_new[over].tolist()
            all_tokens = self._tokens[over, : max(lengths)].tolist()
            all_logprobs = self._logprobs[over, : max(lengths)].tolist()
            for slot, n, its_tokens, its_logprobs in zip(over.tolist(), lengths, all_tokens, all_logprobs, strict=True):
                sequence = self._sequences[slot]
                its_top = (self._top_ids[slot, :n], self._top_logprobs[slot, :n]) if self._n_top else None
                self._finish(
                    sequence.request, sequence.index, sequence.version_first, its_tokens[:n], its_logprobs[:n], its_top
                )
            self._release(is_over)

    def _draw(self, logits_NV: Tensor, stream_N: Array, index_N: Array) -> tuple[Array, Array, _Top | None]:
        """Tokens, log-probs and the most likely ones, on the host."""
        uniform_N = torch.from_numpy(uniforms(stream_N, index_N)).to(logits_NV.device)
        token_N, logprob_N, top = sample_tokens(logits_NV, self._temperature, uniform_N, self._n_top)
        tokens, logprobs = token_N.cpu().numpy(), logprob_N.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise ValueError(f"the model's logits are not finite (policy version {self.version})")
        return tokens, logprobs, None if top is None else (top[0].cpu().numpy(), top[1].cpu().numpy())

    def _finish(
        self,
        request: _Request,
        index: int,
        version_first: int,
        tokens: list[int],
        logprobs: list[float],
        top: _Top | None,
    ) -> None:
        finish: Finish = "stop" if self._is_end_V[tokens[-1]] else "length"
        text = "" if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
        request.completions[index] = Completion(
            tuple(tokens), tuple(logprobs), text, finish, version_first, self.version,
            top_ids=None if top is None else tuple(map(tuple, top[0].tolist())),
            top_logprobs=None if top is None else tuple(map(tuple, top[1].tolist())),
        )  # fmt: skip
        request.n_missing -= 1
        self._counters["completions"] += 1
        self._counters["tokens"] += len(tokens)
        if not request.n_missing and not request.future.done():
            request.future.set_result([request.completions[i] for i in range(len(request.seeds))])

    def _on_device(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self._forward.device)


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
class _Origin:
    """Where the keys and values of a prompt are."""

    cache: PromptCache
    prompt_row: int


@dataclass(eq=False, slots=True)
class _Sequence:
    """A completion that has begun. token, logprob, top: its first; origin: of its prompt, until it has a slot."""

    request: _Request
    index: int
    version_first: int
    token: int
    logprob: float
    top: _Top | None
    origin: _Origin | None


def _of(names: Sequence[str]) -> str:
    return "the only one" if len(names) == 1 else f"the first of {len(names)}"


def _default_eos_ids(model: Any) -> list[int]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
