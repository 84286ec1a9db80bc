"""The programs by name."""

from __future__ import annotations

from functools import partial

from benchmarks.end_to_end import diffusion, language_models, paged
from benchmarks.end_to_end.language_models import GEMMA2, QWEN3_06B
from benchmarks.end_to_end.program import Program

PROGRAMS: dict[str, Program] = {
    "qwen3-prefill": partial(language_models.prefill, family="Qwen3", real=QWEN3_06B),
    "qwen3-generate-1": partial(language_models.generation, prompts=[512]),
    "qwen3-generate-8": partial(language_models.generation, prompts=[512, 64, 400, 256, 128, 320, 96, 480]),
    "gemma2-prefill": partial(language_models.prefill, family="Gemma2", real=GEMMA2),
    "modernbert-forward": partial(language_models.encoder, with_backward=False),
    "modernbert-step": partial(language_models.encoder, with_backward=True),
    "llama-step-positions": partial(language_models.decoder_step, with_lengths=False),
    "llama-step-collator": partial(language_models.decoder_step, with_lengths=True),
    "diffusion-blocks": diffusion.prepare,
    "paged-prefix": paged.prefix,
    "paged-decode": paged.decode,
}
