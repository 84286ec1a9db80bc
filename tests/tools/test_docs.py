"""Pages say nothing that is not there, and each of their code blocks runs alone; releases, CI and its workflows."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from flash_attn_compat import cli, settings
from flash_attn_compat.backends.fused.building import aot
from flash_attn_compat.backends.fused.choosing import enumeration
from flash_attn_compat.backends.fused.choosing.kinds import Kind
from tests.forms.plain import all_but_thorough
from tests.forms.support import load_file
from tests.tools.interpreters import forked
from verify import cli as verify_cli
from verify import compare

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", ".github/ISSUE_TEMPLATE/*.md", "verify/recorded_answers/*.md")
    for path in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`((?:[\w/.-]+/|test_)[\w.-]+\.(?:py|cu|cuh|cpp|md|ipynb|jsonl|yml))`")
_SOURCE = re.compile(r"`([\w-]+\.(?:py|cu|cuh|cpp))`")
SOURCES = {
    path.name
    for folder in ("flash_attn_compat", "verify", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.*")
} | {"setup.py"}
# Where a file may be that a page names.
FOLDERS = tuple(
    ROOT / name for name in ("flash_attn_compat", "flash_attn_compat/dropin/site", "flash_attn_compat/cuda", "tests")
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_VARIABLE = re.compile(r"FLASH_ATTN_COMPAT_[A-Z_]*[A-Z]")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    return (text for language, text in _FENCE.findall(page.read_text(encoding="utf-8")) if language in languages)


def anchors(page: Path) -> set[str]:
    """As repository hosts make them of headings: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each command of ours in the pages, without comments, assignments and redirections."""
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            for is_operator, part in itertools.groupby(lexer, lambda word: set(word) <= set(";&|")):
                words = list(itertools.dropwhile(lambda word: "=" in word, part))
                if words and not is_operator:
                    yield named(page), words


ALL_COMMANDS = list(commands())
COMMANDS = {page: [words for found, words in ALL_COMMANDS if found == page] for page in map(named, PAGES)}
VERIFY = [module.__name__.removeprefix("verify.") for module in verify_cli.SUBCOMMANDS]
each_page = pytest.mark.parametrize("page", PAGES, ids=named)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in _FILE.findall(text):
        assert any((folder / name).exists() for folder in (ROOT, page.parent, *FOLDERS)), name
    assert {*_SOURCE.findall(_FENCE.sub("", text))} <= SOURCES


@pytest.mark.parametrize("name", ["README.md", "docs/vllm.md", "examples/t4.ipynb"])
def test_the_repository_is_installed_from_the_address_that_the_project_names(name: str) -> None:
    project = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"git(?:\+| clone )(http.+?)\.git", (ROOT / name).read_text(encoding="utf-8")))
    assert project is not None and named == {project[1]}


VALUES = dict(
    re.findall(r"^\| `(\w+)` \| (.+?) \|", (ROOT / "docs/environment.md").read_text(encoding="utf-8"), re.MULTILINE)
)


def test_the_page_of_variables_lists_exactly_the_table_in_settings() -> None:
    assert VALUES.keys() == settings.VARIABLES.keys()


@pytest.mark.parametrize("name", settings.VARIABLES)
def test_the_page_of_variables_names_the_values_that_change_something(name: str) -> None:
    choices, default, _ = settings.VARIABLES[name]
    listed, changing = re.findall(r"`(.+?)`", VALUES[name]), [value for value in choices if value != default]
    assert listed == changing or (name == settings.CAPABILITY and set(listed) <= set(choices))


@each_page
def test_every_variable_that_is_named_is_read(page: Path) -> None:
    assert set(_VARIABLE.findall(page.read_text(encoding="utf-8"))) <= settings.VARIABLES.keys()


@pytest.mark.parametrize("page", [page for page, some in COMMANDS.items() if some])
def test_every_documented_command_exists_and_takes_its_arguments(page: str) -> None:
    for program, *arguments in COMMANDS[page]:
        check_command(program, arguments)


def check_command(program: str, arguments: list[str]) -> None:
    for argument in arguments:
        assert not argument.startswith("tests/") or (ROOT / argument).exists(), argument
    if Path(program).name in ("python", "python3"):
        if arguments[:1] == ["-m"]:
            # To look for pip would make setuptools take this process for it, and give distutils back.
            assert arguments[1] in ("build", "pip") or importlib.util.find_spec(arguments[1]) is not None
            if arguments[1] == "verify":
                verify_takes(arguments[2:])
        elif not arguments[0].startswith("-"):
            assert (ROOT / arguments[0]).exists()
    if Path(program).name == "flash-attn-compat" and arguments[0] == "verify":
        verify_takes(arguments[1:])
    elif Path(program).name == "flash-attn-compat" and arguments[0] != "run":
        cli._parser().parse_args(arguments)


def verify_takes(arguments: list[str]) -> None:
    is_named = arguments and arguments[0] in VERIFY
    verify_cli.build_parser().parse_args(arguments if is_named else ["compare", *arguments])


def test_readme_has_at_most_1400_words() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1400


@each_page
def test_python_that_is_shown_parses(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        (r"compile --for sm_75 +# (\d+) kernels", lambda: aot.usual_kinds(75)),
        (r"time for its (\d+) kernels", lambda: aot.usual_kinds(75)),
        (r"`--all` has ([\d,]+) kernels for sm_75", lambda: aot.common_kinds(75, (), ())),
    ],
)
def test_the_page_says_how_many_kernels_compile_makes(said: str, kinds: Callable[[], Iterable[Kind]]) -> None:
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    number = re.search(said, re.sub(r"\s+", " ", page))
    assert number is not None and int(number[1].replace(",", "")) == len(enumeration.made_for(kinds()))


def test_the_kernel_that_verifys_page_shows_passes_away_from_the_recorded_answers(
    tmp_path, monkeypatch, capsys
) -> None:
    kernel = next(text for text in blocks(ROOT / "docs/verify.md", "python") if "my_kernel.py" in text)
    (tmp_path / "my_kernel.py").write_text(kernel, encoding="utf-8")
    monkeypatch.setattr(compare, "recorded_cases", lambda: ())
    monkeypatch.setattr(sys, "path", [*sys.path])
    asked = ["--quick", "--device", "cpu", "-k", "func d64,func d128,plain 64"]
    assert verify_cli.main([*asked, "--implementation", f"{tmp_path / 'my_kernel.py'}:attention"]) == 0
    judged = " ".join(capsys.readouterr().out.split()).partition("judged: ")[2].partition("; declined")[0]
    assert {"causal", "rows without keys", "no keys at all", "strided inputs", "gradients"} <= {*judged.split(", ")}


# ---------------------------------------------------------------- each code block runs

# A phrase of a Python block: the reason not to run the block.
PYTHON_NOT_RUN = {
    'device="cuda"': "needs a CUDA GPU",
    "import old_code": "needs the reader's own module",
    "for package in (flash_attn_compat, flash_attn)": "needs the wheel of fake-flash-attention, unpacked",
}
# A pattern of a command: the reason not to run the line. Another test checks the arguments of all these commands.
COMMANDS_NOT_RUN = {
    r"git clone|pip install|python3 -m venv|vllm serve|version_matrix": "downloads",
    r"flash-attn-compat install": "changes this environment; the tests of dropin install into one of their own",
    r"--gpu\b|-m gpu|--device cuda|vllm_serving|tests\.gpu --minutes|tests\.sanitize|kernel_tiles": "needs a GPU",
    r"flash-attn-compat tune|CUDA_LAUNCH_BLOCKING|CAPABILITY=7\.5": "needs a GPU",
    r"-m pytest|\.ci/(run|lint)": "tests and lint, which CI runs",
    r"(compat|-m) verify( |;|$)": "takes seconds to minutes; the tests of verify run its commands",
    r"flash-attn-compat compile|kernel_(report|ladder)|tests\.warm": "compiles or computes for minutes",
    r"benchmarks\.(cpu|host_time|end_to_end)": "takes minutes; the tests of the benchmarks run small ones",
    r"torch\.distributed\.run": "a group of processes; the tests of clients run the scripts",
    r"main\.py": "needs ComfyUI",
    r"\.ci/speed\.py": "needs the files of runs on a GPU",
    r"doctor \|": "README's block runs doctor",
    r"\bdist\b|check_wheel": "the package is built in CI, not here",
}
TRAIN = "import flash_attn, torch\nprint(flash_attn.__version__)\n"
ALONE = """
import os, sys, warnings
os.chdir({folder!r})
for number, text in {texts!r}:
    exec(compile(text, f"block {{number}}", "exec"), {{"__name__": "__main__"}})
    if "flash_attn_compat" in sys.modules:
        sys.modules["flash_attn_compat"].unpatch()
"""

with_python = [page for page in PAGES if any(blocks(page, "python"))]


def absent_modules(text: str) -> set[str]:
    """Return the modules that the block imports at its top level and that are not installed."""
    tops = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in tops if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in tops if isinstance(node, ast.ImportFrom) and node.module}
    roots = {name.partition(".")[0] for name in names} - {"flash_attn"}  # which `patch` brings
    return {root for root in roots if importlib.util.find_spec(root) is None}


def runs(text: str) -> bool:
    return not any(phrase in text for phrase in PYTHON_NOT_RUN)


def commands_to_run(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(line for line in lines if not any(re.search(pattern, line) for pattern in COMMANDS_NOT_RUN))


SCRIPTS = [script for page in PAGES for text in blocks(page, "bash") if (script := commands_to_run(text).strip())]
# The tests of doctor run README's first command, and lines of two pages differ from README's second one in options.
LATE = [script for script in SCRIPTS if re.match("flash-attn-compat (doctor|run (--|train.py --))", script)]


@pytest.mark.parametrize("page", with_python, ids=named)
def test_each_python_block_of_a_page_runs_alone(page: Path, tmp_path: Path) -> None:
    """Each block has names of its own, and no block finds the name flash_attn that an earlier block has patched."""
    texts = [(number, text) for number, text in enumerate(blocks(page, "python"), 1) if runs(text)]
    absent = {number: missing for number, text in texts if (missing := absent_modules(text))}
    there = [(number, text) for number, text in texts if number not in absent]
    (tmp_path / "my_kernel.py").touch()
    done = forked(ALONE.format(folder=str(tmp_path), texts=there))
    assert done.returncode == 0, done.stderr
    if absent:
        pytest.skip(f"blocks with modules that are not installed: {absent}")


@pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("script", all_but_thorough(SCRIPTS, LATE))
def test_each_block_of_commands_of_a_page_runs_alone(script: str, tmp_path: Path) -> None:
    """Lines that cannot run here are left out; the others of a block run in an empty folder with a train.py."""
    (tmp_path / "train.py").write_text(TRAIN)
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "COLUMNS": "120",
    }
    command = ["bash", "-euo", "pipefail", "-c", script.replace(".venv/bin/python", "python")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_readmes_first_block_ends_with_a_command_that_this_file_runs() -> None:
    first = next(blocks(ROOT / "README.md", "bash"))
    assert commands_to_run(first).startswith("flash-attn-compat doctor")


def test_each_reason_not_to_run_a_block_concerns_a_block() -> None:
    python = [text for page in PAGES for text in blocks(page, "python")]
    commands = [line for page in PAGES for text in blocks(page, "bash") for line in text.splitlines()]
    assert [phrase for phrase in PYTHON_NOT_RUN if not any(phrase in text for text in python)] == []
    assert [pattern for pattern in COMMANDS_NOT_RUN if not any(re.search(pattern, line) for line in commands)] == []


@pytest.mark.parametrize("text", ["print(q)\n", "import flash_attn.bert_padding\n"], ids=["a name", "a patch"])
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn needs no patch here")
def test_a_block_that_needs_an_earlier_one_fails(text: str, tmp_path: Path) -> None:
    first = textwrap.dedent("""
        import flash_attn_compat
        flash_attn_compat.patch()
        q = 1
    """)
    done = forked(ALONE.format(folder=str(tmp_path), texts=[(1, first), (2, text)]))
    assert done.returncode == 1 and "block 2" in done.stderr


# ---------------------------------------------------------------- CI runs with empty caches

FILES = {
    "pyproject.toml": 'version = "1.2.3"\nRepository = "https://somewhere/repository"\n',
    "flash_attn_compat/__init__.py": '__version__ = "1.2.3"\n',
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-11-23)\n\n- New.\n\nMore.\n\n## 1.2.2 (2026-01-01)\n\n- Old.\n",
}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_file(ROOT / ".ci/release_notes.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_consistent_release_has_the_newest_section_of_the_changelog(release: ModuleType, root: Path) -> None:
    assert list(release.against("v1.2.3", root)) == []
    assert release.notes(root) == "- New.\n\nMore.\n"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("pyproject.toml", "1.2.3", "1.2.4", "pyproject.toml has version 1.2.4, the tag is v1.2.3"),
        ("flash_attn_compat/__init__.py", "1.2.3", "1.2.2", "__init__.py has version 1.2.2"),
        ("pyproject.toml", "somewhere", "example.org", "the placeholder example.org"),
        ("CHANGELOG.md", "1.2.3 (2026-11-23)", "Unreleased", "begins with '## Unreleased'"),
        ("CHANGELOG.md", "1.2.3 (2026-11-23)", "1.2.3", "not with '## 1.2.3 (YYYY-MM-DD)'"),
    ],
)
def test_an_inconsistent_release_is_refused_by_name(
    name: str, old: str, new: str, said: str, release: ModuleType, root: Path
) -> None:
    (root / name).write_text(FILES[name].replace(old, new))
    (reason,) = release.against("v1.2.3", root)
    assert said in reason


def test_a_tag_that_is_no_version_is_refused(release: ModuleType, root: Path) -> None:
    assert "v1.2.3rc1" in next(release.against("1.2.3", root))


def test_today_only_what_a_release_changes_is_missing(release: ModuleType) -> None:
    """Both versions are the same, and say what the next release will be."""
    import flash_attn_compat

    reasons = list(release.against(f"v{flash_attn_compat.__version__}", ROOT))
    assert not any("has version" in reason for reason in reasons), reasons


# ---------------------------------------------------------------- a fresh machine

FRESH = ("HOME", "XDG_CACHE_HOME", "FLASH_ATTN_COMPAT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR", "TMPDIR")
TOLD = f"""
import json, os, tempfile
from pathlib import Path
folders = [os.environ[name] for name in {FRESH}]
contents = [os.listdir(folder) for folder in folders]
Path(tempfile.gettempdir(), "left").touch()
print(json.dumps([folders, contents, str(Path.home()), tempfile.gettempdir(), dict(os.environ)]))
raise SystemExit(7)
"""


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_fresh_command_finds_empty_folders_which_are_gone_after_it(tmp_path: Path) -> None:
    outside = {name: str(tmp_path) for name in FRESH}
    env = {**os.environ, **outside, "TRITON_CACHE_DIR": str(tmp_path), "PIP_INDEX_URL": "https://mirror"}
    pip = tmp_path / ".config/pip/pip.conf"
    pip.parent.mkdir(parents=True)
    pip.touch()
    for name in ("PIP_CONFIG_FILE", "PIP_CACHE_DIR", "XDG_CONFIG_HOME"):
        env.pop(name, None)
    command = [ROOT / ".ci/fresh", sys.executable, "-c", TOLD]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    folders, contents, home, temporary, inside = json.loads(done.stdout)
    assert len({str(tmp_path), *folders}) == 1 + len(FRESH) and contents == [[]] * len(FRESH)
    assert (home, temporary) == (folders[0], folders[-1])
    assert not any(map(os.path.exists, folders)) and os.listdir(tmp_path) == [".config"]
    assert "TRITON_CACHE_DIR" not in inside
    assert inside["PIP_INDEX_URL"] == "https://mirror"
    assert inside["PIP_CONFIG_FILE"] == str(pip) and inside["PIP_CACHE_DIR"] == f"{tmp_path}/pip"


def test_all_steps_of_ci_run_in_the_fresh_folders() -> None:
    """The script hands itself over before its first step."""
    script = (ROOT / ".ci/run").read_text()
    assert "exec .ci/fresh .ci/run --here" in script.partition("\nstep ")[0]


# ---------------------------------------------------------------- the workflows

WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
each_workflow = pytest.mark.parametrize("name", WORKFLOWS)


@each_workflow
def test_a_workflow_may_only_read_unless_one_of_its_jobs_says_otherwise(name: str) -> None:
    assert "\npermissions:\n  contents: read\njobs:\n" in WORKFLOWS[name]


@each_workflow
def test_a_workflow_runs_each_action_at_one_commit_and_says_its_version(name: str) -> None:
    used = re.findall(r"uses: (.*)", WORKFLOWS[name])
    assert used and not [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one)]


def test_all_workflows_run_the_same_commit_of_an_action() -> None:
    used = {one for text in WORKFLOWS.values() for one in re.findall(r"uses: (.*)", text)}
    assert len(used) == len({one.partition("@")[0] for one in used})


def test_a_change_starts_ci_once_and_a_tag_starts_the_release_alone() -> None:
    """A push to a branch with a pull request would otherwise run everything twice."""
    triggers = {name: text.partition("\non:\n")[2].partition("\npermissions:")[0] for name, text in WORKFLOWS.items()}
    assert triggers["ci.yml"] == "  push:\n    branches: [main]\n  pull_request:"
    assert [name for name, text in triggers.items() if "push:" in text] == ["ci.yml", "release.yml"]
    assert '  push:\n    tags: ["v*"]\n' in triggers["release.yml"]


def test_the_weekly_workflow_runs_all_tests_with_a_cuda_build_of_the_newest_torch_and_no_driver() -> None:
    weekly = [text for text in WORKFLOWS.values() if "schedule:" in text]
    (job,) = [job for text in weekly for job in re.split(r"\n  (?=\w)", text) if "--upgrade torch" in job]
    assert "assert torch.version.cuda and not torch.cuda.is_available()" in job and "constraints" not in job
    assert "run: python -m pytest\n" in job and "run: python -m verify --quick\n" in job
