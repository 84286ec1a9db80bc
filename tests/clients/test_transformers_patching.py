"""When transformers is patched and where: before or after its import, in children, and back again; its registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import settings
from flash_attn_compat.dropin import attention_function
from flash_attn_compat.dropin.install import install
from tests.forms.inputs import UNSEEN
from tests.forms.support import Environment
from tests.tools.interpreters import WITHOUT_TORCH, forked, forked_child

pytest.importorskip("transformers", reason="transformers is not installed")

RUN_A_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2")
model(torch.arange(8)[None])
mask = torch.ones(2, 8, dtype=torch.long); mask[0, :3] = 0
model(torch.arange(8).repeat(2, 1), attention_mask=mask)
import flash_attn_compat
assert sum(flash_attn_compat.backend_counts().values()) == 2
"""
PATCH = "import flash_attn_compat; flash_attn_compat.patch()\n"
# Everything that patch() may touch in transformers, as values that can be compared.
STATE = """
import sys, flash_attn_compat
import transformers.utils, transformers.utils.import_utils as import_utils
import transformers.modeling_utils as modeling, transformers.modeling_flash_attention_utils as flash

def state():
    names = {}
    for module in (import_utils, transformers.utils, modeling, flash, modeling.PreTrainedModel):
        names.update({(module.__name__, name): value for name, value in vars(module).items() if "flash" in name})
    mapping = getattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", {}).get("flash_attn")
    registry = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    loaders = registry and list(registry.valid_keys()), getattr(flash, "_lazy_imports", None)
    return names, repr(getattr(flash, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)), mapping, loaders

def ours():
    return [finder for finder in sys.meta_path if "flash_attn_compat" in type(finder).__module__]
"""


def test_patch_is_enough_before_transformers_import_and_its_modules_lose_the_answer():
    ends_well(f"""
import flash_attn_compat
flash_attn_compat.patch(hub_kernels=True)
{RUN_A_MODEL}
{STATE}
assert flash.is_flash_attn_2_available()
has_hub_kernels = hasattr(flash, "FLASH_ATTN_KERNEL_FALLBACK")
assert hasattr(getattr(flash, "_lazy_imports", None), "__wrapped__") == has_hub_kernels
flash_attn_compat.unpatch()
assert not hasattr(getattr(flash, "_lazy_imports", None), "__wrapped__")
assert not has_hub_kernels or not [name for name in state()[-1][0] if "kernels-community" in name]
if not torch.cuda.is_available():  # with CUDA transformers needs no patching
    assert not flash.is_flash_attn_2_available() and not transformers.utils.is_flash_attn_2_available() and not ours()
    matrix = getattr(flash, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    assert matrix is None or not matrix[2]["general_availability_check"]()
    methods = vars(modeling.PreTrainedModel).values()
    homes = [getattr(method, "__globals__", {{}}).get("__name__", "") for method in methods]
    assert not [home for home in homes if "flash_attn_compat" in home]
""")


@pytest.mark.thorough  # between the two beside it
def test_patch_is_enough_after_the_package_was_imported():
    ends_well("import transformers\n" + PATCH + RUN_A_MODEL)


def test_patch_is_enough_after_models_were_imported_and_refused_and_unpatch_leaves_them_as_they_were():
    """Qwen2-VL's module of transformers 4.48 holds flash_attn_varlen_func = None where it found no flash-attn."""
    ends_well(f"""
from transformers.utils import is_flash_attn_2_available
without_cuda = not is_flash_attn_2_available()
from transformers import LlamaForCausalLM
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen
guarded = "flash_attn_varlen_func" in vars(qwen)
{STATE}
before = state()
{PATCH}
assert import_utils.is_flash_attn_2_available() and transformers.utils.is_flash_attn_2_available()
assert not guarded or qwen.flash_attn_varlen_func is flash_attn_compat.flash_attn_varlen_func
assert not without_cuda or (state() != before and ours())
{RUN_A_MODEL}
flash_attn_compat.unpatch()
assert state() == before and not ours()
assert not guarded or qwen.flash_attn_varlen_func is None
with flash_attn_compat.patched(hub_kernels=True):
    assert state()[-1] != before[-1] or not hasattr(flash, "FLASH_ATTN_KERNEL_FALLBACK")
assert state() == before
assert not without_cuda or not (import_utils.is_flash_attn_2_available() or flash.is_flash_attn_2_available())
""")


LOOK = "from transformers.utils import is_flash_attn_2_available as look; assert look()"
REGISTRY = """
import transformers.modeling_utils as modeling
registry = getattr(getattr(modeling, "AttentionInterface", None), "_global_mapping", None)
assert registry is None or "PagedAttentionCache" in registry["flash_attention_2"].__code__.co_consts
"""


def test_a_child_of_a_patched_process_needs_nothing_more_and_imports_no_torch_by_our_doing():
    code = f"{WITHOUT_TORCH}\nimport transformers.utils.import_utils; print('torch' in sys.modules)"
    alone = ends_well(code)
    with flash_attn_compat.patched(transformers=True):
        assert ends_well(f"{code}\n{LOOK}\n{REGISTRY}", forked_child) == alone != ""


def test_a_persistent_installation_needs_no_line_of_code_and_run_and_install_set_a_variable(tmp_path, monkeypatch):
    """It waits for transformers' import as a child of a patched process does."""
    environment = Environment(tmp_path / "env")
    install(environment.site_packages, transformers=True)
    show = "import os; print(os.environ.get('FLASH_ATTN_COMPAT_TRANSFORMERS'))"
    assert ends_well(f"{show}\n{LOOK}", environment.forked).strip() == "1"
    monkeypatch.setenv(settings.TRANSFORMERS, "0")
    assert environment.call("-c", show).stdout.strip() == "0"
    monkeypatch.delenv(settings.TRANSFORMERS)
    script = tmp_path / "job.py"
    script.write_text(f"import sys; print(sys.argv[1:])\n{show}")
    arguments = ["run", "--transformers", str(script), "--transformers"]
    told = ends_well(f"from flash_attn_compat import cli; cli.main({arguments!r})")
    assert told.splitlines() == ["['--transformers']", "1"]


def ends_well(code: str, way: Any = forked) -> str:
    """What the code prints in a process of its own."""
    answer = way(code)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def attend(*inputs, **options):
    return attention_function.attention(torch.nn.Module(), *inputs, **options)[0]


class TestRegistry:
    """register_with_transformers(): no patching, no name flash_attn."""

    @pytest.fixture(autouse=True)
    def registered(self):
        pytest.importorskip("transformers.masking_utils", reason="this transformers has no registry of masks")
        flash_attn_compat.register_with_transformers()

    def test_a_sequence_starts_at_the_lowest_position(self):
        q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        for positions, lengths in (
            ([0, 0, 1, 2, 3], [1, 4]),
            ([0, 1, 2, 3, 0], [4, 1]),
            ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
            ([2, 2, 3, 2, 3], [1, 2, 2]),  # RoBERTa's first position is behind its padding's
            ([7, 8, 0, 1, 2], [2, 3]),  # the first sequence lacks its beginning
            ([0, 1, 1, 1, 2], [5]),  # an image's tokens share a position
            ([0, 1, 2, 5, 6], [5]),
            ([4, 5, 6, 7, 8], [5]),
        ):
            each = zip(*(x.split(lengths, dim=2) for x in (q, k, v)))
            expected = torch.cat([attend(*parts, None, is_causal=True) for parts in each], dim=1)
            found = attend(q, k, v, None, position_ids=torch.tensor([positions]), is_causal=True)
            torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("seqlen_q", [5, 2])
    def test_padding_of_as_many_queries_as_keys_hands_over_one_tensor_of_starts(self, seqlen_q, monkeypatch):
        q, k, v = torch.randn(2, 2, seqlen_q, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
        mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
        handed = []
        varlen = attention_function.flash_attn_varlen_func
        monkeypatch.setattr(
            attention_function, "flash_attn_varlen_func", lambda *a, **kw: handed.append(a) or varlen(*a, **kw)
        )
        out = attend(q, k, v, mask, is_causal=True)
        assert (handed[0][3] is handed[0][4]) == (seqlen_q == 5)
        for b, skipped in enumerate((2, 1)):
            rows = q[b : b + 1, :, max(0, seqlen_q - 5 + skipped) :]
            right = attend(rows, k[b : b + 1, :, skipped:], v[b : b + 1, :, skipped:], None, is_causal=True)
            torch.testing.assert_close(out[b : b + 1, -rows.shape[2] :], right)

    @pytest.mark.parametrize("seqlen_q", [3, 5, 7])
    def test_queries_of_another_text_than_the_padded_keys_are_all_answered(self, seqlen_q):
        q, k, v = torch.randn(2, 2, seqlen_q, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
        out = attend(q, k, v, torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]), is_causal=False)
        for b, length in enumerate((3, 5)):
            alone = (slice(b, b + 1), slice(None), slice(length))
            right = attend(q[b : b + 1], k[alone], v[alone], None, is_causal=False)
            torch.testing.assert_close(out[b : b + 1], right)
        with pytest.raises(ValueError, match="covers fewer tokens than the 7 queries"):
            attend(torch.randn(2, 2, 7, 8), k, v, torch.ones(2, 5), is_causal=True)

    def test_lengths_are_read_once_for_all_layers(self, monkeypatch):
        from tests.clients.models import build, run, token_ids

        asked, read = [], attention_function._read_starts
        monkeypatch.setattr(attention_function, "_waits_for_gpu", lambda tensor: True)
        monkeypatch.setattr(attention_function, "_read_starts", lambda starts: asked.append(starts) or read(starts))
        model = build("llama", "fa2_compat")
        run(model, {"input_ids": token_ids(1, 8), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])})
        assert len(asked) == 1 < model.config.num_hidden_layers

    def test_the_mask_is_read_without_synchronisation(self):
        attention_function._Tokens.from_mask(torch.ones(2, 5, device="meta"))  # which has no numbers to wait for

    @pytest.mark.parametrize("how", UNSEEN)
    def test_a_mask_and_positions_that_change_are_read_again_however_they_change(self, how):
        q = torch.randn(1, 2, 5, 8)
        mask, positions = torch.tensor([[0, 1, 1, 1, 1]]), torch.arange(5)[None]

        def found():
            padded = attend(q, q, q, mask, is_causal=True)
            return padded[:, 2:], attend(q, q, q, None, position_ids=positions, is_causal=True)[:, 2:]

        before = found()
        UNSEEN[how](mask, torch.tensor([[0, 0, 1, 1, 1]]))
        UNSEEN[how](positions, torch.tensor([[0, 1, 0, 1, 2]]))
        right = attend(*[q[:, :, 2:]] * 3, None, is_causal=True)
        for old, new in zip(before, found()):
            torch.testing.assert_close(new, right)
            assert not torch.equal(old, new)

    @pytest.mark.parametrize("how", UNSEEN)
    def test_positions_that_are_remembered_are_never_believed_blindly(self, how, monkeypatch):
        monkeypatch.setattr(attention_function, "_waits_for_gpu", lambda tensor: True)
        q, positions = torch.randn(1, 2, 5, 8), torch.arange(5)[None]
        attend(q, q, q, None, position_ids=positions, is_causal=True)
        UNSEEN[how](positions, torch.arange(5)[None] + 7)  # still one sequence
        attend(q, q, q, None, position_ids=positions, is_causal=True)
        UNSEEN[how](positions, torch.tensor([[0, 1, 0, 1, 2]]))
        if how != "in place":
            with pytest.raises(RuntimeError, match="other sequences than before"):
                attend(q, q, q, None, position_ids=positions, is_causal=True)
            return
        found = attend(q, q, q, None, position_ids=positions, is_causal=True)
        torch.testing.assert_close(found[:, 2:], attend(*[q[:, :, 2:]] * 3, None, is_causal=True))

    def test_masks_remembered_in_inference_mode_are_not_used_in_training(self):
        q = torch.randn(2, 2, 4, 8, requires_grad=True)
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        with torch.inference_mode():
            attend(q, q, q, mask, is_causal=True)
        attend(q, q, q, mask, is_causal=True).sum().backward()
        assert q.grad is not None

    def test_a_name_that_would_be_looked_up_on_the_hub_is_refused(self):
        with pytest.raises(ValueError, match="must not contain 'flash'"):
            flash_attn_compat.register_with_transformers("flash_compat")
