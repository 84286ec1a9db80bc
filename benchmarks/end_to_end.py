"""Whole programs with each implementation of attention: `python -m benchmarks.end_to_end`. Random weights, real shapes.

Language models of transformers (a prefill, generation from one and from padded prompts, a packed training step) and one
step of a diffusion model of diffusers. Nothing is downloaded. With FLASH_ATTN_COMPAT_CAPABILITY=7.5, ours and PyTorch's
own attention use only kernels that a Turing GPU has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_attn_compat
from benchmarks.runner import DTYPES, Contest, forward_only, make_parser, run
from benchmarks.sdpa import disable_flash_kernels
from flash_attn_compat import settings
from verify.bench_run import Jobs
from verify.errors import NotSupported
from verify.implementations import official
from verify.timing import Job


class Attention(NamedTuple):
    """An implementation of attention: its name in transformers, and a context in which the model must run."""

    in_transformers: str
    around: Callable[[], AbstractContextManager[object]] = nullcontext


# Ours first. Results are compared with those of the last one.
ATTENTIONS = {
    "ours": Attention("fa2_compat"),
    "switched": Attention("sdpa", partial(flash_attn_compat.sdpa, always=True)),  # SDPA on our kernels
    "flash-attn": Attention("flash_attention_2"),
    "sdpa": Attention("sdpa"),
}
Options = dict[str, Any]
QWEN3_06B: Options = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=16384,
)  # fmt: skip
# A quarter of the layers of Llama 3.2 1B.
LLAMA: Options = dict(
    vocab_size=32768, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=16384,
)  # fmt: skip
TINY: Options = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
)  # fmt: skip
TINY_UNET: Options = dict(
    sample_size=8, cross_attention_dim=16, norm_num_groups=4, layers_per_block=1, attention_head_dim=4,
    block_out_channels=(16, 32), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)  # fmt: skip
NEW_TOKENS = 48
PADDED = 512, 64, 400, 256, 128, 320, 96, 480
# Lengths of texts that a collator packs into 16k tokens.
PACKED = 2100, 1500, 900, 1300, 400, 700, 850, 442, 1800, 1200, 600, 1500, 300, 1000, 1100, 692


class Setting(NamedTuple):
    device: str
    dtype: torch.dtype
    tiny: bool
    names: Sequence[str]

    def size(self, real: int) -> int:
        return max(1, real // 64) if self.tiny else real


def language_model(family: str, options: Options, device: str, dtype: torch.dtype) -> Any:
    """Return a model with the same random weights each time, so large that attention changes the outputs visibly."""
    if importlib.util.find_spec("transformers") is None:
        raise NotSupported("transformers is not installed")
    import transformers

    flash_attn_compat.register_with_transformers()
    # With tied embeddings, a model of random weights repeats one token for ever.
    options = options | dict(tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(
            getattr(transformers, f"{family}Config")(**options), attn_implementation="sdpa", dtype=dtype
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model.eval()


@contextmanager
def use_attention(model: Any, attention: Attention) -> Iterator[None]:
    """Let the model use this implementation during a block."""
    model.set_attn_implementation(attention.in_transformers)
    with attention.around():
        yield


def jobs_by_attention(model: Any, call: Callable[[], object], names: Sequence[str]) -> Mapping[str, Jobs]:
    return forward_only({name: Job(call, partial(use_attention, model, ATTENTIONS[name])) for name in names})


def token_ids(model: Any, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, shape, generator=generator).to(model.device)


# ---- the programs ----------------------------------------------------------------------------------------------------


def prefill(setting: Setting) -> Mapping[str, Jobs]:
    """Compute the last token's logits of one prompt of 8k tokens."""
    model = language_model("Qwen3", TINY if setting.tiny else QWEN3_06B, setting.device, setting.dtype)
    ids = token_ids(model, 1, setting.size(8192))
    return jobs_by_attention(
        model, torch.inference_mode()(lambda: model(input_ids=ids, logits_to_keep=1).logits), setting.names
    )


def generation(setting: Setting, prompts: Sequence[int]) -> Mapping[str, Jobs]:
    """Decode greedily after left-padded prompts of these lengths.

    Only the first logits are compared: where two logits are almost equal, rounding decides, and the texts differ then.
    """
    model = language_model("Qwen3", TINY if setting.tiny else QWEN3_06B, setting.device, setting.dtype)
    lengths = torch.tensor([*map(setting.size, prompts)])
    mask = (torch.arange(int(lengths.max())) >= lengths.max() - lengths[:, None]).to(setting.device)
    inputs = {"input_ids": token_ids(model, *mask.shape) * mask, "attention_mask": mask.long()}
    options = dict(max_new_tokens=setting.size(NEW_TOKENS) + 1, do_sample=False, pad_token_id=0)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    return jobs_by_attention(model, lambda: model.generate(**inputs, **options).logits[0], setting.names)


def packed_step(setting: Setting) -> Mapping[str, Jobs]:
    """Run forward and backward of Llama over texts packed by position_ids, for which SDPA needs a dense mask.

    The optimizer is left out: it has no attention.
    """
    model = language_model("Llama", TINY if setting.tiny else LLAMA, setting.device, setting.dtype).train()
    lengths = [*map(setting.size, PACKED)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(setting.device)
    ids, weight = token_ids(model, *positions.shape), model.model.layers[0].self_attn.q_proj.weight

    def call() -> tuple[Tensor, Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        (loss * 1024.0).backward()  # keeps gradients in half precision from vanishing, as a GradScaler does
        return loss.detach(), weight.grad

    return jobs_by_attention(model, call, setting.names)


def diffusion_step(setting: Setting) -> Mapping[str, Jobs]:
    """Run one step of a UNet like Stable Diffusion 1.5's: 64 x 64 latents, 77 words. diffusers calls SDPA."""
    if importlib.util.find_spec("diffusers") is None:
        raise NotSupported("diffusers is not installed")
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    options: Options = TINY_UNET if setting.tiny else dict(sample_size=64, cross_attention_dim=768)
    with torch.device(setting.device):
        model = UNet2DConditionModel(**options).to(setting.dtype).eval()
        x = torch.randn(2, 4, options["sample_size"], options["sample_size"], dtype=setting.dtype)
        words = torch.randn(2, 77, options["cross_attention_dim"], dtype=setting.dtype)

    def call() -> Tensor:
        sample: Tensor = model(x, 500, words).sample
        return sample

    there = {name: ATTENTIONS[name] for name in setting.names if ATTENTIONS[name].in_transformers == "sdpa"}
    return forward_only({name: Job(torch.inference_mode()(call), each.around) for name, each in there.items()})


PROGRAMS: dict[str, Callable[[Setting], Mapping[str, Jobs]]] = {
    "qwen3-prefill": prefill,
    "qwen3-generate-1": partial(generation, prompts=[512]),
    "qwen3-generate-8": partial(generation, prompts=PADDED),
    "llama-packed-step": packed_step,
    "diffusion-step": diffusion_step,
}


def main(argv: list[str] | None = None) -> int:
    arguments, on_gpu = make_parser("end_to_end", __doc__), torch.cuda.is_available()
    arguments.add_argument("--device", default="cuda" if on_gpu else "cpu")
    arguments.add_argument("--dtype", choices=DTYPES, default="float16" if on_gpu else "float32")
    arguments.add_argument("--tiny", action="store_true", help="tiny shapes: does everything run?")
    arguments.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    arguments.add_argument("--implementations", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    options = arguments.parse_args(argv)
    # An installed flash-attn is a contestant itself. It must not compute the calls of ours too.
    os.environ.setdefault(settings.DISABLE_OFFICIAL, "1")
    if (settings.forced_capability() or (8, 0)) < (8, 0):
        disable_flash_kernels()
    there = [name for name in options.implementations if name != "flash-attn" or official()[0]]
    setting = Setting(options.device, DTYPES[options.dtype], options.tiny, there)
    contests = [Contest(name, partial(PROGRAMS[name], setting), setting.dtype) for name in options.programs]
    return run("end_to_end", contests, options, options.device, weigh=True)


if __name__ == "__main__":
    sys.exit(main())
