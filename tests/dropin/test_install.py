"""The persistent installation: pip accepts it, nothing of it stays, and failures change all of our files or none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_attn_compat
from flash_attn_compat import cli
from flash_attn_compat.dropin import install as installation
from flash_attn_compat.dropin.install import InstallError, install, installed, uninstall
from tests.forms.support import Environment, write_package
from tests.tools.interpreters import CAN_FORK, REPOSITORY, forked, forked_each, fresh


@pytest.fixture
def environment(tmp_path) -> Environment:
    return Environment(tmp_path / "env")


# find_spec would make setuptools take this process for pip.
HAS_PIP = "pip" in importlib.metadata.packages_distributions()


def test_an_installation_is_found_stays_the_same_when_repeated_and_leaves_no_trace(environment):
    answer = environment.command("install")
    assert answer.returncode == 0 and str(environment.site_packages) in answer.stdout, answer.stderr
    assert "uninstall" in answer.stdout
    before = environment.files()
    check_found(environment)
    modules = [name for name in before - environment.clean if name.endswith(".py")]
    script = "import sys; print(*sorted(sys.modules))"
    with_it = set(environment.call("-c", script).stdout.split())
    for way in ("pip", "command") if HAS_PIP else ("command",):
        install(environment.site_packages)
        assert environment.files() == before
        # As imports would, with -O and -OO too, whose files pip leaves behind by every package.
        levels = ["-o", "0"] + (["-o", "1", "-o", "2"] if way == "command" else [])
        places = (str(environment.site_packages / name) for name in modules)
        environment.call("-m", "compileall", "-q", *levels, *places)
        arguments = ("uninstall", "-y", "flash-attn") if way == "pip" else ("uninstall",)
        answer = getattr(environment, way)(*arguments)
        assert answer.returncode == 0, answer.stderr
        assert environment.files() == environment.clean
    answer = environment.command("uninstall")
    assert answer.returncode == 0 and "nothing to remove" in answer.stdout
    without = environment.call("-c", f"{script}; import flash_attn")
    assert without.returncode != 0
    assert with_it - set(without.stdout.split()) == {"_flash_attn_compat_startup"}


def check_found(environment: Environment) -> None:
    """By the import system, the metadata and pip."""
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
    answer = environment.forked(script)
    assert answer.returncode == 0, answer.stderr
    origin = str(environment.site_packages / "flash_attn" / "__init__.py")
    expected = [False, origin, "2.8.3", "2.8.3", ["flash-attn"], [True], True, "flash_attn_compat.flash_attn_2_cuda"]
    assert json.loads(answer.stdout) == expected
    if importlib.util.find_spec("pkg_resources") is not None:  # setuptools 82 and later have none
        script = "import pkg_resources; print(pkg_resources.get_distribution('flash-attn>=2.5'))"
        answer = environment.call("-W", "ignore", "-c", script)
        assert answer.stdout.strip() == "flash-attn 2.8.3", answer.stderr
    if HAS_PIP:
        wanted = ("install", "--no-index", "--no-deps", "--dry-run", "flash-attn>=2.5,<3")
        answer = environment.pip(*wanted)
        assert answer.returncode == 0 and "already satisfied" in answer.stdout, answer.stdout + answer.stderr


def test_the_distribution_has_the_metadata_that_tools_read(tmp_path):
    dist_info = install(tmp_path)
    rows = [line.split(",") for line in (dist_info / "RECORD").read_text().splitlines()]
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {row[0] for row in rows} == files
    assert all(row[1].startswith("sha256=") for row in rows if not row[0].endswith((".pyc", "RECORD")))
    wheel = (dist_info / "WHEEL").read_text()  # by which uv tells a whole distribution from a broken one
    assert wheel.startswith("Wheel-Version: 1.0\n") and "Root-Is-Purelib: true\n" in wheel
    assert cli.main(["uninstall", "--target", str(tmp_path)]) == 0 and not list(tmp_path.iterdir())


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


def test_the_interface_of_2_6_can_be_installed_and_replaced(environment):
    answer = environment.command("install", "--api", "2.6")
    assert answer.returncode == 0 and "flash_attn-2.6.3.dist-info" in answer.stdout, answer.stderr
    script = """
import importlib.metadata as m, flash_attn, flash_attn.bert_padding as b, flash_attn_2_cuda as raw
print(flash_attn.__version__, m.version("flash-attn"), b.__name__, raw.__name__)
"""
    expected = ["2.6.3", "2.6.3", *(f"flash_attn_compat.api_2_6.{n}" for n in ("bert_padding", "flash_attn_2_cuda"))]
    for first in ("", "import flash_attn_compat; flash_attn_compat.patch()\n"):  # patch() keeps what is installed
        assert environment.forked(first + script).stdout.split() == expected
    install(environment.site_packages)
    assert environment.forked(script).stdout.split()[:2] == ["2.8.3", "2.8.3"]
    # patch() can ask for another interface than the one installed.
    ask = "import flash_attn_compat; flash_attn_compat.patch(api='2.6')\n"
    assert environment.forked(ask + script).stdout.split() == expected


# ----------------------------------------------- installations that fail, are killed, run at once or meet hostile files

needs_fork = pytest.mark.skipif(not CAN_FORK, reason="limits and kills need a process that is a copy")
USE = "from pathlib import Path\nfrom flash_attn_compat.dropin import install\n"


def files(directory: Path) -> dict[str, bytes]:
    """Return all files except compiled ones, which hold timestamps."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("complete")
    install(directory)
    return without_record(files(directory))


def without_record(found: dict[str, bytes]) -> dict[str, bytes]:
    """Times and paths are in it, or none where nothing could be compiled."""
    return {name: content for name, content in found.items() if not name.endswith("RECORD")}


FULL = f"""{USE}
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
try:
    install.install(DIRECTORY)
except install.InstallError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print(error)
"""


@needs_fork
@pytest.mark.parametrize("there", [False, True], ids=["a new one", "a second one"])
def test_a_full_disk_changes_no_file_and_a_second_install_succeeds(
    tmp_path: Path, complete: dict[str, bytes], there: bool
) -> None:
    if there:
        install(tmp_path, "2.6")
    before = files(tmp_path)
    for size in (0, 100, 1000, 3000):  # of files, as far as the system lets them be written
        answer = forked(FULL.replace("(LIMIT", f"({size}").replace("DIRECTORY", repr(str(tmp_path))))
        assert answer.stdout.startswith("cannot write into"), answer.stderr
        assert files(tmp_path) == before and not list(tmp_path.glob(".*"))
    install(tmp_path)
    assert without_record(files(tmp_path)) == complete


KILLED = """
import os, shutil, sys

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
left = sys.maxsize

def kill(event, arguments):
    global left
    if event in CHANGES and DIRECTORY in str(arguments[0]) and (event != "open" or arguments[1] not in ("r", "rb")):
        left -= 1
        if left < 0:
            os._exit(9)

sys.addaudithook(kill)

def killed_after(changes, work):
    global left
    child = os.fork()
    if child == 0:
        left = changes
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

def listed():
    return {path.relative_to(DIRECTORY).as_posix(): path.read_bytes()
            for path in Path(DIRECTORY).rglob("*") if path.is_file() and path.suffix not in (".pyc",)}

install.install(DIRECTORY)
complete = listed()
install.uninstall(DIRECTORY)
assert not listed()
changes = FIRST
while killed_after(changes, lambda: install.install(DIRECTORY)):
    if changes % 2:
        install.uninstall(DIRECTORY)
        assert not os.listdir(DIRECTORY), (changes, os.listdir(DIRECTORY))
    else:
        install.install(DIRECTORY)
        found = listed()
        assert found == complete, (changes, found.keys() ^ complete.keys())
        if killed_after(changes // 2, lambda: install.uninstall(DIRECTORY)):
            install.uninstall(DIRECTORY)
        assert not os.listdir(DIRECTORY), (changes, os.listdir(DIRECTORY))
    changes += STEP
print(changes)
"""


@needs_fork
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_killed_install_or_uninstall_is_completed_or_removed_by_the_next(tmp_path: Path, step: int) -> None:
    code = KILLED.replace("DIRECTORY", repr(str(tmp_path))).replace("FIRST", "0").replace("STEP", str(step))
    answer = forked(USE + code)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) > 40  # steps at which it was killed


@needs_fork
@pytest.mark.parametrize("apis", [["2.8"] * 6, ["2.6", "2.8"] * 3], ids=["the same", "different ones"])
def test_six_at_once_leave_one_complete_installation(
    tmp_path: Path, complete: dict[str, bytes], apis: list[str]
) -> None:
    answers = forked_each([f"{USE}install.install({str(tmp_path)!r}, {api!r})" for api in apis])
    assert not any(answer.returncode for answer in answers), [answer.stderr for answer in answers]
    if len(set(apis)) == 1:
        assert without_record(files(tmp_path)) == complete
    assert len(list(tmp_path.glob("*.dist-info"))) == 1
    uninstall(tmp_path)
    assert not list(tmp_path.iterdir())


AS_NOBODY = "import os; os.geteuid() or os.seteuid(65534)\n"


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A read-only site-packages with an installation, below folders that every user may read."""
    directory = Path(tempfile.mkdtemp()) / "site-packages"
    if not all(folder.stat().st_mode & 0o001 for folder in directory.parent.parents):
        pytest.skip("another user may not enter the folder for temporary files")
    install(directory)
    folders = [directory.parent, directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield directory
    for folder in folders:
        folder.chmod(0o755)
    shutil.rmtree(directory.parent)


@needs_fork
@pytest.mark.parametrize(("command", "has_user_site"), [("install", True), ("uninstall", False)])
def test_a_read_only_site_packages_is_told_in_a_line_with_the_way_out(
    read_only: Path, command: str, has_user_site: bool
) -> None:
    before = files(read_only)
    code = (
        f"import sys, sysconfig, site\nfrom flash_attn_compat import cli\n{AS_NOBODY}"
        f"sysconfig.get_path = lambda name: {str(read_only)!r}\n"
        f"site.ENABLE_USER_SITE = {has_user_site}; site.getusersitepackages = lambda: '/home/a user/site'\n"
        f"sys.exit(cli.main([{command!r}]))"
    )
    answer = forked(code)
    assert answer.returncode == 1 and len(answer.stderr.splitlines()) == 1
    assert "Permission denied" in answer.stderr and str(read_only) in answer.stderr
    assert (f"flash-attn-compat {command} --target '/home/a user/site'" in answer.stderr) == has_user_site
    assert files(read_only) == before


def test_uninstall_leaves_an_installation_elsewhere_on_the_path_and_says_how_to_remove_it(tmp_path: Path) -> None:
    environment, base = Environment(tmp_path / "env"), tmp_path / "base"
    install(base)
    (environment.site_packages / "base.pth").write_text(f"{base}\n")
    before = files(base)
    answer = environment.command("uninstall")
    assert answer.returncode == 0 and files(base) == before
    assert "nothing to remove" in answer.stdout and f"uninstall --target {base}" in answer.stdout
    assert environment.command("uninstall", "--target", str(base)).returncode == 0
    assert not list(base.iterdir())


def test_a_record_cannot_name_files_of_others(tmp_path: Path) -> None:
    place, victim = tmp_path / "a" / "site-packages", tmp_path / "victim.py"
    dist_info = install(place)
    mark = "import _flash_attn_compat_startup\n"  # even if they look like ours
    victim.write_text(mark)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.py").write_text(mark)
    (place / "link").symlink_to(tmp_path / "elsewhere")
    write_package(place / "others", "theirs = True\n")
    (place / "flash_attn" / "cute.py").write_text("theirs = True\n")
    names = ["../../victim.py", str(victim), "link/x.py", "others/flash_attn/__init__.py", "flash_attn/cute.py"]
    with open(dist_info / "RECORD", "a") as record:
        record.writelines(f"{name},,\n" for name in names)
    uninstall(place)
    assert all((place / name).is_file() for name in names)
    left = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert left == {"others/flash_attn/__init__.py", "flash_attn/cute.py"}


def test_this_packages_own_directory_is_no_target() -> None:
    for command in (install, uninstall):
        with pytest.raises(InstallError, match="part of flash_attn_compat itself"):
            command(Path(flash_attn_compat.__file__).parent / "dropin" / "site")


def test_a_single_file_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InstallError, match=r"flash_attn\.py answers to the name flash_attn and is a single file"):
        install(tmp_path / "target")


def test_a_package_in_a_zip_file_is_told_to_be_installed_first(tmp_path: Path) -> None:
    package = Path(flash_attn_compat.__file__).parent
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as wheel:
        for path in package.rglob("*.py"):
            wheel.write(path, path.relative_to(package.parent))
    variables = {"PYTHONPATH": str(tmp_path / "wheel.whl")}
    for command in ("install", "uninstall"):
        answer = fresh("-m", "flash_attn_compat", command, "--target", str(tmp_path / "t"), cwd=tmp_path, **variables)
        assert answer.returncode == 1 and "by pip, not as a zip file" in answer.stderr
        assert len(answer.stderr.splitlines()) == 1


LISTED = """
from setuptools.dist import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
print(*(name for *_, names in command.data_files for name in names), sep="\\n")
"""


def test_a_wheel_from_a_used_tree_holds_nothing_compiled(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    for name in ("pyproject.toml", "README.md", "LICENSE", "flash_attn_compat/dropin"):
        source, target = Path(REPOSITORY) / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    (tmp_path / "flash_attn_compat/__init__.py").touch()
    used = tmp_path / "flash_attn_compat/dropin/site/__pycache__"
    used.mkdir(exist_ok=True)
    (used / "flash_attn_2_cuda.cpython-311.pyc").touch()
    command = [sys.executable, "-W", "ignore", "-c", LISTED]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ})
    listed = answer.stdout.replace(os.sep, "/").split()
    assert any(name.endswith("site_start/sitecustomize.py") for name in listed), answer.stderr
    assert not [name for name in listed if "__pycache__" in name]
