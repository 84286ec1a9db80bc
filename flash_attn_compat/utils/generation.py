"""Autoregressive generation with a KV cache: the state, sampling from logits, and a decoding loop.

CUDA graphs and speculative decoding stay out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class InferenceParams:
    """What a model needs to continue a sequence.

    Attributes:
        max_seqlen, max_batch_size: size of the caches.
        seqlen_offset: tokens already in the caches.
        batch_size_offset: first row of the caches that this batch uses.
        key_value_memory_dict: cache by layer index, (max_batch_size, max_seqlen, 2, nheads_k, headdim).
        lengths_per_sample: (batch,) int32, tokens in the caches of each sample, instead of seqlen_offset.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start over with caches used up to these sizes; the caches themselves are kept."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclass
class DecoderOutput:
    """sequences: (batch, prompt + generated) token ids; scores: the logits (batch, vocab) of every step."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set all but the top_k of the logits (batch, vocab) to -inf, in place."""
    smallest_kept = torch.topk(logits, top_k).values[..., -1, None]
    logits.masked_fill_(logits < smallest_kept, float("-inf"))


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Set to -inf, in place, the logits (batch, vocab) outside of the smallest set whose probability exceeds top_p.

    Does nothing unless 0 < top_p < 1.
    """
    if top_p <= 0.0 or top_p >= 1.0:
        return
    ascending, order = torch.sort(logits, descending=False)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    logits.masked_fill_(dropped.scatter(1, order, dropped), float("-inf"))


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Draw one token per row of logits.

    Args:
        logits: (batch, vocab); not modified.
        top_k: 1 takes the largest logit, 0 keeps all of them.
        top_p: nucleus sampling (Holtzman et al. 2019) within the top_k; 0 for none.
        temperature: divides the logits.
    Returns:
        (batch,) int64.
    """
    if top_k == 1:
        return logits.argmax(dim=-1)
    assert top_p <= 1.0, f"top_p must be at most 1, got {top_p}"
    if top_k > 0:
        logits, candidates = torch.topk(logits, min(top_k, logits.shape[-1]), dim=-1)
        logits = logits / temperature
        modify_logits_for_top_p_filtering(logits, top_p)
        drawn = torch.multinomial(torch.softmax(logits, dim=-1), num_samples=1)
        return candidates.gather(1, drawn).squeeze(1)
    logits = logits / temperature
    modify_logits_for_top_p_filtering(logits, top_p)
    return torch.multinomial(torch.softmax(logits, dim=-1), num_samples=1).squeeze(1)


@torch.inference_mode()
def decode(
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
) -> DecoderOutput:
    """Continue prompts of one length, token by token.

    Args:
        input_ids: (batch, prompt) int64.
        model: called as model(input_ids, position_ids=(batch, n), inference_params=InferenceParams,
            num_last_tokens=1); its result has .logits (batch, 1, vocab).
        max_length: prompt and generated tokens together.
        top_k, top_p, temperature: as `sample`.
        eos_token_id: stop as soon as every sample's token of one step is this one.
        teacher_outputs: (batch, n) tokens to use instead of the drawn ones, as far as they go.
        vocab_size: ignore logits past this one.
        tensor_parallel, cg: accepted; they matter to CUDA graphs only, of which there are none here.
        enable_timing: print the time that decoding took.
    """
    batch_size, prompt_length = input_ids.shape
    state = InferenceParams(max_seqlen=max_length, max_batch_size=batch_size)
    start = time.perf_counter()
    sequences, scores = [input_ids], []
    tokens = input_ids
    while True:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.long) + state.seqlen_offset
        logits = model(
            tokens,
            position_ids=positions.expand(batch_size, -1),
            inference_params=state,
            num_last_tokens=1,
        ).logits.squeeze(dim=1)
        logits = logits if vocab_size is None else logits[..., :vocab_size]
        scores.append(logits)
        state.seqlen_offset += tokens.shape[1]
        drawn = sample(logits, top_k=top_k, top_p=top_p, temperature=temperature)
        if teacher_outputs is not None and state.seqlen_offset < teacher_outputs.shape[1]:
            drawn = teacher_outputs[:, state.seqlen_offset]
        tokens = drawn[:, None]
        sequences.append(tokens)
        finished = eos_token_id is not None and bool((drawn == eos_token_id).all())
        if finished or state.seqlen_offset >= max_length - 1:
            break
    if enable_timing:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        print(f"Prompt processing + decoding time: {(time.perf_counter() - start) * 1000:.0f}ms")
    return DecoderOutput(torch.cat(sequences, dim=1), tuple(scores))


class GenerationMixin:
    """Gives a model `generate`, on top of `decode`."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """To be defined by the model: its caches by layer index."""
        raise NotImplementedError(f"{type(self).__name__} does not define allocate_inference_cache")

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Token ids (batch, up to max_length), or a `DecoderOutput` with `return_dict_in_generate`.

        kwargs go to `decode`; scores are kept only with `output_scores`.
        """
        output = decode(input_ids, self, max_length, top_k=top_k, top_p=top_p, temperature=temperature, **kwargs)
        if not output_scores:
            output.scores = None
        return output if return_dict_in_generate else output.sequences
