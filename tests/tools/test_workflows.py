"""The workflows for GitHub's runners: sound by the tools of others, and calling what they say they call."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/test.yml"
each_workflow = pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name
)


def lint(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / tool
    return subprocess.run([str(program), *arguments], text=True, capture_output=True, check=False)


def schema_errors(workflow: Path) -> str:
    """Of check-jsonschema, with the schemas that it carries: GitHub's, and that each job has a time limit."""
    schemas = ("vendor.github-workflows", "custom.github-workflows-require-timeout")
    finished = [lint("check-jsonschema", "--builtin-schema", schema, str(workflow)) for schema in schemas]
    return "".join(process.stdout + process.stderr for process in finished if process.returncode != 0)


def findings(workflow: Path) -> str:
    """Of zizmor, a linter that reads expressions and knows what they may be misused for; without network."""
    process = lint("zizmor", "--offline", "--no-progress", "--strict-collection", "--pedantic", str(workflow))
    return process.stdout + process.stderr if process.returncode != 0 else ""


@each_workflow
def test_no_schema_error(workflow: Path) -> None:
    assert not schema_errors(workflow)


@each_workflow
def test_no_finding(workflow: Path) -> None:
    assert not findings(workflow)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("runs-on: ubuntu-24.04", "runs_on: ubuntu-24.04", "runs-on"),
        ("    timeout-minutes: 120\n", "", "timeout-minutes"),
        ("run: make test", "runs: make test", "run"),
    ],
)
def test_a_broken_workflow_has_schema_errors(tmp_path: Path, old: str, new: str, words: str) -> None:
    (tmp_path / "test.yml").write_text(changed(old, new))
    assert words in schema_errors(tmp_path / "test.yml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("run: make test", "run: echo ${{ github.head_ref }}", "template-injection"),
        ("  contents: read", "  contents: write", "excessive-permissions"),
        ("@1af3b93b6815bc44a9784bd300feb67ff0d1eeb3 #", "@main #", "unpinned-uses"),
    ],
)
def test_a_careless_workflow_has_findings(tmp_path: Path, old: str, new: str, words: str) -> None:
    folder = tmp_path / ".github/workflows"
    folder.mkdir(parents=True)
    (folder / "test.yml").write_text(changed(old, new))
    assert words in findings(folder / "test.yml")


def changed(old: str, new: str) -> str:
    text = WORKFLOW.read_text()
    assert old in text, f"no {old!r} in the workflow"
    return text.replace(old, new, 1)


def steps(job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text())["jobs"][job]["steps"]
    return found


@pytest.mark.parametrize("job", ["linux", "macos"])
def test_a_job_runs_the_readmes_test_command_and_the_check(job: str) -> None:
    commands = [step["run"] for step in steps(job) if "run" in step]
    assert "make test" in commands
    assert "    make test" in (ROOT / "README.md").read_text()
    (check,) = [command for command in commands if "torch_gdn.check" in command]
    assert ("-m mps_simulator" in check) == (job == "linux")


@pytest.mark.parametrize("job", ["linux", "macos"])
def test_a_job_uploads_the_report_that_the_check_wrote(job: str) -> None:
    (check,) = [step["run"] for step in steps(job) if "torch_gdn.check" in step.get("run", "")]
    (upload,) = [step for step in steps(job) if "upload-artifact" in step.get("uses", "")]
    assert check.split("--json ")[1] == upload["with"]["path"]
    assert "cancelled()" in upload["if"]  # a failed check's report is the one that is wanted


def test_the_mac_is_of_apple_silicon_and_can_be_chosen() -> None:
    runner = yaml.safe_load(WORKFLOW.read_text())["jobs"]["macos"]["runs-on"]
    assert runner == "${{ vars.MACOS_RUNNER || 'macos-15' }}"
