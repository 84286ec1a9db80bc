"""Transformer blocks in flash-attn's order: dropout, add and norm come first, and the residual is passed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn_compat.modules.mha import MHA
from flash_attn_compat.modules.mlp import Mlp
from flash_attn_compat.ops.triton.layer_norm import RMSNorm, layer_norm_fn

__all__ = ["MHA", "Block", "Mlp", "ParallelBlock", "RMSNorm", "StochasticDepth", "layer_norm_fn"]

ModuleFactory = Callable[..., nn.Module]


class StochasticDepth(nn.Module):
    """Drop whole samples of a residual branch in training (Huang et al. 2016), as torchvision's does.

    Args:
        p: probability of dropping.
        mode: "row" draws for each sample of the first axis, "batch" once for all.
    """

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p must lie between 0 and 1, got {p}")
        if mode not in ("batch", "row"):
            raise ValueError(f'mode must be "batch" or "row", got {mode!r}')
        self.p = p
        self.mode = mode

    def forward(self, input: Tensor) -> Tensor:
        """input times 0 or 1 / (1 - p); input itself in evaluation."""
        if not self.training or self.p == 0.0:
            return input
        drawn = input.shape[0] if self.mode == "row" else 1
        kept = input.new_empty((drawn,) + (1,) * (input.dim() - 1)).bernoulli_(1.0 - self.p)
        return input * (kept.div_(1.0 - self.p) if self.p < 1.0 else kept)


class _WithMixer(nn.Module):
    mixer: nn.Module

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """Return the mixer's cache; see `MHA.allocate_inference_cache`."""
        mixer: Any = self.mixer
        return mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


class Block(_WithMixer):
    """Mixer and MLP with residual connections.

    prenorm: dropout, add, norm, mixer, dropout, add, norm, MLP; takes and returns (hidden_states, residual), which
    the next block adds. Otherwise: mixer, dropout, add, norm, MLP, dropout, add, norm.

    Args:
        dim: size of the last axis.
        mixer_cls, mlp_cls, norm_cls: called with dim; MHA with heads of 64 and Mlp of 4 * dim by default.
            nn.Identity as mlp_cls leaves the second half out.
        dropout_cls: called with resid_dropout1 and resid_dropout2.
        drop_path1, drop_path2: stochastic depth of the two branches.
        fused_dropout_add_ln: add and normalise in fp32 without rounding in between, through `layer_norm_fn`.
        return_residual: mixer and MLP return (output, their input); post-norm only.
        residual_in_fp32: keep the residual in fp32; prenorm only.
        sequence_parallel, mark_shared_params: mark the norms' parameters for `utils.distributed`.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: ModuleFactory | None = None,
        mlp_cls: ModuleFactory | None = None,
        norm_cls: ModuleFactory = nn.LayerNorm,
        dropout_cls: ModuleFactory = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        assert prenorm or not residual_in_fp32, "residual_in_fp32 is only compatible with prenorm=True"
        self.prenorm = prenorm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.return_residual = return_residual
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = _default_mixer(dim) if mixer_cls is None else mixer_cls(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.drop_path1 = StochasticDepth(drop_path1, mode="row")
        self.norm1 = norm_cls(dim)
        self.mlp = _default_mlp(dim) if mlp_cls is None else mlp_cls(dim)
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2 = dropout_cls(resid_dropout2)
            self.drop_path2 = StochasticDepth(drop_path2, mode="row")
            self.norm2 = norm_cls(dim)
        if fused_dropout_add_ln:
            _check_fusable(self)
        _mark_norms(self, sequence_parallel, mark_shared_params)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            hidden_states: (..., dim).
            residual: (..., dim), prenorm only; None in the first block.
            mixer_subset: which tokens have queries, for cross-attention; prenorm only.
            mixer_kwargs: passed to the mixer.
        Returns:
            (hidden_states, residual) with prenorm, else hidden_states.
        """
        options = dict(mixer_kwargs or {})
        has_mlp = not isinstance(self.mlp, nn.Identity)
        if self.prenorm:
            if mixer_subset is not None:
                options["mixer_subset"] = mixer_subset
            hidden_states, residual = self._add_and_norm(
                hidden_states, residual, self.dropout1, self.drop_path1, self.norm1
            )
            hidden_states = self.mixer(hidden_states, **options)
            if mixer_subset is not None:
                residual = residual[:, mixer_subset]
            if has_mlp:
                hidden_states, residual = self._add_and_norm(
                    hidden_states, residual, self.dropout2, self.drop_path2, self.norm2
                )
                hidden_states = self.mlp(hidden_states)
            return hidden_states, residual
        assert residual is None, "residual is for prenorm=True"
        out, hidden_states = self._run_branch(self.mixer, hidden_states, options)
        hidden_states, _ = self._add_and_norm(out, hidden_states, self.dropout1, self.drop_path1, self.norm1)
        if has_mlp:
            out, hidden_states = self._run_branch(self.mlp, hidden_states, {})
            hidden_states, _ = self._add_and_norm(out, hidden_states, self.dropout2, self.drop_path2, self.norm2)
        return hidden_states

    def _run_branch(self, branch: nn.Module, hidden_states: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the branch's output and the tensor to add it to."""
        out = branch(hidden_states, **options)
        return out if self.return_residual else (out, hidden_states)

    def _add_and_norm(
        self, branch: Tensor, residual: Tensor | None, dropout: nn.Module, drop_path: nn.Module, norm: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum) of the residual and the branch after dropout."""
        if not self.fused_dropout_add_ln:
            total = drop_path(dropout(branch))
            return _normalise(norm, total if residual is None else total + residual, self.residual_in_fp32)
        rowscale = None
        if self.training and drop_path.p != 0.0:
            rowscale = drop_path(branch.new_ones(branch.shape[:-1]))
        results: Any = layer_norm_fn(
            branch,
            norm.weight,
            norm.bias,
            residual=residual,
            rowscale=rowscale,
            prenorm=self.prenorm,
            **_fused_options(self, norm, dropout),
        )
        return results if self.prenorm else (results, results)


class ParallelBlock(_WithMixer):
    """Mixer and MLP side by side, as in GPT-J and PaLM: dropout, add and norm, then both.

    Args:
        tied_norm: one norm for both branches.
        Others: as `Block`.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: ModuleFactory | None = None,
        mlp_cls: ModuleFactory | None = None,
        norm_cls: ModuleFactory = nn.LayerNorm,
        dropout_cls: ModuleFactory = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = _default_mixer(dim) if mixer_cls is None else mixer_cls(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.norm1 = norm_cls(dim)
        self.mlp = _default_mlp(dim) if mlp_cls is None else mlp_cls(dim)
        self.dropout2 = dropout_cls(resid_dropout2)
        if not tied_norm:
            self.norm2 = norm_cls(dim)
        if fused_dropout_add_ln:
            _check_fusable(self)
        _mark_norms(self, sequence_parallel, mark_shared_params)

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            hidden_states1: (..., dim), the previous mixer's output, or the embeddings.
            hidden_states2: (..., dim), the previous MLP's output; None in the first block.
            residual: (..., dim); None in the first block.
            mixer_kwargs: passed to the mixer.
        Returns:
            (mixer's output, MLP's output, residual).
        """
        # The fused path has one dropout probability (flash-attn's uses the first branch's for both branches).
        one_probability = hidden_states2 is None or self._dropout_p(self.dropout1) == self._dropout_p(self.dropout2)
        if self.fused_dropout_add_ln and one_probability:
            normed1, normed2, residual = self._normalise_fused(hidden_states1, hidden_states2, residual)
        else:
            total = self.dropout1(hidden_states1)
            total = total if residual is None else residual + total
            total = total if hidden_states2 is None else total + self.dropout2(hidden_states2)
            normed1, residual = _normalise(self.norm1, total, self.residual_in_fp32)
            normed2 = normed1 if self.tied_norm else _normalise(self.norm2, total, False)[0]
        return self.mixer(normed1, **(mixer_kwargs or {})), self.mlp(normed2), residual

    def _normalise_fused(
        self, hidden_states1: Tensor, hidden_states2: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        first: Any = self.norm1
        second: Any = None if self.tied_norm else self.norm2
        results: Any = layer_norm_fn(
            hidden_states1,
            first.weight,
            first.bias,
            residual=residual,
            x1=hidden_states2,
            weight1=None if second is None else second.weight,
            bias1=None if second is None else second.bias,
            prenorm=True,
            **_fused_options(self, first, self.dropout1),
        )
        return results[0], results[0] if second is None else results[1], results[-1]

    def _dropout_p(self, dropout: nn.Module) -> float:
        return dropout.p if self.training and isinstance(dropout, nn.Dropout) else 0.0


def _default_mixer(dim: int) -> nn.Module:
    return MHA(dim, num_heads=dim // 64)


def _default_mlp(dim: int) -> nn.Module:
    return Mlp(dim, hidden_features=4 * dim)


def _normalise(norm: Any, total: Tensor, residual_in_fp32: bool) -> tuple[Tensor, Tensor]:
    """Return (norm(total) in the norm's dtype, total)."""
    normed = norm(total.to(dtype=norm.weight.dtype))
    return normed, total.to(torch.float32) if residual_in_fp32 else total


def _fused_options(block: Block | ParallelBlock, norm: Any, dropout: Any) -> dict[str, Any]:
    return {
        "eps": norm.eps,
        "dropout_p": dropout.p if block.training else 0.0,
        "residual_in_fp32": block.residual_in_fp32,
        "is_rms_norm": isinstance(norm, RMSNorm),
        # flash-attn's fused block does not pass this option on.
        "zero_centered_weight": getattr(norm, "zero_centered_weight", False),
    }


def _check_fusable(block: Block | ParallelBlock) -> None:
    assert isinstance(block.norm1, (nn.LayerNorm, RMSNorm)) and isinstance(block.dropout1, nn.Dropout), (
        "fused_dropout_add_ln needs norm_cls to be nn.LayerNorm or RMSNorm, and dropout_cls nn.Dropout; "
        f"got {type(block.norm1).__name__} and {type(block.dropout1).__name__}"
    )


def _mark_norms(block: nn.Module, sequence_parallel: bool, shared: bool) -> None:
    for name in ("norm1", "norm2"):
        norm = getattr(block, name, None)
        for parameter in () if norm is None else norm.parameters():
            if sequence_parallel:
                parameter._sequence_parallel = True
            if shared:
                parameter._shared_params = True
