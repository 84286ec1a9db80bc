"""How many processes abort that end right after a backward: `python -m tests.exits --runs 300`.

Each is a new interpreter: a fork of one that has imported PyTorch ends otherwise, and none was seen to abort. Every
second one calls autograd.grad, the others backward. Prints a line of JSON for each kind; exit code 1 if a mended one
ended badly. --device stand_in needs no GPU: its tensors lie on a CPU, and PyTorch gives them a thread as a GPU gets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.tools.interpreters import fresh

_BARE = """
class Bare(torch.autograd.Function):
    forward = staticmethod(lambda ctx, q, k, v: q + k + v)
    backward = staticmethod(lambda ctx, dout: (dout * 1, dout * 2, dout * 3))
function = Bare.apply
"""
_MENDED = "from flash_attn_compat.dispatch.pytorch import at_exit; at_exit.wait_for_autograd(q)\n"
_OURS = "from flash_attn_compat import flash_attn_func as function\n"
_NOT_MENDED = (
    "from flash_attn_compat.dispatch.pytorch import at_exit\nat_exit.wait_for_autograd = lambda tensor: None\n"
)
KINDS = {
    "bare": _BARE,
    "bare, mended": _BARE + _MENDED,
    "ours, not mended": _NOT_MENDED + _OURS,
    "ours, mended": _OURS,
    "flash-attn": "from flash_attn import flash_attn_func as function\n",
}
_ON_STAND_IN = """
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

class OnStandIn(torch.Tensor):
    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=torch.device("stand_in:0"))
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        named = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        return tree_map_only(torch.Tensor, cls, func(*tree_map_only(cls, lambda x: x.held, args), **named))

_setup_privateuseone_for_python_backend("stand_in")
on_cpu = torch.empty
torch.empty = lambda *shape, device, requires_grad=False, **_: OnStandIn(on_cpu(*shape)).requires_grad_(requires_grad)
"""
_RUN = """
out = function(q, k, v)
if {calls_grad}:
    torch.autograd.grad(out, (q, k, v), dout)
else:
    out.backward(dout)
"""


def code(kind: str, device: str, calls_grad: bool) -> str:
    """A program that ends right after a backward."""
    make = f"torch.empty(1, 64, 2, 64, device={device!r}, dtype=torch.half, requires_grad=True)"
    inputs = f"q, k, v = ({make} for _ in range(3)); dout = q.detach() * 0\n"
    start = "import torch\n" + (_ON_STAND_IN if device == "stand_in" else "")
    return start + inputs + KINDS[kind] + _RUN.format(calls_grad=calls_grad)


def ends(kind: str, device: str, runs: int, at_once: int) -> Counter[str]:
    """How so many processes ended."""

    def end(run: int) -> str:
        status = fresh("-c", code(kind, device, run % 2 == 0)).returncode
        return {0: "well", -signal.SIGABRT: "aborted"}.get(status, f"code {status}")

    with ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(end, range(runs)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="processes of each kind")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", choices=KINDS, help="this kind; repeatable")
    options = parser.parse_args(arguments)
    good = True
    for kind in options.only or KINDS:
        if kind == "flash-attn" and importlib.util.find_spec("flash_attn_2_cuda") is None:
            continue
        if options.device == "stand_in" and not kind.startswith("bare"):
            continue  # whose operators would run on the CPU that is behind it
        found = ends(kind, options.device, options.runs, options.at_once)
        print(json.dumps({"what": kind, "runs": options.runs, **found}), flush=True)
        good &= not kind.endswith(", mended") or found == {"well": options.runs}
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
