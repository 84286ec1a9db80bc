"""Everything that looks for flash-attn finds it while patched, and nothing finds it after unpatch()."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from flash_attn_compat.naming import patch, unpatch

CHILD = (
    "import importlib.metadata as m, importlib.util as u; print(u.find_spec('flash_attn') and m.version('flash-attn'))"
)


def find_spec(name: str) -> Callable[[], object]:
    def look() -> object:
        try:
            return importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the parent package is absent
            return None

    return look


def version(name: str) -> Callable[[], str | None]:
    def look() -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return look


def requirement_cache() -> bool:
    """What lightning_utilities.RequirementCache("flash-attn>=2.0.0.post1") does."""
    from packaging.requirements import Requirement

    requirement = Requirement("flash-attn>=2.0.0.post1")
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def imports() -> bool:
    try:
        importlib.import_module("flash_attn")
    except ImportError:
        return False
    return True


def subprocess_sees_it() -> bool:
    answer = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, cwd="/")
    return answer.stdout.strip() == "2.8.3"


def child_of(method: str) -> Callable[[], bool]:
    def look() -> bool:
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=_answer, args=(queue,))
        process.start()
        process.join()
        return queue.get()

    return look


def _answer(queue) -> None:
    queue.put(find_spec("flash_attn.bert_padding")() is not None and version("flash-attn")() == "2.8.3")


def top_levels() -> list[str]:
    return importlib.metadata.packages_distributions().get("flash_attn", [])


LOOKS = {
    "find_spec of the package": find_spec("flash_attn"),
    "find_spec of a module": find_spec("flash_attn.bert_padding"),
    "find_spec of a deep module": find_spec("flash_attn.ops.triton.rotary"),
    "find_spec of the extension": find_spec("flash_attn_2_cuda"),
    "import": imports,
    "metadata flash_attn": version("flash_attn"),
    "metadata flash-attn": version("flash-attn"),
    "metadata Flash.Attn": version("Flash.Attn"),
    "packages_distributions": top_levels,
    "RequirementCache": requirement_cache,
    "subprocess": subprocess_sees_it,
    "fork": child_of("fork"),
    "spawn": child_of("spawn"),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_look_finds_flash_attn_while_patched_and_nothing_afterwards(look):
    assert not look()
    patch()
    assert look()
    unpatch()
    assert not look()


def test_the_distribution_of_the_top_level_is_named_flash_attn_with_a_dash():
    patch()
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]


def test_metadata_and_module_agree_on_the_version():
    patch()
    import flash_attn

    assert flash_attn.__version__ == importlib.metadata.version("flash-attn") == "2.8.3"


def test_a_pkg_resources_loaded_before_sees_the_distribution_and_forgets_it():
    pkg_resources = pytest.importorskip("pkg_resources", reason="setuptools 82 and later have no pkg_resources")
    patch()
    assert pkg_resources.get_distribution("flash-attn").version == "2.8.3"
    assert pkg_resources.require("flash-attn>=2.5")
    unpatch()
    with pytest.raises(pkg_resources.DistributionNotFound):
        pkg_resources.get_distribution("flash-attn")


def test_lightning_requirement_cache_is_satisfied():
    utilities = pytest.importorskip("lightning_utilities.core.imports", reason="lightning-utilities is not installed")
    assert not utilities.RequirementCache("flash-attn>=2.0.0.post1")
    patch()
    assert utilities.RequirementCache("flash-attn>=2.0.0.post1")


def test_looking_for_a_submodule_does_not_import_it(python):
    code = (
        "import flash_attn_compat.naming as n, importlib.util as u, sys; n.patch();"
        "assert u.find_spec('flash_attn.losses.cross_entropy').origin.endswith('cross_entropy.py');"
        "assert 'flash_attn_compat.losses.cross_entropy' not in sys.modules"
    )
    answer = python("-c", code)
    assert answer.returncode == 0, answer.stderr


def test_patching_imports_neither_torch_nor_the_package(python):
    code = (
        "import flash_attn_compat.naming as n, sys; n.patch(); n.unpatch();"
        "assert 'torch' not in sys.modules and 'flash_attn' not in sys.modules"
    )
    answer = python("-c", code)
    assert answer.returncode == 0, answer.stderr


def test_a_child_finds_the_package_though_its_own_path_lacks_it(tmp_path):
    patch()
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"].split(os.pathsep)[-1]}
    code = "import flash_attn, flash_attn.bert_padding; print(flash_attn.bert_padding.__name__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert answer.stdout.strip() == "flash_attn_compat.bert_padding", answer.stderr


def test_a_child_still_runs_the_sitecustomize_that_ours_hides(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs_ran = True")
    patch()
    site = os.environ["PYTHONPATH"].split(os.pathsep)[-1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([site, str(tmp_path)])}
    code = "import builtins, sys; print(builtins.theirs_ran, sys.modules['sitecustomize'].__file__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert answer.stdout.split() == ["True", str(tmp_path / "sitecustomize.py")], answer.stderr
