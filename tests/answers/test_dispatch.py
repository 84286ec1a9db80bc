"""The choice of the backend, named backends, the error if none can serve a call, and a backend of one's own."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import (
    BackendNotSupported,
    backend_counts,
    backends,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    reset_backend_counts,
    settings,
    use_backend,
)
from flash_attn_compat.backends import BACKENDS, Backend
from flash_attn_compat.backends.base import FLOAT_DTYPES, Capabilities
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core import features
from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.features import Feature, Traits, all_but, split
from flash_attn_compat.core.inputs import DenseInputs
from flash_attn_compat.dispatch import call_cache
from tests.forms.inputs import cumulative, qkv
from tests.forms.support import serve_by
from tests.tools.test_docs import ROOT, blocks
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import KINDS

NAMES = [backend.name for backend in BACKENDS]


@pytest.fixture(autouse=True)
def _counts_start_at_zero() -> None:
    reset_backend_counts()


def counted() -> dict[str, int]:
    return {name: count for name, count in backend_counts().items() if count}


def test_the_backends_have_their_documented_order() -> None:
    page = (Path(__file__).parents[2] / "docs/dispatch.md").read_text(encoding="utf-8")
    listed, table = page.partition("By default ")[2].partition(". ")[0], page.partition("| backend |")[2]
    assert re.findall(r"`(\w+)`", listed) == NAMES
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == NAMES


def test_use_backend_ends_with_its_block_and_does_not_reach_other_threads() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        thread = threading.Thread(target=lambda: flash_attn_func(*qkv()))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    flash_attn_func(*qkv())
    assert sum(counted().values()) == 2 and "reference" not in counted()


@pytest.mark.parametrize("forced", [None, "chunked", "reference"])
def test_backends_behind_the_serving_one_are_not_asked(forced: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed and not wanted costs nothing: the real flash-attn takes seconds to load."""
    q, k, v = qkv()
    call = checked_call(DenseInputs(q, k, v))
    ordered = sorted(BACKENDS, key=lambda backend: backend.rank(call.traits()))
    served = forced or next(backend.name for backend in ordered if not backend.reasons(call.traits()))
    asked: list[str] = []
    for backend in BACKENDS:

        def reasons(traits: Traits, backend: Backend = backend) -> list[str]:
            asked.append(backend.name)
            return type(backend).reasons(backend, traits)

        monkeypatch.setattr(backend, "reasons", reasons)
    call_cache.forget()
    with use_backend(forced) if forced else contextlib.nullcontext():
        flash_attn_func(q, k, v)
    names = [backend.name for backend in ordered]
    assert asked == ([forced] if forced else names[: names.index(served) + 1])


def test_use_backend_of_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=".*".join(("'fast'", *NAMES))), use_backend("fast"):
        pass


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("BACKEND", "fast", "official.*chunked"),
        ("CAPABILITY", "turing", "7.5"),
        ("CAPABILITY", "7.5.1", "7.5"),
        ("COMPILE", "2", "0 or 1"),
        *(
            (name.removeprefix(settings.PREFIX), "yes", " or ".join(choices))
            for name, (choices, _, read_by) in settings.VARIABLES.items()
            if len(choices) == 2 and read_by == "call"
        ),
    ],
)
@pytest.mark.parametrize("call", [flash_attn_func, partial(explain, flash_attn_func)], ids=["call", "explain"])
def test_a_value_that_means_nothing_is_an_error_that_names_the_choices_on_any_machine(
    call: Any, name: str, value: str, choices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attn_func(*qkv())  # the decision for such calls is known
    monkeypatch.setenv(f"FLASH_ATTN_COMPAT_{name}", value)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"FLASH_ATTN_COMPAT_{name} must be .*{choices}.*'{value}'"):
            call(*qkv())


@pytest.mark.parametrize("name", [name for name, variable in settings.VARIABLES.items() if variable.choices])
def test_the_check_of_settings_refuses_a_wrong_value_of_every_variable_with_choices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ValueError, match=f"{name} must be .*{settings.VARIABLES[name].choices[-1]}.* got 'yes'"):
        settings.check()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("75", "did you mean 7.5?"),
        ("sm_90", "did you mean 9.0?"),
        ("7.55", "did you mean 7.5?"),
        ("\u0667.\u0665", "did you mean 7.5?"),  # as Arabic writes it
        ("7", "did you mean 7.0 or 7.2 or 7.5?"),
        ("7.5.1", "did you mean 7.5?"),
        ("0", ""),
        ("99.9", ""),
    ],
)
def test_an_unknown_capability_lists_the_known_ones(text: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", text)
    with pytest.raises(ValueError, match=r"one of 5\.0, 5\.2, .* 7\.5, .* 12\.1; got") as refused:
        flash_attn_func(*qkv())
    assert str(refused.value).endswith(meant or repr(text))


@pytest.mark.parametrize("text", settings.CAPABILITIES)
def test_every_capability_that_exists_can_be_forced(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", text)
    assert settings.forced_capability() == tuple(map(int, text.split(".")))


@pytest.mark.parametrize("name", settings.VARIABLES)
def test_an_empty_value_counts_as_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[object]:
        return [explain(flash_attn_func, *qkv()), settings.value_of(name), settings.forced_capability()]

    monkeypatch.delenv(name, raising=False)
    unset = answers()
    monkeypatch.setenv(name, "")
    assert answers() == unset


def test_a_forced_capability_is_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_device_name", lambda device: "Tesla T4")
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)
    assert settings.gpu(torch.device("cuda", 1)) == "Tesla T4" and settings.gpu(torch.device("cpu")) is None
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    assert settings.gpu(torch.device("cuda", 1)) == "Tesla T4 as 7.5"


def test_the_refusal_says_all_that_every_backend_has_against_the_call() -> None:
    with use_backend("sdpa"), pytest.raises(BackendNotSupported) as refusal:
        flash_attn_func(*qkv(), softcap=2.0, dropout_p=0.1)
    told = dict(line.split(maxsplit=1) for line in str(refusal.value).splitlines()[1:])
    assert list(told) == NAMES and "softcap" in told["sdpa"] and "dropout" in told["sdpa"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shown where PyTorch alone computes it")
def test_explaining_pytorchs_attention_on_a_cpu_says_that_it_was_left_to_pytorch() -> None:
    q = torch.zeros(1, 2, 8, 16)
    said = r"PyTorch alone computes it: calls of F\.scaled_dot_product_attention and flex_attention are asked about on"
    with pytest.raises(ValueError, match=said):
        explain(F.scaled_dot_product_attention, q, q, q)


def test_explain_names_the_backend_that_then_serves() -> None:
    q, k, v = qkv()
    cu = cumulative(7, 7)
    calls = [
        (flash_attn_func, (q, k, v), {}),
        (flash_attn_func, (q, k, v), dict(softcap=2.0)),
        (flash_attn_func, (q, k, v), dict(dropout_p=0.1, causal=True)),
        (flash_attn_varlen_func, (*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 7, 7), dict(causal=True)),
        (flash_attn_with_kvcache, (q, k, v), dict(cache_seqlens=3)),
    ]
    for fn, args, kwargs in calls:
        reset_backend_counts()
        explanation = explain(fn, *args, **kwargs)
        assert counted() == {}
        fn(*args, **kwargs)
        assert counted() == {explanation.backend: 1}
        assert explanation.reasons[explanation.backend] == []


def test_explain_computes_and_writes_nothing() -> None:
    q, k, v = qkv()
    k_cache, v_cache = torch.zeros(2, 20, 2, 16), torch.zeros(2, 20, 2, 16)
    state = torch.random.get_rng_state()
    explain(flash_attn_with_kvcache, q, k_cache, v_cache, k, v, cache_seqlens=4)
    explain(flash_attn_func, q, k, v, dropout_p=0.5)
    assert explain(flash_attn_with_kvcache, q[:, :0], k_cache, v_cache, k, v, cache_seqlens=4).backend
    assert not k_cache.any() and counted() == {} and torch.equal(torch.random.get_rng_state(), state)


def test_explain_looks_through_a_module_at_its_first_attention_call() -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_func(flash_attn_func(q, k, v, softcap=2.0), k, v)

    assert explain(Block(), *qkv()).backend == "chunked"
    with use_backend("reference"):
        assert explain(Block(), *qkv()).backend == "reference"


def test_explain_of_something_without_attention_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="attention"):
        explain(lambda: None)


def test_a_forward_and_its_backward_count_as_one_call() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with use_backend("chunked"):
        flash_attn_func(q, k, v).sum().backward()
        flash_attn_func(q, k, v)
    assert counted() == {"chunked": 2}


Change = tuple[dict[str, Any], str]


def beyond(table: Capabilities, features: int) -> Iterator[Change]:
    """Changes of traits that a backend serves into such as its table lacks, and words of the reason."""
    for feature in split(~table.features):
        yield {"features": features | feature}, feature.description
    for dtype in FLOAT_DTYPES - table.dtypes:
        yield {"dtype": dtype}, f"does not compute {str(dtype).removeprefix('torch.')}"
    if table.devices is not None:
        yield {"device_type": "tpu"}, "only"
    if table.min_capability is not None:
        yield {"capability": (table.min_capability[0] - 1, 9)}, "needs compute capability"
    if table.max_capability is not None:
        yield {"capability": (table.max_capability[0] + 1, 0)}, "knows GPUs up to"
    if table.max_head_dim is not None:
        yield {"head_dim_v": table.max_head_dim + 8}, f"head_dim is at most {table.max_head_dim}"


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_a_missing_capability_is_a_reason(backend: Backend) -> None:
    table = backend.capabilities
    device = "cuda" if table.devices is None or "cuda" in table.devices else "cpu"
    served = checked_call(DenseInputs(*qkv(dtype=torch.float16))).traits()
    served = served._replace(device_type=device, capability=(9, 0) if device == "cuda" else None)
    usual = backend.reasons(served)
    for change, words in beyond(table, served.features):
        reasons = [reason for reason in backend.reasons(served._replace(**change)) if reason not in usual]
        assert any(words in reason for reason in reasons), (change, reasons)


def test_only_listed_backends_declare_properties_that_one_answer_cannot_show() -> None:
    def serving(feature: Feature) -> list[str]:
        return [backend.name for backend in BACKENDS if backend.capabilities.features & feature]

    assert serving(Feature.TRANSFORMS) == ["reference"]
    assert serving(Feature.DETERMINISTIC) == ["official", "fused", "sdpa", "chunked", "reference"]


def test_a_feature_declared_later_is_in_no_table_that_does_not_name_it() -> None:
    source, last = Path(features.__file__).read_text(), '    EIGHT_BIT_CACHE = "keys and values of 8-bit floats"\n'
    later: dict[str, Any] = {"__name__": "later"}
    exec(source.replace(last, f'{last}    LATER = "a mask of tomorrow"\n'), later)
    table = later["all_but"](later["Feature"].SOFTCAP)
    assert split(table) == split(all_but(Feature.SOFTCAP)) and not table & later["Feature"].LATER
    tables = [path for path in Path(backends.__file__).parent.rglob("*.py") if "features=~" in path.read_text()]
    assert tables == [], "a complement lists every feature to come: use all_but"


NARROW, WIDE = {"head_dim": 64, "head_dim_v": 64}, {"head_dim": 128, "head_dim_v": 128}


@pytest.mark.parametrize(
    ("features", "changes", "first"),
    [
        (0, NARROW, "fused"),
        (0, WIDE, "torch_flash"),
        (Feature.WINDOW_LEFT, WIDE, "fused"),
        (Feature.WINDOW_RIGHT | Feature.BACKWARD, WIDE, "fused"),
        (Feature.BACKWARD, NARROW, "torch_flash"),
        (Feature.DROPOUT, NARROW, "torch_flash"),
        (0, NARROW | {"sq_vs_sk": "<"}, "torch_flash"),
        (0, NARROW | {"capability": (7, 5)}, "torch_flash"),  # which refuses it
    ],
)
def test_our_kernels_come_before_pytorchs_where_they_were_measured_to_be_faster(
    features: Feature, changes: dict[str, Any], first: str
) -> None:
    traits = checked_call(DenseInputs(*qkv(dtype=torch.float16))).traits()
    traits = traits._replace(device_type="cuda", capability=(9, 0), features=int(features))._replace(**changes)
    ordered = sorted(BACKENDS, key=lambda backend: backend.rank(traits))
    assert [backend.name for backend in ordered][:2] == ["official", first]


# -------------------------------------------------- docs/writing-a-backend.md shows a complete backend, and it is right

PAGE = ROOT / "docs/writing-a-backend.md"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The page's backend, before the reference in the table of backends."""
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(next(blocks(PAGE, "python")), PAGE.name, "exec"), names)
    backend: Backend = names["Mine"]()
    serve_by(monkeypatch, backend, Reference())
    return backend


def test_the_pages_backend_agrees_with_fp64_on_every_kind_of_problem(mine: Backend) -> None:
    served, complaints = dict.fromkeys(KINDS, 0), []
    for kind in KINDS:
        for number in range(12):
            examination = Examination(problem := random_problem(number, (kind,)))
            verdict = examination.judge(mine.name)
            served[kind] += not verdict.refused
            complaints += [f"{problem}: {failure}" for failure in verdict.failures]
    assert not complaints, "\n".join(complaints)
    assert served["dense"] > 3 and served["varlen"] > 1, served


def test_the_pages_backend_serves_what_its_table_lists_and_declines_the_rest_with_a_reason(mine: Backend) -> None:
    q, k, v = qkv(sq=5, sk=7, h=4, hk=2)
    assert explain(flash_attn_func, q, k, v, causal=True).backend == "mine"
    declined = explain(flash_attn_func, q, k, v, softcap=30.0)
    assert declined.backend == "reference" and declined.reasons["mine"] == ["does not support softcap"]
