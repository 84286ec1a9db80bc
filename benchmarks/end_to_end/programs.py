"""The programs by name."""

from __future__ import annotations

from benchmarks.end_to_end import diffusion, language_models, paged
from benchmarks.end_to_end.language_models import GEMMA2, QWEN3_06B
from benchmarks.end_to_end.program import Program

PROGRAMS: dict[str, Program] = {
    "qwen3-prefill": language_models.prefill("Qwen3", QWEN3_06B),
    "qwen3-generate-1": language_models.generation([512]),
    "qwen3-generate-8": language_models.generation([512, 64, 400, 256, 128, 320, 96, 480]),
    "gemma2-prefill": language_models.prefill("Gemma2", GEMMA2),
    "modernbert-forward": language_models.encoder(with_backward=False),
    "modernbert-step": language_models.encoder(with_backward=True),
    "llama-step-positions": language_models.decoder_step(with_lengths=False),
    "llama-step-collator": language_models.decoder_step(with_lengths=True),
    "diffusion-blocks": diffusion.prepare,
    "paged-prefix": paged.prefix(),
    "paged-decode": paged.decode(),
}
