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
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, get_layer_types_and_kwargs

from nevergiveup.protocols import InfrastructureError, Weights
from nevergiveup.types import Completion, Finish, Prompt, completion_seeds

PREFILL_TOKENS = 2048
"""Padded prompt tokens in one prefill pass at most (one prompt always fits): bounds memory and the time to the next yield."""

LENGTH_STEP = 16
"""Attended cache lengths and cache capacities are multiples of this."""


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
        self._cache = _SlotCache()
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
        if self._pump is not None:
            self._pump.cancel()
        self._fail("the rollout engine was closed")

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
            self._fail("the rollout engine's event loop was stopped")
        elif (error := pump.exception()) is not None:
            self._fail(f"the rollout engine failed: {type(error).__name__}: {error}", error)
        elif self._waiting_since is None:
            self._waiting_since = time.perf_counter()

    def _fail(self, reason: str, cause: BaseException | None = None) -> None:
        if self._failure is None:
            self._failure, self._cause = reason, cause
        waiting = {
            id(r): r for r in (*self._queue, *(s.request for s in (*self._ready, *self._running) if s is not None))
        }
        for request in waiting.values():
            if not request.future.done():
                error = InfrastructureError(self._failure)
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

    def _step(self) -> None:
        if self._queue and len(self._ready) < self._n_slots - self._n_running:
            self._prefill()
        self._place()
        if self._n_running:
            self._decode()
