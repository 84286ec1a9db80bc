"""patch(sdpa=True), patch(flex=True) and patch(varlen_attn=True) switch PyTorch's attention on; nothing else does."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import flash_attn_compat
from flash_attn_compat import cli, settings
from flash_attn_compat.dropin import install, patch, patched, unpatch
from tests.dropin.environment import Environment
from tests.dropin.test_detection import CALL
from tests.forms.inputs import cumulative, randn
from tests.forms.plain import attention, check_function
from tests.tools.interpreters import WITHOUT_TORCH, forked, forked_child

WAITS = "import _flash_attn_compat_startup as startup; print('torch' in startup._awaited)"


class Switch:
    """One of the two: its name, its variable, and what a process prints of the wish in force."""

    def __init__(self, name: str) -> None:
        self.name, self.variable = name, f"FLASH_ATTN_COMPAT_{name.upper()}"
        self.home = f"flash_attn_compat.torch_{name}.override"
        before = "import torch, sys" if name == "sdpa" else "import torch.nn.attention.flex_attention, sys"
        self.look = f"{before}; m = sys.modules.get({self.home!r}); w = m and m.active_policy(); print(w and w.always)"

    def on(self, wanted: Any) -> dict[str, Any]:
        return {self.name: wanted}

    def wish(self) -> bool | None:
        """None: off; False: on; True: always."""
        found = importlib.import_module(self.home).active_policy()
        return None if found is None else found.always


@pytest.fixture(params=["sdpa", "flex"])
def switch(request: pytest.FixtureRequest) -> Iterator[Switch]:
    if request.param == "sdpa" and "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        pytest.skip("before PyTorch 2.5 the operators stay PyTorch's")
    if request.param == "flex" and TorchVersion(torch.__version__) < "2.6":
        pytest.skip("flex needs PyTorch 2.6")
    if request.param == "flex":
        importlib.import_module("torch.nn.attention.flex_attention")  # which patch() waits for
    made = Switch(request.param)
    yield made
    unpatch()
    assert made.wish() is None


def test_patch_alone_switches_nothing_on(switch: Switch) -> None:
    patch()
    assert switch.wish() is None and switch.variable not in os.environ


@pytest.mark.parametrize("wanted", [True, 1])
def test_patch_switches_it_on_and_unpatch_off(switch: Switch, wanted: Any) -> None:
    patch(**switch.on(wanted))
    assert switch.wish() is False and os.environ[switch.variable] == "1"
    unpatch()
    assert switch.wish() is None and switch.variable not in os.environ


def test_a_second_patch_may_ask_for_more_and_never_for_less(switch: Switch) -> None:
    patch()
    for wanted in (True, True, "always"):
        patch(**switch.on(wanted))
    assert switch.wish() is True and os.environ[switch.variable] == "always"
    patch(**switch.on(True))
    assert switch.wish() is True and os.environ[switch.variable] == "always"


def test_a_block_of_patched_ends_it(switch: Switch) -> None:
    with patched(**switch.on("always")):
        assert switch.wish() is True
    assert switch.wish() is None


def test_a_block_within_a_patch_leaves_it_on(switch: Switch) -> None:
    patch(**switch.on(True))
    with getattr(flash_attn_compat, switch.name)(always=True):
        assert switch.wish() is True
    assert switch.wish() is False


@pytest.mark.parametrize(("value", "wanted"), [("1", False), ("always", True), ("0", None), ("", None)])
def test_the_variable_speaks_for_patch(
    switch: Switch, value: str, wanted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.variable, value)
    patch()
    assert switch.wish() is wanted


def test_an_unknown_setting_is_refused(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f'{switch.name} must be False, True or "always"'):
        patch(**switch.on("sometimes"))
    monkeypatch.setenv(switch.variable, "on")
    with pytest.raises(ValueError, match=f"{switch.variable} must be 0, 1 or always, got 'on'"):
        patch()


def test_the_variable_alone_loads_nothing_of_it(switch: Switch) -> None:
    answer = forked("import flash_attn_compat\n" + switch.look, **{switch.variable: "1"})
    assert answer.stdout.strip() == "None", answer.stderr


def test_children_of_a_patched_process_wait_for_torch_too(switch: Switch) -> None:
    patch(**switch.on("always"))
    answer = forked_child(f"{WITHOUT_TORCH}\nassert 'torch' not in sys.modules\n{switch.look}")
    assert answer.stdout.strip() == "True", answer.stderr


def test_patch_waits_for_torch() -> None:
    code = f"""
{WITHOUT_TORCH}
import flash_attn_compat
flash_attn_compat.patch(sdpa="always")
assert "torch" not in sys.modules
{Switch("sdpa").look}
flash_attn_compat.unpatch()
print(m.active_policy())
"""
    answer = forked(code)
    assert answer.stdout.split() == ["True", "None"], answer.stderr


def test_run_takes_it_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"import sys\nprint(sys.argv[1:])\n{WAITS}")
    for option, wanted in ((["--sdpa=always"], "True"), ([], "False")):
        arguments = ["run", *option, str(script), "--sdpa"]
        answer = forked(f"from flash_attn_compat import cli; cli.main({arguments!r})")
        assert answer.stdout.splitlines() == ["['--sdpa']", wanted], answer.stderr
    arguments = ["run", "--flex=always", "script.py", "--flex"]
    assert cli._parse_run_options(arguments)[-1] == "always" and arguments == ["run", "script.py", "--flex"]


def test_install_writes_it_for_every_process_and_the_variable_overrules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment(tmp_path / "env")
    assert environment.command("install", "--sdpa").returncode == 0
    answer = environment.forked(Switch("sdpa").look)
    assert answer.stdout.strip() == "False", answer.stderr
    for value, wanted in (("1", "True"), ("0", "False")):
        monkeypatch.setenv(settings.SDPA, value)
        assert environment.call("-c", WAITS).stdout.strip() == wanted


def test_the_line_that_install_writes(tmp_path: Path) -> None:
    for options, wanted in (
        ({}, ""), ({"sdpa": "1"}, "'1'"), ({"sdpa": "always"}, "'always'"),
        ({"sdpa": "1", "flex": "always"}, "'1', flex='always'"),
    ):  # fmt: skip
        install.install(tmp_path, **options)
        line = (tmp_path / "_flash_attn_compat_startup.pth").read_text()
        assert line.endswith(f".wait_for_imports({wanted})\n")


# ------------------------------------------------------------- torch.nn.attention.varlen, against attention written out

HOME = "torch.nn.attention.varlen"
varlen: Any = importlib.import_module(HOME) if importlib.util.find_spec(HOME) else None


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.6", reason="flex needs PyTorch 2.6")
@pytest.mark.parametrize("flex", [None, "1"])
def test_an_installation_of_flex_switches_it_on_at_the_import_and_doctor_says_so(
    flex: str | None, tmp_path: Path
) -> None:
    environment = Environment(tmp_path)
    install.install(environment.site_packages, flex=flex)
    told = "from flash_attn_compat import doctor; print(doctor._explain_flex(torch.device('cpu')))"
    answer = environment.forked(f"{Switch('flex').look}\n{told}")
    on, said = answer.stdout.splitlines()
    assert on == ("False" if flex else "None"), answer.stderr
    assert f"'switched on': '{'yes' if flex else 'no ('}" in said


has_varlen = pytest.mark.skipif(varlen is None, reason=f"{HOME} came with torch 2.10")
varlen_attn: Any = getattr(varlen, "varlen_attn", None)

H, HK, D = 4, 2, 16
LENGTHS = (3, 6, 1)
STARTS = cumulative(*LENGTHS)
arguments = inspect.signature(varlen_attn).parameters if varlen else {}


def needs(*names: str) -> Any:
    missing = [name for name in names if name not in arguments]
    return pytest.mark.skipif(bool(missing), reason=f"this torch's varlen_attn has no {missing}")


@pytest.fixture
def varlen_served() -> None:
    patch(varlen_attn=True)


def each(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    parts = zip(*(t[None].split(LENGTHS, dim=1) for t in (q, k, v)))
    return torch.cat([attention(*part, **options)[0] for part in parts])


def packed_inputs(dtype: torch.dtype = torch.float32, heads_k: int = H) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(LENGTHS)
    return tuple(randn(total, h, D, seed=s, dtype=dtype) for s, h in enumerate((H, heads_k, heads_k)))  # type: ignore[return-value]


@has_varlen
def test_without_being_asked_nothing_changes() -> None:
    patch()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(*packed_inputs(torch.float16), STARTS, STARTS, 6, 6)


# options of varlen_attn, and of attention; causal is a window of (-1, 0) here
OPTIONS: list[Any] = [
    ({}, {}),
    *(
        pytest.param({"window_size": window}, {"window": window}, marks=needs("window_size"))
        for window in ((-1, 0), (2, 0), (1, 2))
    ),
    pytest.param({"scale": 0.3, "enable_gqa": True}, {"scale": 0.3}, marks=needs("enable_gqa")),
]


@has_varlen
@pytest.mark.usefixtures("varlen_served")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("options", "plain"), OPTIONS)
def test_values_and_gradients(dtype: torch.dtype, options: dict[str, Any], plain: dict[str, Any]) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, STARTS, STARTS, 6, 6, **options)

    given = packed_inputs(dtype, HK if "enable_gqa" in options else H)
    check_function(ours, lambda *given: each(*given, **plain), *given, epsilons=4)


@has_varlen
@pytest.mark.usefixtures("varlen_served")
def test_the_log_sum_exp_comes_along() -> None:
    q, k, v = packed_inputs()
    out, lse = varlen_attn(q, k, v, STARTS, STARTS, 6, 6, return_aux=varlen.AuxRequest(lse=True))
    parts = zip(q.split(LENGTHS), k.split(LENGTHS))
    expected = [torch.einsum("thd,shd->hts", a, b).mul(D**-0.5).logsumexp(-1) for a, b in parts]
    torch.testing.assert_close(lse, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, each(q, k, v), rtol=1e-4, atol=1e-5)


@has_varlen
@needs("block_table")
@pytest.mark.usefixtures("varlen_served")
@pytest.mark.parametrize("with_starts", [False, True])
def test_pages_and_used_lengths_are_read(with_starts: bool) -> None:
    page, used = 256, torch.tensor([5, 300], dtype=torch.int32)
    q = randn(3, H, D)
    keys, values = randn(4, page, H, D, seed=1), randn(4, page, H, D, seed=2)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    starts_q, starts_k = cumulative(1, 2), cumulative(5, 300) if with_starts else None
    out = varlen_attn(
        q, keys, values, starts_q, starts_k, 2, 300, window_size=(-1, 0), seqused_k=used, block_table=table
    )
    for i, rows in enumerate(q.split((1, 2))):
        k, v = (t[table[i]].flatten(0, 1)[None, : used[i]] for t in (keys, values))
        right = attention(rows[None], k, v, window=(-1, 0))[0]
        torch.testing.assert_close(out.split((1, 2))[i], right, rtol=1e-4, atol=1e-5)


@has_varlen
@pytest.mark.usefixtures("varlen_served")
@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_a_given_output_is_written() -> None:
    q, k, v = packed_inputs()
    out = torch.full_like(q, 7.0)
    assert varlen.varlen_attn_out(out, q, k, v, STARTS, STARTS, 6, 6) is out
    torch.testing.assert_close(out, each(q, k, v), rtol=1e-4, atol=1e-5)


@has_varlen
@pytest.mark.usefixtures("varlen_served")
@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_a_given_output_that_overlaps_itself_is_refused_unwritten() -> None:
    q, k, v = packed_inputs()
    out = torch.zeros_like(q)
    out = out.as_strided(out.shape, (out.stride(0) - 1, *out.stride()[1:]))
    with pytest.raises(RuntimeError, match="out must not overlap itself"):
        varlen.varlen_attn_out(out, q, k, v, STARTS, STARTS, 6, 6)
    assert not out.any()


@has_varlen
@pytest.mark.usefixtures("varlen_served")
def test_a_compiled_graph_holds_the_operator() -> None:
    leaves = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in packed_inputs()]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, STARTS, STARTS, 6, 6).sin().sum()

    expected = torch.autograd.grad(each(*leaves).sin().sum(), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, right in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@has_varlen
@needs("num_splits")
@pytest.mark.usefixtures("varlen_served")
def test_a_promise_that_we_do_not_keep_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="does not promise the same bits in every batch"):
        varlen_attn(*packed_inputs(), STARTS, STARTS, 6, 6, num_splits=1)


@has_varlen
def test_it_ends_with_unpatch_and_can_be_asked_for_later() -> None:
    patch()
    patch(varlen_attn=True)
    varlen_attn(*packed_inputs(), STARTS, STARTS, 6, 6)
    unpatch()
    with pytest.raises(NotImplementedError):
        varlen_attn(*packed_inputs(torch.float16), STARTS, STARTS, 6, 6)


@has_varlen
@pytest.mark.parametrize("variables", [{}, {"FLASH_ATTN_COMPAT_VARLEN_ATTN": "1"}], ids=["asked", "by the variable"])
def test_it_is_served_where_it_is_imported_later(variables: dict[str, str]) -> None:
    answer = forked(f"import flash_attn_compat as c; c.patch(varlen_attn={not variables}); {CALL}", **variables)
    assert answer.stdout.strip() == "16.0", answer.stderr
