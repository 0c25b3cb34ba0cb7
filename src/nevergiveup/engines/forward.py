"""Forward passes of a Hugging Face causal LM over a key/value cache made for decoding many sequences at once. Layer 3.

The model runs through its ordinary `forward`; what is ours is the cache, and the attention of decode passes. For the
most common kind of layer (`LLAMAS`) there is a faster way through the same modules.

Shapes: B prompts or cache rows of one pass, V vocabulary. A token's position in its sequence is its column in the cache.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

Array: TypeAlias = "np.ndarray[Any, Any]"

COLUMN_STEP = 16
"""The length of the cache is a multiple of this."""

LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of one and the same decoder layer, up to biases and norms of queries and keys, which show in its modules."""

ROW_STEP = 16
"""Rows of a decode pass are a multiple of this, in half precision on CPUs."""


class PromptCache(Cache):
    """Keys and values of prefilled prompts, by turns and by layer: [prompts, heads, columns, head_dim] each."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.sides: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.sides += key_states, value_states
        return key_states, value_states


class RowCache(Cache):
    """Keys and values of running sequences, by turns and by layer: [rows, heads, columns, head_dim] each.

    There are always just as many columns as the longest sequence needs now (to the next step). So attention reads whole,
    contiguous tensors, as fast batched products want them, and short sequences are cheap.
    """

    def __init__(self, n_rows: int) -> None:
        super().__init__(layers=[])
        self._n_rows = n_rows
        self._n_used = 0
        self._n_heads = 0
        self._n_columns = 0
        self._memory: list[Tensor] = []  # flat; only ever grows
        self._sides: list[Tensor] = []  # the same in its present shape
        self._cells = torch.zeros(0)

    def clear(self) -> None:
        """No row is in use: what comes next is computed as if it were the first."""
        self._n_used = self._n_columns = 0
        self._sides = [side[:, :, :0] for side in self._sides]

    def arrange(self, n_used: int, source: Array, target: Array) -> None:
        """Copy source rows to target rows (ascending); from now on, the first n_used rows matter."""
        self._n_used = n_used
        if len(source):
            self._write(target, self._sides, self._sides, source)

    def fill(self, rows: Array, prompts: PromptCache, prompt_rows: Array) -> None:
        """Copy prompts into rows (ascending)."""
        if not self._sides:
            self._n_heads = prompts.sides[0].shape[1]
            if any(side.shape[1] != self._n_heads for side in prompts.sides):
                raise ValueError(
                    "the model's layers differ in their number of key/value heads; the engine needs one number"
                )
            self._memory = [side.new_zeros(0) for side in prompts.sides]
            self._sides = [side.new_zeros(self._n_rows, self._n_heads, 0, side.shape[3]) for side in prompts.sides]
        self._fit(max(prompts.sides[0].shape[2], self._n_columns))
        self._write(rows, self._sides, prompts.sides, prompt_rows)

    @staticmethod
    def _write(rows: Array, to: list[Tensor], source: list[Tensor], source_rows: Array) -> None:
        # Rows up to `split` here and there, from then on one after the other, where a plain copy is much faster.
        split = int((rows - np.arange(len(rows)) == rows[-1] - len(rows) + 1).argmax())
        rows_N, source_N = (torch.from_numpy(some).to(to[0].device) for some in (rows, source_rows))
        for side, other in zip(to, source, strict=True):
            side, new = side[:, :, : other.shape[2]], other.index_select(0, source_N)
            if split:
                side.index_copy_(0, rows_N[:split], new[:split])
            side[rows[split] : rows[-1] + 1] = new[split:]

    def _fit(self, n_columns: int) -> None:
        """Have room for n_columns, and not much more."""
        if n_columns <= self._n_columns < max(2 * n_columns, 2 * COLUMN_STEP):
            return
        self._n_columns = -(-(n_columns + n_columns // 16) // COLUMN_STEP) * COLUMN_STEP
        for i, old in enumerate(self._sides):
            shape = (*old.shape[:2], self._n_columns, old.shape[3])
            n_kept = min(old.shape[2], self._n_columns)
            kept = old[: self._n_used, :, :n_kept].clone()
            if math.prod(shape) > len(self._memory[i]):
                self._memory[i] = old.new_zeros(math.prod(shape))  # not empty: NaN shines through any mask
            self._sides[i] = self._memory[i][: math.prod(shape)].view(shape)
            self._sides[i][: self._n_used, :, :n_kept] = kept

    def aim(self, position_B: Array) -> Tensor:
        """The next pass writes row b at column position[b]. Returns its additive mask [B * heads, 1, 1, columns]."""
        self._fit(int(position_B.max()) + 1)
        device, dtype = self._sides[0].device, self._sides[0].dtype
        n = len(position_B) * self._n_heads
        cells = np.repeat(position_B, self._n_heads) + np.arange(0, n * self._n_columns, self._n_columns)
        self._cells = torch.from_numpy(cells).to(device)
        is_hidden = np.arange(self._n_columns) > position_B[:, None]
        mask = torch.from_numpy(is_hidden).to(device).to(dtype).mul_(torch.finfo(dtype).min)
        return mask[:, None].expand(-1, self._n_heads, -1).reshape(n, 1, 1, self._n_columns)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        seen, n = [], len(self._cells)
        for side, new in zip(self._sides[2 * layer_idx : 2 * layer_idx + 2], (key_states, value_states), strict=True):
            head_dim = new.shape[3]
            side.view(-1, head_dim).index_copy_(0, self._cells, new.reshape(n, head_dim))
            seen.append(side.view(-1, self._n_columns, head_dim)[:n])
        return seen[0], seen[1]


class Forward:
    """The two passes. Raises ValueError for a model that cannot be served correctly, saying why.

    Served are decoder-only models whose whole state is the keys and values of all past tokens. Weights may change
    between passes.
    """

    def __init__(self, model: Any, *, n_rows: int, max_context: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._config = model.config.get_text_config(decoder=True)
        self._is_llama = self._config.model_type in LLAMAS
        self._n_rows = max(n_rows, 2)  # 2 for the trial below
        self._is_half_on_cpu = self.device.type == "cpu" and self._dtype != torch.float32
        self.cache = RowCache(self._n_rows)
        # There, a kernel is compiled for every new shape: do with few row counts.
        self._row_step = ROW_STEP if self._is_half_on_cpu else 1
        AttentionInterface.register(_ATTENTION, _attend)
        self._refuse_unless_servable(max_context)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[PromptCache, Tensor]:
        """Keys and values of the prompts, and the logits [B, V] after the last token of each."""
        longest, cache = max(map(len, prompts)), PromptCache()
        # Padding is on the right, where causal attention never looks; its keys are overwritten or masked later.
        padded = [(*prompt, *(0,) * (longest - len(prompt))) for prompt in prompts]
        ids, positions = torch.tensor(padded, device=self.device), torch.arange(longest, device=self.device)[None]
        last_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=self.device)
        return cache, self._logits(ids, positions, cache, None, last_B1)

    def decode(self, token_B: Array, position_B: Array) -> Tensor:
        """Logits [B, V] after one more token for each of the first B rows of the cache: its id and its position."""
        n = len(token_B)
        if n_fill := min(-n % self._row_step, self._n_rows - n):  # unused rows: they write where nobody reads
            token_B, position_B = (np.concatenate([x, np.zeros(n_fill, dtype=x.dtype)]) for x in (token_B, position_B))
        mask = self.cache.aim(position_B)
        ids, positions = (torch.from_numpy(x[:, None]).to(self.device) for x in (token_B, position_B))
        return self._logits(ids, positions, self.cache, mask, torch.zeros_like(ids))[:n]

    def _logits(self, ids: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None, last_B1: Tensor) -> Tensor:
        if self._is_llama:
            return self._llama_logits(ids, positions, cache, mask, last_B1)
        usual = self._config._attn_implementation
        if mask is not None:
            self._config._attn_implementation = _ATTENTION
        try:
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=last_B1,
            )
        finally:
            self._config._attn_implementation = usual
        return output.logits[:, 0]

    def _llama_logits(
        self, ids: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None, last_B1: Tensor
    ) -> Tensor:
        """The same for the usual decoder layer, from the model's own modules: a fraction of the operations, which is what
        the time of a decode pass goes into when the model or the batch is small."""
        body = self.model.model
        x = body.embed_tokens(ids)
        cos, sin = (t.unsqueeze(2) for t in body.rotary_emb(x, positions))
        left, right = sin.chunk(2, -1)
        signed_sin, by_head = torch.cat((-left, right), -1), (*ids.shape, -1, sin.shape[-1])
        for i, layer in enumerate(body.layers):
            attention, h = layer.self_attn, _normed(layer.input_layernorm, x)
            query, key = attention.q_proj(h).view(by_head), attention.k_proj(h).view(by_head)
            if hasattr(attention, "q_norm"):
                query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
            query, key = _rotated(query, key, cos, signed_sin)
            key, value = cache.update(key, attention.v_proj(h).view(by_head).transpose(1, 2), i)
            if mask is None:
                visible = None
                if i == len(body.layers) - 1:  # from here on, only the last token of each prompt matters
                    x, query = (
                        x.take_along_dim(last_B1[..., None], 1),
                        query.take_along_dim(last_B1[:, None, :, None], 2),
                    )
                    visible = (torch.arange(ids.shape[1], device=self.device) <= last_B1)[:, None, None]
                if self._is_half_on_cpu:  # not slower in float32, and more exact
                    query, key, value = query.float(), key.float(), value.float()
                y = F.scaled_dot_product_attention(
                    query, key, value, visible, is_causal=visible is None, scale=attention.scaling, enable_gqa=True
                )
                y = y.to(x.dtype).transpose(1, 2)
            else:
                y, _ = _attend(attention, query, key, value, mask, attention.scaling)
            x = x + attention.o_proj(y.flatten(2))
            x = x + layer.mlp(_normed(layer.post_attention_layernorm, x))
        return self.model.lm_head(_normed(body.norm, x[:, 0]))

    def _refuse_unless_servable(self, max_context: int) -> None:
        name = type(self.model).__name__
        needed = {"input_ids", "attention_mask", "position_ids", "cache", "logits_to_keep"}
        if not (
            needed <= set(inspect.signature(self.model.forward).parameters)
            and self.model._supports_attention_backend
            and not self.model.config.is_encoder_decoder
            and not getattr(self.model, "_is_stateful", False)
        ):
            raise ValueError(
                f"{name} cannot be served: the engine needs a decoder-only model with a key/value cache, positions as an "
                "argument, and attention through transformers' AttentionInterface"
            )
        if self._config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"{name} uses attention {self._config._attn_implementation!r}: load it with attn_implementation='sdpa' "
                "or 'eager'"
            )
        for kind, options in zip(*get_layer_types_and_kwargs(self._config), strict=True):
            if kind == "sliding_attention" and options["sliding_window"] < max_context:
                raise ValueError(
                    f"{name} has a sliding window of {options['sliding_window']} tokens, shorter than the context of "
                    f"{max_context}: set max_context to at most {options['sliding_window']}"
                )
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"{name} has layers of type {kind!r}; the engine can serve full attention only")
        error, spread = self._error()
        # Half precision is that coarse on odd inputs; what is wrong by construction is wrong by about the spread.
        if not error <= (0.01 if self._dtype == torch.float32 else 0.25) * spread:
            raise ValueError(
                f"{name} cannot be served: with the key/value cache its logits are off by {error:.2g} (they span {spread:.2g})"
            )

    @torch.inference_mode()
    def _error(self) -> tuple[float, float]:
        """Greatest difference to a plain forward pass, over two prompts of different lengths and one more token; and
        the range of the logits."""
        tokens = [int(self._config.vocab_size * share) for share in (0.3, 0.4, 0.35, 0.6, 0.5, 0.45)]
        lengths = np.array([5, 2])
        cache, _ = self.prefill([tokens[:length] for length in lengths])
        self.cache.arrange(2, np.arange(0), np.arange(0))
        self.cache.fill(np.arange(2), cache, np.arange(2))
        ours_BV = self.decode(np.array(tokens)[lengths], lengths)
        plain_BV = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits[0, lengths]
        return (ours_BV - plain_BV).abs().max().item(), (plain_BV.amax() - plain_BV.amin()).item()


def _normed(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(query: Tensor, key: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding, and heads before positions."""
    both = torch.cat((query, key), 2)
    left, right = both.chunk(2, -1)
    both = (both * cos).add_(torch.cat((right, left), -1).mul_(signed_sin)).transpose(1, 2)
    return both[:, : query.shape[2]], both[:, query.shape[2] :]


_ATTENTION = "nevergiveup_decode"
_HARMLESS = {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "output_attentions"}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one new token a row, as two batched products: on CPUs several times faster than the fused kernels.

    query [B, heads, 1, dim]; key, value [B * key heads, columns, dim] and mask as RowCache gives them.
    """
    if unknown := [name for name, option in options.items() if option is not None and name not in _HARMLESS]:
        raise ValueError(f"the model asks for attention with {unknown[0]!r}, which the engine does not offer")
    n, _, _, head_dim = query.shape
    query = query.reshape(key.shape[0], -1, head_dim)  # the query heads of one key head side by side
    scores = torch.baddbmm(attention_mask[:, 0], query, key.transpose(1, 2), alpha=scaling)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights, value).view(n, 1, -1, value.shape[2]), None
