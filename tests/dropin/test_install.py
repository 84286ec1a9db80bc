"""The persistent installation, in a throw-away environment: pip accepts it, and nothing of it stays."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

import pytest

from flash_attn_compat.dropin import install as installation
from flash_attn_compat.dropin.install import InstallError, install, installed, uninstall
from tests.dropin.environment import Environment, write_package


@pytest.fixture(scope="module")
def shared_environment(tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("venv") / "env")


@pytest.fixture
def environment(shared_environment):
    yield shared_environment
    shared_environment.command("uninstall")
    assert shared_environment.files() == shared_environment.clean


@pytest.fixture
def installed_environment(environment):
    answer = environment.command("install")
    assert answer.returncode == 0, answer.stderr
    return environment


# find_spec would make setuptools take this process for pip.
HAS_PIP = "pip" in importlib.metadata.packages_distributions()


def test_the_import_system_the_metadata_and_pip_find_it(installed_environment):
    script = """
import importlib.metadata as m, importlib.util as u, json, sys
torch_at_start = "torch" in sys.modules
spec = u.find_spec("flash_attn")
import flash_attn, flash_attn.bert_padding, flash_attn_2_cuda, flash_attn_compat.bert_padding as ours
print(json.dumps([torch_at_start, spec.origin, flash_attn.__version__, m.version("Flash.Attn"),
                  m.packages_distributions()["flash_attn"],
                  [f.locate().is_file() for f in m.files("flash-attn") if f.name == "flash_attn_interface.py"],
                  flash_attn.bert_padding is ours, flash_attn_2_cuda.__name__]))
"""
    answer = installed_environment.forked(script)
    assert answer.returncode == 0, answer.stderr
    origin = str(installed_environment.site_packages / "flash_attn" / "__init__.py")
    expected = [False, origin, "2.8.3", "2.8.3", ["flash-attn"], [True], True, "flash_attn_compat.flash_attn_2_cuda"]
    assert json.loads(answer.stdout) == expected
    if importlib.util.find_spec("pkg_resources") is not None:  # setuptools 82 and later have none
        script = "import pkg_resources; print(pkg_resources.get_distribution('flash-attn>=2.5'))"
        answer = installed_environment.call("-W", "ignore", "-c", script)
        assert answer.stdout.strip() == "flash-attn 2.8.3", answer.stderr
    if HAS_PIP:
        wanted = ("install", "--no-index", "--no-deps", "--dry-run", "flash-attn>=2.5,<3")
        answer = installed_environment.pip(*wanted)
        assert answer.returncode == 0 and "already satisfied" in answer.stdout, answer.stdout + answer.stderr


def test_installing_again_changes_nothing_and_either_uninstall_removes_every_trace(installed_environment):
    before = installed_environment.files()
    modules = [name for name in before - installed_environment.clean if name.endswith(".py")]
    for way in ("pip", "command") if HAS_PIP else ("command",):
        answer = installed_environment.command("install")
        assert answer.returncode == 0 and installed_environment.files() == before
        assert str(installed_environment.site_packages) in answer.stdout and "uninstall" in answer.stdout
        # As imports would, with -O and -OO too, whose files pip leaves behind by every package.
        levels = ["-o", "0"] + (["-o", "1", "-o", "2"] if way == "command" else [])
        places = (str(installed_environment.site_packages / name) for name in modules)
        installed_environment.call("-m", "compileall", "-q", *levels, *places)
        arguments = ("uninstall", "-y", "flash-attn") if way == "pip" else ("uninstall",)
        answer = getattr(installed_environment, way)(*arguments)
        assert answer.returncode == 0, answer.stderr
        assert installed_environment.files() == installed_environment.clean
    assert installed_environment.call("-c", "import flash_attn").returncode != 0
    answer = installed_environment.command("uninstall")
    assert answer.returncode == 0 and "nothing to remove" in answer.stdout


def test_interpreter_start_imports_one_small_module_and_nothing_else(installed_environment):
    script = "import sys; print(*sorted(sys.modules))"
    with_it = set(installed_environment.call("-c", script).stdout.split())
    installed_environment.command("uninstall")
    without = set(installed_environment.call("-c", script).stdout.split())
    assert with_it - without == {"_flash_attn_compat_startup"}


def test_the_record_names_every_file_with_its_digest(tmp_path):
    dist_info = install(tmp_path)
    rows = [line.split(",") for line in (dist_info / "RECORD").read_text().splitlines()]
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {row[0] for row in rows} == files
    assert all(row[1].startswith("sha256=") for row in rows if not row[0].endswith((".pyc", "RECORD")))


def test_a_distribution_that_is_not_ours_is_left_alone_by_uninstall(tmp_path):
    write_package(tmp_path, "", "2.8.3")
    info = tmp_path / "flash_attn-2.8.3.dist-info"
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("flash_attn-2.8.3.dist-info/METADATA,,\n")
    assert uninstall(tmp_path) == [] and installed(tmp_path) == []
    assert (info / "METADATA").exists()


@pytest.mark.parametrize(
    ("works", "told"), [(False, r"undefined symbol.*pip uninstall flash-attn"), (True, "works on this machine")]
)
def test_it_refuses_beside_a_real_package(tmp_path, monkeypatch, works, told):
    write_package(tmp_path / "real", "raise ImportError('undefined symbol')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "real"))
    if works:
        monkeypatch.setattr(installation.installed_package, "_find_fault", lambda spec, undo: None)
    with pytest.raises(InstallError, match=told):
        install(tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("there", "told"),
    [("flash_attn/__init__.py", "not ours"), ("flash_attn_2_cuda.py/x", "cannot write into")],  # fails in the middle
)
def test_a_read_only_site_packages_is_an_error_and_leaves_nothing(tmp_path, there, told):
    (tmp_path / there).parent.mkdir()
    (tmp_path / there).touch()
    with pytest.raises(InstallError, match=told):
        install(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [there]


def test_the_interface_of_2_6_can_be_installed_and_removed(environment):
    answer = environment.command("install", "--api", "2.6")
    assert answer.returncode == 0 and "flash_attn-2.6.3.dist-info" in answer.stdout, answer.stderr
    script = """
import importlib.metadata as m, flash_attn, flash_attn.bert_padding as b, flash_attn_2_cuda as raw
print(flash_attn.__version__, m.version("flash-attn"), b.__name__, raw.__name__)
"""
    expected = ["2.6.3", "2.6.3", *(f"flash_attn_compat.api_2_6.{n}" for n in ("bert_padding", "flash_attn_2_cuda"))]
    for first in ("", "import flash_attn_compat; flash_attn_compat.patch()\n"):  # patch() keeps what is installed
        assert environment.forked(first + script).stdout.split() == expected
    # Installing the other one replaces it.
    assert environment.command("install").returncode == 0
    assert environment.forked(script).stdout.split()[:2] == ["2.8.3", "2.8.3"]
    # patch() can ask for another interface than the one installed.
    ask = "import flash_attn_compat; flash_attn_compat.patch(api='2.6')\n"
    assert environment.forked(ask + script).stdout.split() == expected
