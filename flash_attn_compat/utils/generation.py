"""Autoregressive generation with a KV cache: the state, sampling from logits, a decoding loop, CUDA graphs of a step.

Without speculative decoding.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class InferenceParams:
    """The state that a model needs to continue a sequence.

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
        """Prepare for new sequences, which may use the caches up to these sizes."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclass
class DecoderOutput:
    """The result of `decode`.

    sequences: (batch, prompt + generated) token ids; scores: the logits (batch, vocab) of every step
    """

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
        teacher_outputs: (batch, n) tokens of the whole sequence, used instead of drawn ones up to position n.
        vocab_size: ignore logits past this one.
        tensor_parallel: the number of ranks that share the model's heads; used only with cg.
        cg: replay CUDA graphs, which are kept in model._decoding_cache; see `update_graph_cache`.
        enable_timing: print the time that decoding took.
    """
    batch_size, prompt_length = input_ids.shape
    state = InferenceParams(max_seqlen=max_length, max_batch_size=batch_size)
    graphs: DecodingCGCache | None = None
    if cg:
        graphs = update_graph_cache(
            model,
            getattr(model, "_decoding_cache", None),
            batch_size,
            prompt_length,
            max_length,
            tensor_parallel=tensor_parallel,
        )
        model._decoding_cache = graphs
        state = graphs.inference_params
        state.reset(max_length, batch_size)
    start = time.perf_counter()
    sequences, scores = [input_ids], []
    tokens = input_ids
    while True:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.long) + state.seqlen_offset
        positions = positions.expand(batch_size, -1)
        if graphs is not None and state.seqlen_offset > 0:
            logits = graphs.run(tokens, positions, state.seqlen_offset)
        else:
            logits = model(tokens, position_ids=positions, inference_params=state, num_last_tokens=1).logits
        logits = logits.squeeze(dim=1)
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
        """Return the caches by layer index; the model defines this."""
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


def allocate_inference_cache(
    max_batch_size: int,
    max_seqlen: int,
    nheads: int,
    headdim: int,
    layers: int | Iterable[int],
    device: torch.device | str,
    dtype: torch.dtype = torch.float16,
) -> dict[int, Tensor]:
    """Return an uninitialised cache (max_batch_size, max_seqlen, 2, nheads, headdim) for each layer, by its index."""
    indices = range(layers) if isinstance(layers, int) else layers
    shape = (max_batch_size, max_seqlen, 2, nheads, headdim)
    return {index: torch.empty(shape, device=device, dtype=dtype) for index in indices}


# A decoding step: takes (input_ids, position_ids, number of tokens in the cache) and returns logits.
Step = Callable[[Tensor, Tensor, int], Tensor]


@dataclass
class DecodingCGCache:
    """CUDA graphs of decoding steps, and the state that they were captured with.

    Attributes:
        max_batch_size, max_seqlen, device, dtype: the largest sizes, the device and the dtype of the captures.
        callables: the step for each (batch size, tokens in a step).
        mempool: the graphs' memory; None without CUDA.
        run: a Step that calls the one of callables for the shape of its input_ids (batch, tokens).
    """

    max_batch_size: int = 0
    max_seqlen: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    callables: dict[tuple[int, int], Step] = field(default_factory=dict)
    mempool: Any = None
    inference_params: Any = None
    run: Any = None


@torch.inference_mode()
def update_graph_cache(
    model: Any,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Iterable[int] = (1,),
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """Capture the steps that `cache` lacks, or all if its sizes are too small or its device or dtype differ.

    Args:
        model: called as `decode` does, with num_last_tokens = tokens of the step. Its caches come from
            model.allocate_inference_cache, else from model.config. Attention must read lengths_per_sample, which
            changes between replays (MHA with use_flash_attn does).
        cache: of an earlier call, or None.
        seqlen_og: tokens of the prompt.
        decoding_seqlens: how many tokens a step may have.
        tensor_parallel: divides model.config's heads.
        dtype: of the caches, the parameters' by default.
        n_warmups: calls before a capture.
    """
    cache = DecodingCGCache() if cache is None else cache
    example = next(iter(model.parameters()))
    device, dtype = example.device, example.dtype if dtype is None else dtype
    too_small = batch_size > cache.max_batch_size or max_seqlen > cache.max_seqlen
    if too_small or (device, dtype) != (cache.device, cache.dtype):
        if cache.callables:
            cache.callables, cache.mempool, cache.inference_params = {}, None, None
            gc.collect()  # frees the old graphs' memory before the new captures
        cache.device, cache.dtype, cache.max_batch_size, cache.max_seqlen = device, dtype, batch_size, max_seqlen
        cache.inference_params = InferenceParams(
            max_seqlen=max_seqlen,
            max_batch_size=batch_size,
            seqlen_offset=seqlen_og,
            key_value_memory_dict=_allocate_caches(model, batch_size, max_seqlen, tensor_parallel, device, dtype),
            lengths_per_sample=torch.full((batch_size,), seqlen_og, dtype=torch.int32, device=device),
        )
        cache.mempool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    callables = cache.callables
    for tokens in decoding_seqlens:
        if (batch_size, tokens) not in callables:
            callables[batch_size, tokens] = capture_graph(
                model, cache.inference_params, batch_size, max_seqlen, tokens, cache.mempool, n_warmups
            )
    cache.run = lambda input_ids, position_ids, seqlen: callables[tuple(input_ids.shape[:2])](
        input_ids, position_ids, seqlen
    )
    cache.inference_params.seqlen_offset = 0
    return cache


def capture_graph(
    model: Any,
    inference_params: InferenceParams,
    batch_size: int,
    max_seqlen: int,
    decoding_seqlen: int = 1,
    mempool: Any = None,
    n_warmups: int = 2,
) -> Step:
    """Capture a step of decoding_seqlen tokens as a CUDA graph; without CUDA the step calls the model.

    Returns a function of input_ids and position_ids (batch_size, decoding_seqlen) and the number of tokens in the
    cache; it returns the logits (batch_size, decoding_seqlen, vocab).
    """
    lengths = inference_params.lengths_per_sample
    assert lengths is not None, "inference_params.lengths_per_sample is required: it changes between replays"
    device = next(iter(model.parameters())).device
    shape, before = (batch_size, decoding_seqlen), inference_params.seqlen_offset

    @torch.inference_mode()
    def call(input_ids: Tensor, position_ids: Tensor, seqlen: int) -> Tensor:
        inference_params.seqlen_offset = seqlen
        lengths.fill_(seqlen)
        logits: Tensor = model(
            input_ids, position_ids=position_ids, inference_params=inference_params, num_last_tokens=decoding_seqlen
        ).logits
        return logits

    if device.type != "cuda":
        return call
    input_ids, position_ids = (torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2))
    last = max_seqlen - decoding_seqlen
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(n_warmups):
            call(input_ids, position_ids, last)
        side.synchronize()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # no rank may capture while another rank's collectives run
    torch.cuda.current_stream(device).wait_stream(side)
    # replay() keeps every tensor that the graph may read: a longer sequence replaces, say, the module's rotary tables.
    read = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, pool=mempool):
        logits = model(
            input_ids, position_ids=position_ids, inference_params=inference_params, num_last_tokens=decoding_seqlen
        ).logits

    @torch.inference_mode()
    def replay(new_input_ids: Tensor, new_position_ids: Tensor, seqlen: int, _read: object = read) -> Tensor:
        lengths.fill_(seqlen)
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        graph.replay()
        out: Tensor = logits.clone()
        return out

    inference_params.seqlen_offset = before
    return replay


def _allocate_caches(
    model: Any, batch_size: int, max_seqlen: int, tensor_parallel: int, device: torch.device, dtype: torch.dtype
) -> dict[Any, Any]:
    if hasattr(model, "allocate_inference_cache"):
        caches: dict[Any, Any] = model.allocate_inference_cache(batch_size, max_seqlen, dtype)
        return caches
    config = model.config
    headdim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    nheads = config.num_attention_heads // tensor_parallel
    return allocate_inference_cache(batch_size, max_seqlen, nheads, headdim, config.num_hidden_layers, device, dtype)
