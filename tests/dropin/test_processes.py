"""Children of a patched process; a real flash-attn beside ours, left alone where it works; other distributions."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn_compat
from flash_attn_compat.dropin import installed_package, patch, unpatch
from flash_attn_compat.dropin.install import install, uninstall
from tests.forms.plain import attention
from tests.forms.support import WAITS, write_package
from tests.sdpa import originals
from tests.tools.interpreters import Answer, forked, forked_child

# ---------------------------------------------------------------- child processes, with any other entries on their path


BROKEN = "raise ImportError('undefined symbol')\n"


def child(*arguments: str, cwd: Path | str = "/") -> Answer:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the user's on PYTHONPATH, before patch() puts ours there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def test_a_sitecustomize_of_the_user_runs_beside_ours(theirs: Path) -> None:
    (theirs / "sitecustomize.py").write_text("import builtins; builtins.theirs_ran = True")
    patch(sdpa=True)
    answer = child("-c", WAITS + "import builtins; print(builtins.theirs_ran)")
    assert answer.stdout.split() == ["True", "True"], answer.stderr


@pytest.mark.parametrize("there", [BROKEN, None], ids=["broken", "half"])
def test_a_broken_flash_attn_on_pythonpath_does_not_win(theirs: Path, there: str | None) -> None:
    write_package(theirs, there, flash_attn_interface=BROKEN)
    patch()
    answer = forked_child("import flash_attn; print(flash_attn.__version__, flash_attn.flash_attn_func.__module__)")
    assert answer.stdout.split() == ["2.8.3", "flash_attn.flash_attn_interface"], answer.stderr


LOOK = "import importlib.util as u; print(u.find_spec('flash_attn').origin, u.find_spec('flash_attn').origin)"


@pytest.mark.parametrize(("there", "warnings"), [(BROKEN, 1), (None, 0)], ids=["broken", "no __init__"])
def test_a_folder_beside_the_script_is_hidden_with_one_warning_if_it_is_a_package(
    tmp_path: Path, there: str | None, warnings: int
) -> None:
    write_package(tmp_path, there, cute="")
    (tmp_path / "job.py").write_text(LOOK)
    patch()
    answer = child(str(tmp_path / "job.py"))
    assert answer.stdout.count("flash_attn_compat") == 2, answer.stderr
    assert answer.stderr.count("is not used") == answer.stderr.count(str(tmp_path)) == warnings
    assert bool(answer.stderr) == bool(warnings)


@originals.needs_grouped_heads
def test_a_child_whose_sitecustomize_is_not_ours_catches_up_when_it_imports_flash_attn(theirs: Path) -> None:
    patch(sdpa=True)
    (theirs / "sitecustomize.py").write_text("")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(theirs), os.environ["PYTHONPATH"]])  # whoever starts the child
    look = (
        "import sys; from flash_attn_compat.torch_sdpa import override; assert override.active_policy() is None;"
        "import flash_attn; print(override.active_policy())"
    )
    answer = forked_child(look)
    assert answer.stdout.startswith("Policy("), answer.stderr
    os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]


def test_children_beside_a_working_flash_attn_keep_it_and_get_the_requested_patches(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn_compat.dropin import installed_package

    package = write_package(theirs, "__version__ = '2.8.0'\n")
    monkeypatch.syspath_prepend(str(theirs))
    monkeypatch.setattr(installed_package, "_find_fault", lambda spec, undo: None)
    patch(sdpa="always")
    answer = child("-c", WAITS + "import flash_attn; print(flash_attn.__file__)")
    assert answer.stdout.split() == ["True", str(package / "__init__.py")], answer.stderr


INTERFACE = """
import torch
import flash_attn_2_cuda as flash_attn_gpu

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return flash_attn_gpu.fwd(q, k, v, None, None, dropout_p, scale, causal, -1, -1, 0.0, False, None)[0]
"""
REFUSING = """
def refuse(*arguments, **named):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

fwd = varlen_fwd = bwd = varlen_bwd = fwd_kvcache = refuse
"""
# name: (an extension that cannot serve here, the reason told against the package)
EXTENSIONS = {
    "ImportError": (
        "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')",
        "importing it raises ImportError: undefined symbol",
    ),
    "OSError": (
        "raise OSError('libcudart.so.12: cannot open shared object file')",
        "importing it raises OSError: libcudart.so.12",
    ),
    "wrong GPU": (REFUSING, "calling it raises RuntimeError: FlashAttention only supports Ampere"),
}
TOP = "__version__ = '2.7.4'\nfrom flash_attn.flash_attn_interface import flash_attn_func\n"
PACKAGES = {
    "package raises ImportError": "raise ImportError('this build is for another Python')",
    "package raises OSError": "raise OSError('libc10.so: cannot open shared object file')",
    "package raises RuntimeError": "raise RuntimeError('no driver')",
    "functions refuse by themselves": f"__version__ = '2.7.4'\n{REFUSING}\nflash_attn_func = refuse\n",
    "version before 2.7": TOP.replace("2.7.4", "2.6.3"),
}


class Fake:
    """A flash-attn in a directory at the front of sys.path, with an extension for another GPU."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.package = write_package(directory, TOP, "2.7.4", flash_attn_interface=INTERFACE)
        self.write("flash_attn_2_cuda.py", REFUSING)

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)
        importlib.invalidate_caches()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A directory of sys.path, before everything else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def fake(elsewhere):
    yield Fake(elsewhere)
    unpatch()
    for name in list(sys.modules):
        if name.partition(".")[0] in ("flash_attn", "flash_attn_2_cuda"):
            del sys.modules[name]


def is_served(function) -> bool:
    """Whether a call through `function` gives attention and is counted as ours."""
    q = torch.randn(1, 6, 2, 16)
    flash_attn_compat.reset_backend_counts()
    out = function(q, q, q, causal=True)
    expected = attention(q, q, q, window=(-1, 0))
    return torch.allclose(out, expected, atol=1e-5) and sum(flash_attn_compat.backend_counts().values()) == 1


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_a_package_with_an_unusable_extension_runs_on_our_functions_until_unpatch(fake, kind):
    fake.write("flash_attn_2_cuda.py", EXTENSIONS[kind][0])
    patch()
    import flash_attn

    assert Path(flash_attn.__file__).parent == fake.package
    assert is_served(flash_attn.flash_attn_func)
    unpatch()
    assert "flash_attn" not in sys.modules and "flash_attn_2_cuda" not in sys.modules
    with pytest.raises((ImportError, OSError, RuntimeError)):
        is_served(importlib.import_module("flash_attn").flash_attn_func)


def test_a_flash_attn_imported_before_patch_is_served_while_patched(fake):
    import flash_attn_2_cuda
    from flash_attn import flash_attn_func

    before = dict(vars(flash_attn_2_cuda))
    patch()
    assert is_served(flash_attn_func)
    assert flash_attn_2_cuda.varlen_bwd is importlib.import_module("flash_attn_compat.flash_attn_2_cuda").varlen_bwd
    unpatch()
    with pytest.raises(RuntimeError, match="Ampere"):
        is_served(flash_attn_func)
    assert {name: value for name, value in vars(flash_attn_2_cuda).items() if name in before} == before


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES.keys())
def test_a_package_with_a_broken_extension_is_replaced_by_ours(fake, package):
    fake.write("flash_attn/__init__.py", package)
    patch()
    import flash_attn

    assert "flash_attn_compat" in flash_attn.__file__
    assert is_served(flash_attn.flash_attn_func)
    assert importlib.metadata.version("flash-attn") == flash_attn.__version__ == "2.8.3"


def test_a_child_process_is_served_too(fake):
    fake.write("flash_attn_2_cuda.py", EXTENSIONS["OSError"][0])
    patch()
    code = "import torch, flash_attn; q = torch.zeros(1, 4, 1, 8); print(flash_attn.flash_attn_func(q, q, q).numel())"
    answer = forked_child(code)
    assert answer.stdout.strip() == "32", answer.stderr


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, zeros=torch.zeros, **named: zeros(*shape, **named))


@pytest.mark.usefixtures("gpu")
def test_a_package_that_works_on_this_gpu_is_left_alone(fake):
    fake.write("flash_attn_2_cuda.py", "def fwd(q, *arguments):\n    return [q]\n")
    path = list(sys.path)
    patch(api="2.8")  # a variable that unpatch() takes back
    import flash_attn

    assert Path(flash_attn.__file__).parent == fake.package
    extension = flash_attn.flash_attn_interface.flash_attn_gpu.__file__
    assert sys.path == path and extension == str(fake.directory / "flash_attn_2_cuda.py")
    assert importlib.metadata.version("flash-attn") == "2.7.4"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", EXTENSIONS)
def test_the_reason_against_a_real_package_names_its_error(fake, kind):
    extension, reason = EXTENSIONS[kind]
    fake.write("flash_attn_2_cuda.py", extension)
    found = installed_package.find_real()
    assert found.unusable_because.startswith(reason)
    assert (found.location, found.version) == (str(fake.package), "2.7.4")
    assert "flash_attn" not in sys.modules


def test_without_cuda_or_set_aside_by_the_environment_it_is_unusable(fake, monkeypatch):
    if not torch.cuda.is_available():
        reason = installed_package.find_real().unusable_because
        assert "no" in reason and "CUDA" in reason
    monkeypatch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    assert "FLASH_ATTN_COMPAT_DISABLE_OFFICIAL" in installed_package.find_real().unusable_because


def test_neither_a_folder_called_flash_attn_nor_our_stand_in_is_a_real_package(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_package.find_real() is None
    patch()
    importlib.import_module("flash_attn")
    assert installed_package.find_real() is None


# ---------------------------------------------------------------- flash_attn as a namespace of several distributions

# What FlashAttention 4's distribution may ship above flash_attn/cute: nothing, or flash-attn's own way to share.
TOPS = {"nothing": None, "a shared package": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"}


@pytest.mark.parametrize("top", TOPS.values(), ids=TOPS.keys())
def test_a_sub_package_of_another_distribution_is_importable_beside_ours(elsewhere, top):
    write_package(elsewhere, top, cute="answer = 4\n")
    patch()
    assert importlib.import_module("flash_attn.cute").answer == 4
    flash_attn = importlib.import_module("flash_attn")
    assert flash_attn.__version__ == "2.8.3" and flash_attn.flash_attn_func is flash_attn_compat.flash_attn_func
    assert importlib.import_module("flash_attn.bert_padding") is flash_attn_compat.bert_padding


def test_modules_we_lack_are_not_taken_from_a_broken_flash_attn(elsewhere):
    broken = "raise ImportError('built for another Python')\n"
    write_package(elsewhere, broken, flash_attn_interface="", flash_blocksparse_attention="")
    patch()
    assert importlib.import_module("flash_attn").flash_attn_func is flash_attn_compat.flash_attn_func
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.flash_blocksparse_attention")


def test_an_installation_shares_a_directory_with_another_distribution(tmp_path):
    write_package(tmp_path, None, cute="answer = 4\n")
    install(tmp_path)
    script = "import flash_attn, flash_attn.cute; print(flash_attn.__version__, flash_attn.cute.answer)"
    found = forked(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}")
    assert found.stdout.split() == ["2.8.3", "4"], found.stderr
    uninstall(tmp_path)
    kept = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")]
    assert kept == ["flash_attn/cute.py"]
