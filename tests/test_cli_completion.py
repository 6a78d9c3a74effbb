"""hf-paged completion: the scripts complete what the parser knows, and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hf_paged_cli.completion import FILES
from hf_paged_cli.main import main
from hf_paged_cli.parser import SHELLS, parser


def test_completion_knows_commands_and_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "complete"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = f'source {script}; COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _shtab_hf_paged; echo "${{COMPREPLY[@]}}"'
        return subprocess.run([bash, "-c", line], capture_output=True, text=True, check=True).stdout.split()

    assert completed("hf-paged", "tr") == ["trace"]
    assert completed("hf-paged", "serve", "--lora") == ["--lora-modules"]
    assert "--system" in completed("hf-paged", "chat", "demo", "--s")
    assert completed("hf-paged", "serve", "demo", "--kernels", "tr") == ["triton"]
    assert completed("hf-paged", "serve", "demo", "--chat-template", f"{tmp_path}/com") == [str(script)]
    assert completed("hf-paged", "trace", f"{tmp_path}/com") == [str(script)]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert "tensor-parallel-size" in said
    assert "trace" in said


def test_paths_are_those_of_arguments() -> None:
    assert {action.dest for command in parser()[1].values() for action in command._actions} >= FILES
